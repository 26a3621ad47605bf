"""What can be had back from a damaged database, without the sqlite3 shell.

The shell's `.recover` needs a module that Debian's build lacks.  Instead every table is read from its first key up
until an error, then from its last key down, then key by key: a smashed page costs the rows on it and little else.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from gemmtuned._testing import faults
from gemmtuned.db import migrations

_ROWS: Final = 500  # between two beats
# Parents before children, so that foreign keys hold while rows arrive.
TABLES: Final = (
    "problem", "device", "environment", "environment_stamp", "run", "publication",
    "sighting", "sighting_before", "demand", "taken", "ingest_file", "ingest_row", "ingest_new",
    "compiled_gemm", "phase_call", "work", "trial", "solution", "quarantine", "session", "hint", "tunable",
    "fleet", "fleet_position", "fleet_claim", "fleet_listed", "fleet_result", "fleet_shared",
)  # fmt: skip


def copy(
    damaged: Callable[[Path], None], folder: Path, new: sqlite3.Connection, beat: Callable[[], None]
) -> tuple[int, int, bool]:
    """Copy every row that can still be read into the new, empty database, and bring that up to our schema.

    A file of an older version is read into its own schema first: the steps since change what rows say.
    damaged: makes a copy of the damaged file at a path.  beat: called every few milliseconds, may raise to end it.
    Returns how many rows there are, how many counted calls are lost by the ledger that is left, and whether all of the
    ledger is left: else more may be lost.
    """
    work = folder / "copy.db"
    mends = (_nothing, _mend_header, _mend_schema, _drop_log, _nothing)
    for number, mend in enumerate(mends, 1):  # until its list of tables is whole; as it lies when nothing helps
        damaged(work)
        size = work.stat().st_size
        mend(work)
        with contextlib.closing(sqlite3.connect(work, isolation_level=None)) as old:
            old.text_factory = lambda data: data.decode(errors="replace")
            if number == len(mends) or _sound(old):
                whole = _has_whole_ledger(old, size)
                return *_copy_tables(old, new, beat), whole
    raise AssertionError("unreachable")


def _sound(old: sqlite3.Connection) -> bool:
    try:
        older = migrations.steps_of(old) < migrations.SCHEMA
        return bool(_columns(old, TABLES[0])) and (older or not migrations.altered(old))
    except (sqlite3.Error, UnicodeDecodeError):
        return False


def _has_whole_ledger(old: sqlite3.Connection, size: int) -> bool:
    """Whether each row of `demand` can be read, and none lay beyond the end of a file of `size` bytes."""
    try:
        (root,) = old.execute("SELECT rootpage FROM sqlite_master WHERE name = 'demand'").fetchone()
        (page,) = old.execute("PRAGMA page_size").fetchone()
        old.execute("SELECT total(calls) FROM demand NOT INDEXED").fetchone()
    except (sqlite3.Error, UnicodeDecodeError, TypeError):
        return False
    return bool(root * page <= size)


def _copy_tables(old: sqlite3.Connection, new: sqlite3.Connection, beat: Callable[[], None]) -> tuple[int, int]:
    rows = read = 0
    ledger: dict[tuple[Any, ...], Any] = {}  # calls of each problem and environment, by `demand` as far as it is left
    twins = _Twins()
    steps = migrations.steps_of(old)
    new.execute("BEGIN IMMEDIATE")
    try:
        migrations.make(new, to=steps)
        for table in TABLES:
            columns = [name for name in _columns(new, table) if name in _columns(old, table)]
            if not columns:
                continue
            names = ", ".join(f'"{name}"' for name in columns)
            kinds = _kinds(new, table, columns)
            insert = f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({', '.join('?' * len(columns))})"  # noqa: S608
            for row in _readable(old, new, table, names):
                read += 1
                if table == "demand":
                    values = dict(zip(columns, row, strict=True))
                    ledger[values["problem_id"], values["environment_id"]] = values["calls"]
                if read % _ROWS == 0:
                    beat()
                entry = twins.translated(columns, row)
                added = _insert(new, insert, entry) or _insert(new, insert, _fitted(entry, kinds))
                rows += added
                if not added:
                    twins.met(new, table, columns, row, entry)
        migrations.make(new, since=steps)
        new.execute(f"PRAGMA application_id = {migrations.APPLICATION_ID}")
        new.execute(f"PRAGMA user_version = {migrations.SCHEMA}")
        faults.point("salvage.balance")
        _balance(new)
        (left,) = new.execute("SELECT total(calls) FROM demand").fetchone()
        faults.point("salvage.commit")
        new.execute("COMMIT")
    except BaseException:
        if new.in_transaction:
            new.execute("ROLLBACK")
        raise
    counted = sum(calls for calls in ledger.values() if isinstance(calls, int))
    return rows, max(counted - int(left), 0)


def _insert(new: sqlite3.Connection, insert: str, entry: tuple[Any, ...] | None) -> int:
    """How many rows that added: 0 when it is there already, or is refused."""
    if entry is None:
        return 0
    try:
        return new.execute(insert, entry).rowcount
    except sqlite3.IntegrityError:
        return 0


_EMPTY: Final = {"INTEGER": 0, "REAL": 0.0, "TEXT": ""}
_MAY_STAND: Final = {"INTEGER": (int,), "REAL": (int, float), "TEXT": (str,), "BLOB": (bytes,), "": (object,)}


def _kinds(new: sqlite3.Connection, table: str, columns: list[str]) -> list[tuple[str, bool]]:
    """The type of each of these columns, "" for one of the key, and whether it may hold NULL."""
    found = {}
    for _, name, kind, never_null, _, in_key in new.execute(f"PRAGMA table_info({table})").fetchall():
        found[str(name)] = ("" if in_key else str(kind), not never_null)
    return [found[name] for name in columns]


def _fitted(entry: tuple[Any, ...], kinds: list[tuple[str, bool]]) -> tuple[Any, ...] | None:
    """The row, with what is empty for each value that is not of its column's type; None where there is none such.

    One byte that says of which type a value is would else cost all that refers to the row: a device, all its counts.
    """
    changed = [
        value if (value is None and nullable) or isinstance(value, _MAY_STAND[kind]) else _EMPTY.get(kind, b"")
        for value, (kind, nullable) in zip(entry, kinds, strict=True)
    ]
    return tuple(changed) if tuple(changed) != entry else None


class _Twins:
    """Rows that are there twice under two numbers: a damaged index once let the same thing in again.

    The first one stays, and what refers to the second is made to refer to the first; counts of both add up.
    """

    _NAMED: Final = {"problem": ("rest", "m"), "device": ("key",), "environment": ("key",), "run": ("name",)}

    def __init__(self) -> None:
        self._first: dict[str, dict[int, int]] = {}  # by column that refers to them, then by number of the second
        self._added: set[tuple[Any, ...]] = set()  # rows may be read twice

    def translated(self, columns: list[str], row: tuple[Any, ...]) -> tuple[Any, ...]:
        """The row with the first one's number wherever it refers to a second."""
        if not self._first:
            return row
        return tuple(self._first.get(name, {}).get(value, value) for name, value in zip(columns, row, strict=True))

    def met(
        self, new: sqlite3.Connection, table: str, columns: list[str], row: tuple[Any, ...], entry: tuple[Any, ...]
    ) -> None:
        """The row `entry`, read as `row`, is there already."""
        values = dict(zip(columns, entry, strict=True))
        if table in ("sighting", "sighting_before") and row != entry and row not in self._added:
            self._added.add(row)
            keys = ("problem_id", "environment_id", "run_id", "hour", "outcome", "graph")
            sums = ("calls", "sampled_calls", "sampled_us")
            new.execute(
                f"UPDATE {table} SET {', '.join(f'{name} = {name} + ?' for name in sums)} "  # noqa: S608
                f"WHERE {' AND '.join(f'{name} = ?' for name in keys)}",
                [values[name] for name in (*sums, *keys)],
            )
        names = self._NAMED.get(table, ())
        if not names:
            return
        where = " AND ".join(f"{name} IS ?" for name in names)
        found = new.execute(f"SELECT id FROM {table} WHERE {where}", [values[name] for name in names]).fetchone()  # noqa: S608
        if found is not None and found[0] != values["id"]:
            self._first.setdefault(f"{table}_id", {})[values["id"]] = found[0]


