"""What can be had back from a damaged database, without the sqlite3 shell.

The shell's `.recover` needs a module that Debian's build lacks.  Instead every table is read from its first key up
until an error, then from its last key down: a smashed page in the middle costs the rows on it and little else.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from gemmtuned.db import migrations

# Parents before children, so that foreign keys hold while rows arrive.
TABLES: Final = (
    "problem", "device", "environment", "environment_stamp", "run", "publication",
    "sighting", "demand", "work", "trial", "solution", "quarantine", "session",
)  # fmt: skip


def set_aside(path: Path) -> Path:
    """Rename the database, its log and its shared memory; the caller holds the lock. Returns the new name."""
    when = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
    aside = path.with_name(f"{path.name}.corrupt-{when}")
    for end in ("-wal", "-shm"):  # before the database: a new one must not find an old log
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + end).rename(f"{aside}{end}")
    path.rename(aside)
    return aside


def copy(aside: Path, new: sqlite3.Connection) -> int:
    """Copy every row that can still be read into the new, empty database. Returns how many."""
    with tempfile.TemporaryDirectory(dir=aside.parent, prefix=".salvage-") as folder:
        work = Path(folder) / "copy.db"  # the file set aside stays as it was found
        shutil.copyfile(aside, work)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(f"{aside}-wal", f"{work}-wal")
        _mend_header(work)
        try:
            old = sqlite3.connect(work, isolation_level=None)
            old.text_factory = lambda data: data.decode(errors="replace")
            try:
                return _copy_tables(old, new)
            finally:
                old.close()
        except sqlite3.Error:
            return 0


def _copy_tables(old: sqlite3.Connection, new: sqlite3.Connection) -> int:
    rows = 0
    new.execute("BEGIN IMMEDIATE")
    try:
        for table in TABLES:
            columns = [name for name in _columns(new, table) if name in _columns(old, table)]
            if not columns:
                continue
            names = ", ".join(f'"{name}"' for name in columns)
            insert = f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({', '.join('?' * len(columns))})"  # noqa: S608
            for row in _readable(old, table, names):
                with contextlib.suppress(sqlite3.IntegrityError):
                    rows += new.execute(insert, row).rowcount
        _balance(new)
        new.execute("COMMIT")
    except BaseException:
        if new.in_transaction:
            new.execute("ROLLBACK")
        raise
    return rows


def _readable(old: sqlite3.Connection, table: str, names: str) -> Iterator[tuple[Any, ...]]:
    """Rows of a table up to the first damage, then backwards from the end; some may come twice."""
    key = ", ".join(_key(old, table)) or "rowid"
    for order in (key, ", ".join(f"{part} DESC" for part in key.split(", "))):
        try:
            yield from old.execute(f"SELECT {names} FROM {table} ORDER BY {order}")  # noqa: S608
        except sqlite3.Error:
            continue
        return  # read to its end: no second pass needed


def _columns(conn: sqlite3.Connection, table: str) -> list[str]:
    try:
        return [str(row[1]) for row in conn.execute(f"PRAGMA table_info({table})")]
    except sqlite3.Error:
        return []


def _key(conn: sqlite3.Connection, table: str) -> list[str]:
    info = conn.execute(f"PRAGMA table_info({table})").fetchall()
    return [str(row[1]) for row in sorted(info, key=lambda row: row[5]) if row[5]]


def _balance(new: sqlite3.Connection) -> None:
    """Make `demand` agree with the sightings that are left, so that the ledger holds again."""
    new.execute(
        "INSERT INTO demand SELECT problem_id, environment_id, sum(calls), "
        "sum(sampled_calls * (outcome = 'miss')), sum(sampled_us * (outcome = 'miss')), "
        "min(hour) * 3600000000, max(last_seen_us) FROM sighting WHERE true GROUP BY problem_id, environment_id "
        "ON CONFLICT DO UPDATE SET calls = excluded.calls"
    )
    new.execute(
        "UPDATE demand SET calls = 0 WHERE NOT EXISTS (SELECT 1 FROM sighting s "
        "WHERE s.problem_id = demand.problem_id AND s.environment_id = demand.environment_id)"
    )


def _mend_header(path: Path) -> None:
    """Put back the first 100 bytes when they are not a SQLite header; the rest of page 1 is then often whole.

    They are the same in every database we make, but for counters that SQLite recomputes when they disagree.
    """
    with path.open("r+b") as file:
        if file.read(16) == b"SQLite format 3\0":
            return
        template = path.with_name("template.db")
        with contextlib.closing(sqlite3.connect(template, isolation_level=None)) as conn:
            conn.execute("PRAGMA journal_mode = WAL").fetchall()
            migrations.apply(conn)
        header = bytearray(template.read_bytes()[:100])
        header[28:40] = bytes(12)  # size in pages (0: take the file's), free list
        header[92:96] = bytes(4)  # version-valid-for: different from the change counter
        file.seek(0)
        file.write(header)
