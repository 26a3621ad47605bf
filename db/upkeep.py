"""Looking after a database file: is it whole, and a copy of it. Reads only, and never mends."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from gemmtuned.configs import clock
from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.more_threads import begin
from gemmtuned.configs.open_files import make_folders
from gemmtuned.configs.temporary import create, temporary_path
from gemmtuned.configs.unpatched import sleep
from gemmtuned.db import faults, migrations
from gemmtuned.db.files import connect_read_only

SQLITE_NOMEM: Final = 7
SQLITE_IOERR: Final = 10  # with a number in the higher bits that says which


def check(path: Path) -> list[str]:
    """Everything found wrong with the file, one line each; [] when it is whole."""
    try:
        found = damage(path)
        return found or _disagreements(path)
    except StoreError as err:
        return [str(err)]


def glance(path: Path, *, for_s: float) -> list[str] | None:
    """As `check`, for so long and a little more; None when nothing was found and not all of it was looked at."""
    look = Examination(path)
    until_s = clock.monotonic() + for_s
    try:
        while (found := look.result()) is None and clock.monotonic() < until_s:
            sleep(0.005)
        if found is not None:
            return found or _disagreements(path)
        look.stop()
        return _disagreements(path, counts=False) or None
    except StoreError as err:
        return [str(err)]


def _disagreements(path: Path, *, counts: bool = True) -> list[str]:
    """What is wrong with a file whose pages are sound. counts: compare them, too, which reads all rows."""
    conn = connect_read_only(path, 30.0)
    try:
        application, version = migrations.identity(conn)
        if (application, version) == (0, 0) and not conn.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            return []  # empty: a program is about to fill it
        if application != migrations.APPLICATION_ID:
            return [
                f"{path}: not a gemmtuned database (application id {application:#x}). Move it away, or set "
                "GEMMTUNED_DB to another file"
            ]
        if version > migrations.SCHEMA:
            return [migrations.too_new(path, version)]
        if version < migrations.SCHEMA:
            return [migrations.too_old(version)]
        if not counts:
            return []
        found = [
            f"row {row[1]} of {row[0]} names no row of {row[2]}"
            for row in conn.execute("PRAGMA foreign_key_check").fetchall()
        ]
        wrong = conn.execute(
            "SELECT count(*) FROM demand d LEFT JOIN (SELECT problem_id, environment_id, sum(calls) AS calls "
            "FROM every_sighting GROUP BY problem_id, environment_id) s "
            "ON s.problem_id = d.problem_id AND s.environment_id = d.environment_id "
            "WHERE d.calls != coalesce(s.calls, 0)"
        ).fetchone()[0]
        if wrong:
            found.append(f"{wrong} problems whose calls differ from the sum of their sightings")
        wrong = conn.execute(
            "SELECT count(*) FROM demand d JOIN look_up l USING (problem_id, environment_id) "
            "WHERE d.solution_id IS NOT l.solution_id"
        ).fetchone()[0]
        if wrong:
            found.append(f"{wrong} problems whose solution is not the one that the look-up finds")
        return found
    except (sqlite3.Error, UnicodeDecodeError) as err:
        raise faults.store_error(err, path) from err
    finally:
        conn.close()


def damage(path: Path, *, stop: Stop | None = None) -> list[str]:
    """What is wrong with its pages and its list of tables, seen in two looks; [] when nothing.

    Two, since SQLite calls it damage, too, where the disk refuses one read of a sound file (SQLITE_IOERR_CORRUPTFS).
    stop: lets another thread end it.  Raises StoreError when it cannot be looked at: no room, no right, a disk that
    does not answer, somebody else's file, a signal to stop.  None of them says that the file is damaged.
    """
    stop = stop or Stop()
    found = _damage(path, stop)
    if not found:
        return []
    again = _damage(path, stop)
    both = [line for line in found if line in again]
    if again and not both:
        raise StoreError(
            f"{path}: cannot be looked at now (two looks differ, as where a disk refuses now and then: {found[0]!r}, "
            f"{again[0]!r})"
        )
    return both


def _damage(path: Path, stop: Stop) -> list[str]:
    """As `damage`, in one look."""
    try:
        conn = connect_read_only(path, 30.0)
    except StoreError as err:
        cause = err.__cause__
        if isinstance(cause, sqlite3.Error | UnicodeDecodeError) and faults.kind(cause) == "corrupt":
            faults.refuse_strange(path)
            return [f"damaged: {cause}"]
        raise
    stop.conn = conn
    try:
        found = findings(conn)
        if not found:
            _decode(conn, stop)
    except (sqlite3.Error, UnicodeDecodeError, MemoryError) as err:
        if stop.is_set:
            raise StoreError(f"{path}: not looked at to the end") from err
        if isinstance(err, MemoryError) or faults.kind(err) != "corrupt":
            raise StoreError(f"{path}: cannot be looked at now ({err or 'out of memory'})") from err
        found = [f"damaged: {err}"]
    finally:
        stop.conn = None
        conn.close()
    if stop.is_set:  # an interrupted check says "ok" or anything
        raise StoreError(f"{path}: not looked at to the end")
    refused = next((line for line in found if _is_refusal(line)), None)
    if refused is not None:
        raise StoreError(f"{path}: cannot be looked at now (the disk refused a page: {refused.splitlines()[-1]})")
    return found


def _is_refusal(line: str) -> bool:
    """Whether SQLite could not get a page, for which it has a line of findings, too; not that the page is damaged."""
    found = re.search(r"error code=(\d+)", line)
    return found is not None and int(found[1]) & 0xFF in (SQLITE_NOMEM, SQLITE_IOERR)


def findings(conn: sqlite3.Connection) -> list[str]:
    """What is wrong with the pages of an open database, and with our tables and views in it; [] when nothing.

    Raises sqlite3.Error and UnicodeDecodeError when it cannot be looked at.
    """
    ours = migrations.identity(conn)[0] == migrations.APPLICATION_ID
    altered = ours and migrations.altered(conn)
    found = ["its tables or views are not as gemmtuned made them"] if altered else []
    try:
        return _pages(conn, "20") + found
    except sqlite3.Error as err:
        # A rule of some table calls a function that is not there. In our tables that is damage, which `altered` has
        # seen; in an operator's it is the program's that has the function, and what is ours is looked at without it
        if faults.kind(err) != "other":
            raise
        return found or [line for table in migrations.tables() for line in _pages(conn, table)]


def _pages(conn: sqlite3.Connection, what: str) -> list[str]:
    """What SQLite finds wrong. what: how many lines at most, of the whole file; or a table."""
    return [str(row[0]) for row in conn.execute(f"PRAGMA integrity_check({what})").fetchall() if row[0] != "ok"]


class Stop:
    """Ends a look at a database from another thread."""

    def __init__(self) -> None:
        self.is_set = False
        self.conn: sqlite3.Connection | None = None

    def now(self) -> None:
        """Have it end within milliseconds."""
        self.is_set = True
        conn = self.conn
        if conn is not None:
            with contextlib.suppress(sqlite3.ProgrammingError):  # it has ended by itself
                conn.interrupt()


class Examination:
    """`damage` in a thread of its own, which holds nobody up: a year's database takes tens of seconds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stop = Stop()
        self._found: list[str] | StoreError | None = None
        self._thread = threading.Thread(target=self._run, name="gemmtuned-examination", daemon=True)
        if not begin(self._thread, "the database is not looked over"):
            self._found = StoreError(f"{path}: not looked over, since there is no thread to be had")

    def result(self) -> list[str] | None:
        """What is damaged, once it has ended; None until then. Raises StoreError when it could not be looked at."""
        if self._thread.is_alive():
            return None
        if isinstance(self._found, StoreError):
            raise self._found
        return self._found or []

    def stop(self) -> None:
        """End it; waits for a second at most."""
        until_s = clock.monotonic() + 1.0
        while self._thread.is_alive() and clock.monotonic() < until_s:
            self._stop.now()  # again and again: one that falls between two statements ends neither
            self._thread.join(0.01)

    def _run(self) -> None:
        try:
            self._found = damage(self._path, stop=self._stop)
        except StoreError as err:
            self._found = err