def _readable(old: sqlite3.Connection, new: sqlite3.Connection, table: str, names: str) -> Iterator[tuple[Any, ...]]:
    """Rows of a table up to the first damage, then backwards from the end, then key by key; some come twice."""
    select = f"SELECT {names} FROM {table}"  # noqa: S608
    keys = _key(old, table)
    for order in (", ".join(keys), ", ".join(f"{key} DESC" for key in keys)):
        try:
            yield from old.execute(f"{select} ORDER BY {order}")
        except sqlite3.Error:
            continue
        return  # read to its end: no other pass needed
    by = "problem_id" if "problem_id" in keys else keys[0]
    of = "problem.id" if by == "problem_id" else f"{table}.{by}"
    last = new.execute(f"SELECT max({of}) FROM {of.split('.')[0]}").fetchone()[0]  # noqa: S608
    environments = [0]
    if keys[0] == "environment_id":
        environments = [i for (i,) in new.execute("SELECT id FROM environment").fetchall()]
    for number in range(1, last + 1 if isinstance(last, int) else 1):
        for environment in environments:
            where = f"{by} = {number}" + (f" AND environment_id = {environment}" if environment else "")
            with contextlib.suppress(sqlite3.Error):
                yield from old.execute(f"{select} WHERE {where}").fetchall()


