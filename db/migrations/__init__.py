"""The schema, step by step: NNNN_name.sql beside this file, applied once each, in order of their numbers.

A new file is made from schema.sql, which holds what all steps leave (whole.py writes it): it has the same objects and
records the same steps.  A step and the row that records it are one transaction under BEGIN IMMEDIATE and the lock
file, so any number of starting processes apply it once and a failing step leaves nothing behind.

A step that is on the main branch is never edited, renamed or merged with its neighbours, whether or not a version with
it was released: 0020 and those after it came after 0.2.0 was cut, but a home made by any commit since has recorded the
steps that were there by name, and their number.  Of a merged step it would run all that it has once more, and a count
that became smaller would make its database one of a newer version.  Nothing would be won: a new file is made from
schema.sql, and runs none of them.

`user_version` is the number of steps applied, so that a process that has nothing to do finds out with one PRAGMA.
sqlite-utils (it brings pandas where that is installed) is imported for a file of an older version alone, and that is
the daemon's and the commands' to bring up to date.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gemmtuned.configs import clock
from gemmtuned.configs.errors import StoreError

if TYPE_CHECKING:
    from sqlite_utils import Database

APPLICATION_ID: Final = 0x474D5455  # "GMTU": tells our file from any other SQLite database
_FILES: Final = sorted(
    name
    for name in os.listdir(os.path.dirname(__file__))  # noqa: PTH208, PTH120  in each start of each program
    if name[:4].isdecimal() and name[4:5] == "_" and name.endswith(".sql")
)
SCHEMA: Final = len(_FILES)
NEXT: Final = "\n-- next\n"  # between the statements of schema.sql
_MOST_STEPS: Final = 10_000  # a damaged header may say any number
# Two steps had one number once. A database that ran them under their old names learns the new ones: it runs none twice
_RENAMED: Final = (("0015_summaries", "0016_summaries"), ("0016_identity", "0017_identity"))
_RECORD: Final = (  # as sqlite-utils makes it, to the letter
    """CREATE TABLE "_sqlite_migrations" (
   "id" INTEGER PRIMARY KEY,
   "migration_set" TEXT,
   "name" TEXT,
   "applied_at" TEXT
)""",
    """CREATE UNIQUE INDEX "idx__sqlite_migrations_migration_set_name"
    ON "_sqlite_migrations" ("migration_set", "name")""",
)


def __getattr__(name: str) -> Any:
    """`STEPS`, the files of the steps: a program with a database that is up to date needs none of them."""
    if name != "STEPS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    folder = Path(__file__).parent
    steps = globals()["STEPS"] = tuple(folder / file for file in _FILES)
    return steps


def _steps() -> tuple[Path, ...]:
    return sys.modules[__name__].STEPS  # type: ignore[no-any-return]


def pending(conn: sqlite3.Connection, path: Path) -> bool:
    """True when the schema must be made or brought up to date.

    Raises StoreError when the file is somebody else's, or was written by a newer version of us.
    """
    application, version = identity(conn)
    filled = application != APPLICATION_ID and conn.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if filled:  # perhaps since a moment ago, by another process of ours
        application, version = identity(conn)
    if application == APPLICATION_ID:
        if version > SCHEMA:
            raise StoreError(too_new(path, version))
        return version < SCHEMA
    if application != 0 or filled:
        raise StoreError(
            f"{path}: a SQLite database of another program. Move it away, or set GEMMTUNED_DB to another file"
        )
    return True


def is_empty(conn: sqlite3.Connection, path: Path) -> bool:
    """True when the file is made and not yet filled: a program is starting. Raises StoreError for somebody else's."""
    return identity(conn)[0] != APPLICATION_ID and pending(conn, path) and identity(conn) == (0, 0)


def too_new(path: Path, version: int) -> str:
    """That a newer version has written it, and what to do."""
    return (
        f"{path}: schema {version}, this gemmtuned knows {SCHEMA}. Upgrade gemmtuned here, or set GEMMTUNED_DB to "
        "another file; reading it still works, counts of programs with this version are not kept"
    )


def unlike(path: Path, version: int, what: str) -> str:
    """That a newer version has written it in another way than what was asked for, and what to do."""
    return (
        f"{path}: schema {version}, this gemmtuned knows {SCHEMA}, and what it asks for is not there ({what}). Upgrade "
        "gemmtuned here, or set GEMMTUNED_DB to another file"
    )


def too_old(version: int) -> str:
    """That a program does not write to it, and what brings it up to date."""
    return (
        f"schema {version}, not yet {SCHEMA}: programs keep their counts to themselves, and lose them when they end, "
        "until gemmtuned daemon or gemmtuned run brings it up to date"
    )


def refuse_newer_header(path: Path) -> None:
    """Raise StoreError for a damaged file that says a newer schema: it is not ours to build anew.

    Only with no connection of ours to it, as `faults.refuse_strange`.
    """
    with path.open("rb") as file:
        head = file.read(72)
    application, version = int.from_bytes(head[68:72], "big"), int.from_bytes(head[60:64], "big")
    if application == APPLICATION_ID and SCHEMA < version < _MOST_STEPS:
        raise StoreError(too_new(path, version))


def identity(conn: sqlite3.Connection) -> tuple[int, int]:
    """(application_id, user_version) of the open file."""
    application = int(conn.execute("PRAGMA application_id").fetchone()[0])
    return application, int(conn.execute("PRAGMA user_version").fetchone()[0])