def damage_beside(path: Path, beat: Callable[[], None]) -> list[str]:
    """As `damage`, with `beat` called every few milliseconds; what it raises ends the look."""
    look = Examination(path)
    try:
        while (found := look.result()) is None:
            beat()
            sleep(0.005)
        return found
    except BaseException:
        look.stop()
        raise


def _decode(conn: sqlite3.Connection, stop: Stop) -> None:
    """Read every text of ours: one that is no UTF-8 passes SQLite's own check, and then fails whoever asks for it."""
    for table in migrations.tables():  # an operator's may need a module that is not here
        columns = [f'"{row[1]}"' for row in conn.execute(f'PRAGMA table_info("{table}")') if row[2] == "TEXT"]
        if not columns:
            continue
        distinct = "DISTINCT" if len(columns) == 1 else ""  # millions of sightings have a handful of words
        cursor = conn.execute(f'SELECT {distinct} {", ".join(columns)} FROM "{table}"')  # noqa: S608
        while cursor.fetchmany(1000):
            if stop.is_set:
                return


def backup(path: Path, to: Path, *, timeout_s: float) -> Path:
    """Write a consistent copy, while others go on writing. `to`: a file, or a folder to name one in. Returns it."""
    if to.is_dir():
        to = to / f"{path.stem}-{datetime.fromtimestamp(clock.now_s(), timezone.utc):%Y%m%dT%H%M%SZ}{path.suffix}"
    temporary = temporary_path(to)
    try:
        make_folders(to.parent)
        os.close(create(temporary, path))  # SQLite fills an empty file
        conn = connect_read_only(path, timeout_s)
        try:
            conn.execute("VACUUM INTO CAST(? AS TEXT)", (os.fsencode(temporary),))  # a name need not be UTF-8
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