def _columns(conn: sqlite3.Connection, table: str) -> list[str]:
    try:
        return [str(row[1]) for row in conn.execute(f"PRAGMA table_info({table})")]
    except (sqlite3.Error, UnicodeDecodeError):
        return []


def _key(conn: sqlite3.Connection, table: str) -> list[str]:
    info = conn.execute(f"PRAGMA table_info({table})").fetchall()
    return [str(row[1]) for row in sorted(info, key=lambda row: row[5]) if row[5]]


def _balance(new: sqlite3.Connection) -> None:
    """Make `demand` agree with the sightings that are left, so that the ledger holds again."""
    new.execute(
        "INSERT INTO demand (problem_id, environment_id, calls, sampled_calls, sampled_us, first_seen_us, "
        "last_seen_us) SELECT problem_id, environment_id, sum(calls), "
        "sum(sampled_calls * (outcome = 'miss')), sum(sampled_us * (outcome = 'miss')), "
        "min(hour) * 3600000000, max(last_seen_us) FROM every_sighting WHERE true GROUP BY problem_id, environment_id "
        "ON CONFLICT DO UPDATE SET calls = excluded.calls"
    )
    new.execute(
        "UPDATE demand SET calls = 0 WHERE (problem_id, environment_id) NOT IN "
        "(SELECT problem_id, environment_id FROM every_sighting)"
    )
    new.execute(
        "UPDATE demand SET solution_id = (SELECT l.solution_id FROM look_up l "
        "WHERE l.problem_id = demand.problem_id AND l.environment_id = demand.environment_id)"
    )


def _nothing(work: Path) -> None:
    pass


def _mend_header(work: Path) -> None:
    """Put back the first 100 bytes; the rest of page 1 is then often whole.

    They are the same in every database we make, but for counters that SQLite recomputes when they disagree.
    """
    with work.open("r+b") as file:
        file.write(_template(work)[1][:100])


def _mend_schema(work: Path) -> None:
    """Put back the pages that list the tables: they have the same numbers in every database we make."""
    pages = _template(work)
    _lengthen(work)
    for page, data in pages.items():
        with work.open("r+b") as file:
            file.seek((page - 1) * len(data))
            file.write(data)


def _lengthen(work: Path) -> None:
    """Give a file that was cut short the pages that it lacks of the fresh one that lies beside it.

    SQLite reads no table at all while the first page of one of them, or of an index, lies beyond the file's end.
    """
    fresh = work.with_name("fresh.db").read_bytes()
    size = int.from_bytes(fresh[16:18], "big")
    whole = work.stat().st_size // size * size
    if whole < len(fresh):
        with work.open("r+b") as file:
            file.seek(whole)
            file.write(fresh[whole:])


def _drop_log(work: Path) -> None:
    """As _mend_schema, for when the log holds the damaged pages."""
    work.with_name(work.name + "-wal").unlink(missing_ok=True)
    _mend_schema(work)


def _template(work: Path) -> dict[int, bytes]:
    """The pages of a fresh database that belong to no table or index, which are the schema's, by number."""
    fresh = work.with_name("fresh.db")
    if not fresh.exists():
        with contextlib.closing(sqlite3.connect(fresh, isolation_level=None)) as conn:
            conn.execute("PRAGMA journal_mode = WAL").fetchall()
            migrations.apply(conn)
    with contextlib.closing(sqlite3.connect(fresh)) as conn:
        roots = {row[0] for row in conn.execute("SELECT rootpage FROM sqlite_master").fetchall()}
        size = conn.execute("PRAGMA page_size").fetchone()[0]
    data = fresh.read_bytes()
    roots |= _free_pages(data, size)  # a step that dropped something left them; rows may lie there by now
    first = bytearray(data[:size])
    first[28:40] = bytes(12)  # size in pages (0: take the file's), free list
    first[92:96] = bytes(4)  # version-valid-for: different from the change counter
    pages = {n: data[(n - 1) * size : n * size] for n in range(2, len(data) // size + 1) if n not in roots}
    return {1: bytes(first), **pages}


def _free_pages(data: bytes, size: int) -> set[int]:
    """Numbers of a database's free pages: a chain of trunks, each with a list (sqlite.org/fileformat2.html, 1.5)."""
    found: set[int] = set()
    trunk = int.from_bytes(data[32:36], "big")
    while trunk and trunk not in found:
        page = data[(trunk - 1) * size : trunk * size]
        count = int.from_bytes(page[4:8], "big")
        found |= {trunk, *(int.from_bytes(page[8 + 4 * i : 12 + 4 * i], "big") for i in range(count))}
        trunk = int.from_bytes(page[:4], "big")
    return found
