"""One question on one read-only connection: opened, answered as a list of rows, closed; or several, in `kept_open`.

Nothing here waits for writers or keeps them waiting.  A database of a newer schema is read as it is, since the views
are promises; one of an older schema, which nobody has brought up to date, in a copy in memory.  All raise StoreError
when there is no database or it cannot be read.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.problem import COLUMNS
from gemmtuned.db import faults, migrations
from gemmtuned.db.files import connect_read_only, identity
from gemmtuned.db.row_ids import rows
from gemmtuned.db.sightings import HOURS

T = TypeVar("T")
_LABELS: Final = "SELECT count(DISTINCT run_id) FROM sighting WHERE hour = (SELECT max(hour) FROM sighting)"
_FEW: Final = 2  # labels
_EACH_HOUR: Final = "GROUP BY hour, problem_id, environment_id"
DAY_S: Final = 86_400.0
PROBLEM: Final = ", ".join(f'p."{name}"' for name in COLUMNS)


def ask(path: Path, sql: str, values: tuple[Any, ...] | dict[str, Any] = ()) -> list[dict[str, Any]]:
    """One question on one read-only connection."""
    return on(path, lambda conn: rows(conn, sql, values), [])


def version_of(path: Path) -> int:
    """The schema of the file as it lies; 0 for an empty one, and for what is not ours."""
    conn = connect_read_only(path)
    try:
        application, version = migrations.identity(conn)
    except (sqlite3.Error, UnicodeDecodeError) as err:
        raise faults.store_error(err, path) from err
    finally:
        conn.close()
    return version if application == migrations.APPLICATION_ID else 0


class _Copy(sqlite3.Connection):
    """A copy in memory, of which the next question is asked, too."""

    def close(self) -> None:
        """Stay: a command asks several questions, and a copy of a year takes seconds."""


_copies: dict[tuple[object, ...], _Copy] = {}


def open_to_read(path: Path) -> sqlite3.Connection:
    """The database to read: as it is, or a copy in memory brought up to our schema where nobody has done that yet."""
    conn = connect_read_only(path)
    try:
        application, version = migrations.identity(conn)
        if application != migrations.APPLICATION_ID or not 0 < version < migrations.SCHEMA:
            return conn
        state = (path, threading.get_ident(), *_state(path), *_state(path.with_name(path.name + "-wal")))
        newer = _copies.get(state)
        if newer is None:
            _copies.clear()
            newer = sqlite3.connect(":memory:", isolation_level=None, factory=_Copy)
            conn.backup(newer)
            migrations.apply(newer)
            _copies[state] = newer
    except (sqlite3.Error, UnicodeDecodeError) as err:
        conn.close()
        raise faults.store_error(err, path) from err
    conn.close()
    return newer


def _state(path: Path) -> tuple[int, ...]:
    """What changes when somebody writes to this file."""
    try:
        facts = path.stat()
    except OSError:
        return ()
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def on(path: Path, look: Callable[[sqlite3.Connection], T], nothing: T) -> T:
    """Several questions on one read-only connection; `nothing` for a database that is not yet filled.

    What says that it is damaged is asked once more: one read that the disk refuses is damage to SQLite, too.
    """
    try:
        return _on(path, look, nothing)
    except StoreError as err:
        if not faults.is_damage(err):
            raise
        return _on(path, look, nothing)


def error_of(err: sqlite3.Error | UnicodeDecodeError, path: Path) -> StoreError:
    """The error to raise for a question that failed; a newer version's tables and views may not be those it asks."""
    if faults.is_gone(err):
        with suppress(StoreError):  # who cannot ask says what SQLite said
            version = version_of(path)
            if version > migrations.SCHEMA:
                return StoreError(migrations.unlike(path, version, str(err)))
    return faults.store_error(err, path)


def _on(path: Path, look: Callable[[sqlite3.Connection], T], nothing: T) -> T:
    try:
        with _connection(path) as conn:
            return nothing if migrations.is_empty(conn, path) else look(conn)
    except (sqlite3.Error, UnicodeDecodeError) as err:
        raise error_of(err, path) from err
    except OverflowError as err:
        raise StoreError(f"{path}: asked for a number that SQLite cannot hold ({err})") from err


class _Kept(threading.local):
    """What this thread keeps open: the database of which it asks several questions, and between them its connection."""

    path: Path | None = None
    free: tuple[tuple[int, int] | None, sqlite3.Connection] | None = None  # and which file it is of

    def take(self, file: tuple[int, int] | None) -> sqlite3.Connection | None:
        """The connection, to be given back; None where there is none of this file."""
        if self.free is None:
            return None
        (of, conn), self.free = self.free, None
        if of == file:
            return conn
        conn.close()
        return None


_kept: Final = _Kept()


@contextmanager
def kept_open(path: Path) -> Iterator[None]:
    """All questions that this thread asks of path in the block are asked on one connection: opening one takes 2 ms.

    SQLite reads the whole schema for it. Each question sees what was committed before it, and another file where one
    was put there meanwhile; what fails closes the connection. Within another such block this one does nothing.
    """
    if _kept.path is not None:
        yield
        return
    _kept.path = path
    try:
        yield
    finally:
        _kept.path = None
        _kept.take(None)


@contextmanager
def _connection(path: Path) -> Iterator[sqlite3.Connection]:
    """The one that is kept open, or one of its own."""
    file = conn = None
    if _kept.path == path:
        with suppress(OSError):  # opening it says what is wrong
            file = identity(path)
        conn = _kept.take(file)
    if conn is None:
        conn = open_to_read(path)
    done = False
    try:
        yield conn
        done = True
    finally:
        is_newest = type(conn) is sqlite3.Connection  # a copy, and one that lies, may be stale
        if done and file is not None and is_newest and _kept.free is None:  # else a question within this one gave its
            _kept.free = file, conn
        else:
            conn.close()


def of_window(
    path: Path, sql: str, since_us: int, texts: dict[str, str] | None = None, **more: Any
) -> list[dict[str, Any]]:
    """A question about sightings since then, which names their table {sightings}.

    A row that stands for a day or a block of four weeks is in when the window touches it, as one of an hour is.
    {sum} and {each_hour} add up what the labels called within an hour first, in the order in which the rows lie, where
    there are several: less is left to sort then. With one label nothing would be.
    """
    values = {"since": since_us, "hour": since_us // 3_600_000_000, **more}

    def look(conn: sqlite3.Connection) -> list[dict[str, Any]]:
        before = conn.execute("SELECT EXISTS (SELECT 1 FROM sighting_before)").fetchone()[0]  # as a union it is slower
        first = next((h for (h,) in conn.execute(HOURS).fetchall()[::-1] if h <= values["hour"]), values["hour"])
        several = conn.execute(_LABELS).fetchone()[0] > _FEW
        how = {"sum": "sum", "each_hour": _EACH_HOUR} if several else {"sum": "", "each_hour": ""}
        how |= {"sightings": "every_sighting" if before else "sighting", **(texts or {})}
        return rows(conn, sql.format(**how), {**values, "hour": first})

    return on(path, look, [])
