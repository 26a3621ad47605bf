"""Looking after a database file: is it whole, and a copy of it. Reads only, and never mends."""

from __future__ import annotations

import os
import sqlite3
from datetime import datetime, timezone
from pathlib import Path

from gemmtuned.configs.errors import StoreError
from gemmtuned.db import faults, migrations
from gemmtuned.db.files import connect_read_only


def check(path: Path) -> list[str]:
    """Everything found wrong with the file, one line each; [] when it is whole."""
    found = damage(path)
    if found:
        return found
    conn = connect_read_only(path, 30.0)
    try:
        application, version = migrations.identity(conn)
        if application != migrations.APPLICATION_ID:
            return [f"{path}: not a gemmtuned database (application id {application:#x})"]
        if version < migrations.SCHEMA:
            return [f"schema {version}, not yet {migrations.SCHEMA}: the next program to write brings it up to date"]
        found = [
            f"row {row[1]} of {row[0]} names no row of {row[2]}"
            for row in conn.execute("PRAGMA foreign_key_check").fetchall()
        ]
        wrong = conn.execute(
            "SELECT count(*) FROM demand d WHERE d.calls != (SELECT coalesce(sum(s.calls), 0) FROM sighting s "
            "WHERE s.problem_id = d.problem_id AND s.environment_id = d.environment_id)"
        ).fetchone()[0]
        if wrong:
            found.append(f"{wrong} problems whose calls differ from the sum of their sightings")
        return found
    except (sqlite3.Error, UnicodeDecodeError) as err:
        return [str(faults.store_error(err, path))]
    finally:
        conn.close()


def damage(path: Path) -> list[str]:
    """What is wrong with its pages and its list of tables; [] when nothing."""
    try:
        conn = connect_read_only(path, 30.0)
    except StoreError as err:
        return [str(err)]
    try:
        found = [str(row[0]) for row in conn.execute("PRAGMA integrity_check(20)").fetchall() if row[0] != "ok"]
        if migrations.identity(conn)[0] == migrations.APPLICATION_ID and migrations.altered(conn):
            found.append("its tables or views are not as gemmtuned made them")
        if not found:
            _decode(conn)
        return found
    except (sqlite3.Error, UnicodeDecodeError) as err:
        return [str(faults.store_error(err, path))]
    finally:
        conn.close()


def _decode(conn: sqlite3.Connection) -> None:
    """Read every row: text that is no UTF-8 passes SQLite's own check, and then fails whoever asks for it."""
    tables = conn.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'").fetchall()
    for (table,) in tables:
        for _ in conn.execute(f'SELECT * FROM "{table}"'):  # noqa: S608
            pass


def backup(path: Path, to: Path, *, timeout_s: float) -> Path:
    """Write a consistent copy, while others go on writing. `to`: a file, or a folder to name one in. Returns it."""
    if to.is_dir():
        to = to / f"{path.stem}-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}{path.suffix}"
    temporary = to.with_name(f".{to.name}.{os.getpid()}.tmp")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        conn = connect_read_only(path, timeout_s)
        try:
            conn.execute("VACUUM INTO ?", (str(temporary),))
        finally:
            conn.close()
        temporary.chmod(path.stat().st_mode & 0o777)
        _sync(temporary)
        temporary.replace(to)
        _sync(to.parent)
    except (sqlite3.Error, UnicodeDecodeError, OSError) as err:
        raise faults.store_error(err, to, waited_s=timeout_s) from err
    finally:
        temporary.unlink(missing_ok=True)
    return to


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