def load() -> None:
    """Import what bringing an older file up to date needs; `apply` would, under the lock."""
    import sqlite_utils  # noqa: F401


def apply(
    conn: sqlite3.Connection, path: Path = Path("a copy"), *, upgrade: bool = True, check: Callable[[], object] = bool
) -> None:
    """Apply what is pending. The caller holds the lock file and has asked `pending` under it.

    A new file gets all steps at once, by SQLite alone: a program that is not ours imports nothing for it.  Raises
    StoreError for a file of an older version unless `upgrade`.  check: raises StoreError where SQLite must not write
    any more, not even to take anything back.
    """
    check()
    old = conn.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if old and not upgrade:
        raise StoreError(
            f"{path}: schema {identity(conn)[1]}, this gemmtuned writes {SCHEMA}. Bring it up to date: gemmtuned run, "
            "gemmtuned daemon"
        )
    conn.execute("BEGIN IMMEDIATE")
    try:
        if old:
            _bring_up_to_date(conn)
        else:
            make(conn)
        conn.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        conn.execute(f"PRAGMA user_version = {SCHEMA}")
        check()
        conn.execute("COMMIT")
    except StoreError:  # from check
        raise
    except BaseException:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise


def _bring_up_to_date(conn: sqlite3.Connection) -> None:
    """Within a transaction: sqlite-utils' own BEGIN is deferred, but its atomic() nests in ours as a savepoint."""
    from sqlite_utils import Database, Migrations

    rename = "UPDATE _sqlite_migrations SET name = ? WHERE migration_set = 'gemmtuned' AND name = ?"
    conn.executemany(rename, [(new, old) for old, new in _RENAMED])
    migrations = Migrations("gemmtuned")
    for step in _steps():
        migrations(name=step.stem)(_runs(step))
    migrations.apply(Database(conn))


def make(conn: sqlite3.Connection, since: int = 0, to: int | None = None) -> None:
    """Within a transaction: the steps after `since` up to `to`, and their record as sqlite-utils makes it."""
    steps = _steps()[since:to]
    head, *whole = _whole() if since == 0 else ("",)
    if not steps or steps[-1].stem not in head.split():
        make_by_steps(conn, since, to)
        return
    for statement in whole:
        conn.execute(statement)
    for step in steps:
        _record(conn, step)


def make_by_steps(conn: sqlite3.Connection, since: int = 0, to: int | None = None) -> None:
    """The same, a step after the other."""
    for statement in _RECORD if since == 0 else ():
        conn.execute(statement)
    for step in _steps()[since:to]:
        for statement in statements(step.read_text("utf-8")):
            conn.execute(statement)
        _record(conn, step)


def _record(conn: sqlite3.Connection, step: Path) -> None:
    row = ("gemmtuned", step.stem, datetime.fromtimestamp(clock.now_s(), timezone.utc).isoformat(sep=" "))
    conn.execute("INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES (?, ?, ?)", row)


@cache
def _whole() -> list[str]:
    """schema.sql: its head, which names the last step, then statement by statement."""
    return Path(__file__).with_name("schema.sql").read_text("utf-8").rstrip("\n").split(NEXT)


def steps_of(conn: sqlite3.Connection) -> int:
    """How many steps a file has by its own record; SCHEMA where that cannot be read, or is none of ours."""
    sql = "SELECT name FROM _sqlite_migrations WHERE migration_set = 'gemmtuned' ORDER BY name"
    try:
        names = [name for (name,) in conn.execute(sql).fetchall()]
    except (sqlite3.Error, UnicodeDecodeError):
        return SCHEMA
    return len(names) if names and names == [step.stem for step in _steps()[: len(names)]] else SCHEMA


def altered(conn: sqlite3.Connection) -> bool:
    """True when a file with all our steps lacks a table, view or index of ours, or has it otherwise: it is damaged.

    What else lies in it is its owner's: views, indexes, triggers and tables of an operator are no damage.
    """
    if identity(conn)[1] != SCHEMA:
        return False
    there = _schema(conn)
    return any(there.get(name) != sql for name, sql in _schema_of_all(_steps()).items())


def tables() -> list[str]:
    """The names of our tables."""
    return [name for kind, name in _schema_of_all(_steps()) if kind == "table"]


@lru_cache(1)  # to make it takes 8 ms
def _schema_of_all(steps: tuple[Path, ...]) -> dict[tuple[str, str], str | None]:
    """What these steps, which are all there are, leave in a new file."""
    fresh = sqlite3.connect(":memory:", isolation_level=None)
    try:
        apply(fresh)
        return _schema(fresh)
    finally:
        fresh.close()


def _schema(conn: sqlite3.Connection) -> dict[tuple[str, str], str | None]:
    """How each object was made, by (kind, name); SQLite's and sqlite-utils' own are left out."""
    found = conn.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    return {
        (kind, name): sql for kind, name, sql in found if not name.startswith(("sqlite_", "_sqlite_", "idx__sqlite_"))
    }


def statements(script: str) -> Iterator[str]:
    """The statements of a script one by one: executescript would commit the transaction around it."""
    text = ""
    for line in script.splitlines(keepends=True):
        text += line
        if sqlite3.complete_statement(text):
            yield text
            text = ""
    if text.strip():
        yield text


def _runs(step: Path) -> Callable[[Database], None]:
    def run(db: Database) -> None:
        for statement in statements(step.read_text("utf-8")):
            db.conn.execute(statement)

    return run
