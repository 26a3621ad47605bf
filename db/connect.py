"""The connection to the database: opened, kept, given up and mended in one place.

What is guarded against here, each seen happen: a connection used across fork, a database deleted or replaced under
its writers (SQLite goes on writing into the unlinked file), a corrupt file, a full disk, a write that overlaps a
checkpoint, a deferred transaction that fails at once instead of waiting.  Callers hand in a function and get its
result: `write` runs it as one BEGIN IMMEDIATE transaction under the lock file, `read` as one snapshot.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import sqlite3
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from gemmtuned._testing import faults as failpoints
from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.real import allocate_rlock
from gemmtuned.configs.say import tell
from gemmtuned.db import faults, migrations
from gemmtuned.db.files import (
    NETWORK_FILESYSTEMS,
    connect,
    identity,
    journal_mode,
    leave_log,
    make,
    refuse_network,
    salvage_is_finished,
)
from gemmtuned.db.lockfile import LockFile

if TYPE_CHECKING:
    from gemmtuned.db.mend import Report

__all__ = ["NETWORK_FILESYSTEMS", "Connection"]

T = TypeVar("T")
Beat = Callable[[], None]
log = logging.getLogger(__name__)

MIN_SQLITE: Final = (3, 37)  # STRICT tables; RETURNING came in 3.35
FORK_WAIT_S: Final = 0.05  # for each of two locks; a fork may ask twice
MAX_WAL_BYTES: Final = 4 << 20  # above this a writer checkpoints, for some 15 ms; else only the daemon does


class Connection:
    """The one writer's connection of a Store. Threads share it; forked children get their own."""

    def __init__(
        self,
        path: Path,
        *,
        locks: Path,
        timeout_s: float,
        create: bool,
        upgrade: bool = True,
        beat: Beat | None = None,
    ) -> None:
        if sqlite3.sqlite_version_info < MIN_SQLITE:
            raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old, 3.37 is needed: use a newer Python")
        self.path = path.resolve()  # SQLite puts the log beside the file that a link points to, and so must we
        self.lock = LockFile(locks / f"{path.name}.lock")
        self.timeout_s = timeout_s
        self._beat = beat or _nothing
        self.opened = 0  # rises with every open: what was remembered of the file before is void
        self._create, self._upgrade = create, upgrade
        self._examined = 0
        self._conn: sqlite3.Connection | None = None
        self._handles = 0  # of SQLite, open or half open: _conn, and those that could not be closed
        self._file: tuple[int, int] | None = None  # (st_dev, st_ino) of what _conn writes to, or could not be opened
        self._thread = allocate_rlock()
        _all.add(self)
        self._guarded(self._ready)

    def write(self, work: Callable[[sqlite3.Connection], T], *, durable: bool = False) -> T:
        """Run work as one transaction. durable: the commit survives a power cut, not only a kill.

        A corrupt file is set aside and the work done on the new one.  Raises StoreBusy, StoreError; then nothing of
        work was kept.
        """
        return self._guarded(lambda: self._write(work, durable))

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run work on one snapshot of the database. Raises as `write` does."""

        def once() -> T:
            conn = self._ready()
            conn.execute("BEGIN")
            try:
                return work(conn)
            finally:
                if conn.in_transaction:
                    conn.execute("ROLLBACK")

        return self._guarded(once)

    def vacuum(self) -> None:
        """Write the file anew without what is free in it. Programs that count meanwhile try again a second later."""

        def once() -> None:
            conn = self._ready()
            self._acquire()
            try:
                conn.execute("PRAGMA temp_store = FILE")  # the copy may be larger than memory
                conn.execute("VACUUM")
                conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            finally:
                conn.execute("PRAGMA temp_store = MEMORY")
                self.lock.release()

        self._guarded(once)

    def checkpoint(self) -> None:
        """Bring the write-ahead log into the database and cut it to nothing, unless a reader holds it."""

        def once() -> None:
            conn = self._ready()
            self._acquire()
            try:
                failpoints.point("store.checkpoint")
                conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            finally:
                self.lock.release()

        self._guarded(once)

    def file(self) -> tuple[int, int]:
        """(st_dev, st_ino) of the open file: within `write` or `read`, for it is closed between them at times."""
        return self._file or (0, 0)

    def lies_at(self) -> tuple[int, int] | None:
        """(st_dev, st_ino) of the file at the path, which the next use opens; None when there is none."""
        return identity(self.path)

    def refuse_newer(self) -> None:
        """Raise StoreError when a newer version has brought the file up to its own schema."""
        self.read(self._refuse_newer)

    def close(self) -> None:
        """Close under the lock: the last connection to close checkpoints. The next use opens again."""
        _mind_forks()
        with self._thread:
            self._drop()
            self.lock.close()

    def mend(self, reason: str, of: tuple[int, int] | None = None) -> None:
        """Build the file anew from what can be read, put that in its place, and say so when it begins and ends.

        of: the file that was found damaged, as `lies_at` named it.  Does nothing when another lies there by now: this
        process or another one was faster.  Raises StoreError, also for a file that was never a database.
        """
        _mind_forks()
        with self._thread:
            try:
                self._rebuild(reason, of)
            except (sqlite3.Error, UnicodeDecodeError, OSError) as err:
                self._drop()
                raise faults.store_error(err, self.path, waited_s=self.timeout_s) from err

    def let_lie(self) -> None:
        """Between two uses in a program that is not ours: hold no descriptor, mapping or lock.

        While others write for longer than FORK_WAIT_S the handle stays, for this time.
        """
        self.let_go()
        with self._thread:
            if self._conn is None:
                self.lock.close()

    def let_go(self) -> None:
        """Before a fork: close, so that the child inherits nothing of SQLite's. The next use opens again.

        Where other threads are at work for longer than FORK_WAIT_S the handle stays, and the child does without the
        database.  Other processes are not waited for longer either: whoever has the lock has the database open, so
        that this is not the last connection to close, which alone writes to the file.
        """
        _mind_forks()
        if not self._thread.acquire(timeout=FORK_WAIT_S):
            return
        try:
            conn = self._conn
            if conn is None or conn.in_transaction:
                return
            held = self.lock.acquire(FORK_WAIT_S)
            try:
                if held or identity(self.path) == self._file:
                    self._conn = self._file = None
                    self._close(conn)
            finally:
                if held:
                    self.lock.release()
        except (sqlite3.Error, OSError) as err:
            tell(log, logging.DEBUG, "close before a fork failed path=%s reason=%s", self.path, err)
        finally:
            self._thread.release()

    def after_fork(self) -> None:
        """In a forked child: leak the parent's handle, which must not even be closed here, and stay away from the file.

        SQLite in the child takes itself for the holder of the locks that it had in the parent, and takes none of its
        own: the last of the others to close would then take the log away under it.
        """
        self._thread = allocate_rlock()
        conn, self._conn = self._conn, None
        if conn is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(conn))  # never freed, so never closed
        if self._handles:
            _inherited.add(self.path)
        self.lock.after_fork()

    # --- below: self._thread is held ---

    def _guarded(self, once: Callable[[], T]) -> T:
        _mind_forks()
        with self._thread:
            for last in (False, True):
                try:
                    return once()
                except (sqlite3.Error, UnicodeDecodeError) as err:  # noqa: PERF203
                    what = faults.kind(err)
                    if what == "other" and self._damaged():
                        what = "corrupt"  # an index that disagrees with its table, a column that is gone
                    if what == "corrupt" and self._create and not last:
                        self.mend(str(err))
                        continue
                    if what in ("corrupt", "full", "io", "readonly", "cantopen"):
                        self._drop()  # open again next time: what is wrong may be mended by then
                    raise faults.store_error(err, self.path, waited_s=self.timeout_s) from err
                except OSError as err:
                    raise faults.store_error(err, self.path) from err
                except (OverflowError, UnicodeEncodeError) as err:
                    raise StoreError(f"{self.path}: a value that SQLite cannot hold ({err})") from err
                except MemoryError as err:  # what Python makes of SQLITE_NOMEM
                    self._drop()
                    raise StoreError(f"{self.path}: out of memory. Try again when some is free") from err
            raise AssertionError("unreachable")

    def _damaged(self) -> bool:
        """Look at the whole file, once for each time it was opened: the error may as well be the caller's."""
        from gemmtuned.db import upkeep  # rarely needed, and programs import this module

        if self._conn is None or self._examined == self.opened:
            return False
        self._examined = self.opened
        try:
            return bool(upkeep.findings(self._conn))
        except (sqlite3.Error, UnicodeDecodeError) as err:
            return faults.kind(err) == "corrupt"  # a disk that does not answer now says nothing about the file

    def _write(self, work: Callable[[sqlite3.Connection], T], durable: bool) -> T:
        self._ready()
        self._acquire()
        try:
            conn = self._ready(locked=True)  # again: it may have been set aside while we waited
            if durable:
                conn.execute("PRAGMA synchronous = FULL")
            failpoints.point("store.begin")
            conn.execute("BEGIN IMMEDIATE")
            try:
                self._refuse_newer(conn)
                result = work(conn)
                failpoints.point("store.commit")
                conn.execute("COMMIT")
            except BaseException:
                if conn.in_transaction:
                    conn.execute("ROLLBACK")
                if durable:
                    with contextlib.suppress(sqlite3.Error):
                        conn.execute("PRAGMA synchronous = NORMAL")
                raise
            self._after_commit(conn, durable)
            return result
        finally:
            self.lock.release()

    def _after_commit(self, conn: sqlite3.Connection, durable: bool) -> None:
        """What follows a commit. An error here must not reach the caller, who would do the same work a second time."""
        try:
            failpoints.point("store.committed")
            if durable:
                conn.execute("PRAGMA synchronous = NORMAL")
            self._checkpoint_if_large(conn)
        except (sqlite3.Error, OSError, MemoryError) as err:
            tell(log, logging.WARNING, "written, and trouble after it path=%s reason=%s", self.path, err)
            with contextlib.suppress(sqlite3.Error, OSError):
                self._drop(locked=True)  # opened anew at the next use

    def _refuse_newer(self, conn: sqlite3.Connection) -> None:
        """A newer version may have brought the file up to its own schema while we had it open."""
        (version,) = conn.execute("PRAGMA user_version").fetchone()
        if version > migrations.SCHEMA:
            raise StoreError(migrations.too_new(self.path, version))

    def _checkpoint_if_large(self, conn: sqlite3.Connection) -> None:
        try:
            size = os.stat(f"{self.path}-wal").st_size  # noqa: PTH116  (on the flush path; a Path costs more than the call)
        except OSError:
            return
        if size <= MAX_WAL_BYTES:
            return
        conn.execute("PRAGMA busy_timeout = 0")  # a reader in the way is not waited for
        try:
            conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.DatabaseError as err:
            tell(log, logging.WARNING, "checkpoint failed path=%s reason=%s", self.path, err)
        finally:
            conn.execute(f"PRAGMA busy_timeout = {int(self.timeout_s * 1000)}")

    def _acquire(self) -> None:
        if not self.lock.acquire(self.timeout_s):
            raise faults.busy(self.path, self.timeout_s)

    def _ready(self, *, locked: bool = False) -> sqlite3.Connection:
        """The connection to the file that now lies at path, opened or opened again."""
        if self.path in _inherited:
            raise StoreError(
                f"{self.path}: open when this process was forked, so it cannot be used safely here. "
                "Fork by os.fork or multiprocessing while nothing is written, or start processes anew (spawn)"
            )
        found = identity(self.path)
        if self._conn is not None and found == self._file:
            return self._conn
        self._drop(locked=locked)
        if salvage_is_finished(self.path):
            self._finish_salvage(locked=locked)
            found = identity(self.path)
        if found is None:
            if not self._create:
                raise StoreError(
                    f"{self.path}: no such database. Run a program with GEMMTUNED=1 first, or set GEMMTUNED_DB"
                )
            make(self.path)
            found = identity(self.path)
        self._file = found
        refuse_network(self.path)
        self._handles += 1
        try:
            failpoints.point("store.open")
            conn = connect(self.path, self.timeout_s)
            if not self._upgrade:
                leave_log(conn)
        except BaseException:
            self._handles -= 1
            raise
        try:
            if migrations.pending(conn, self.path) or journal_mode(conn) != "wal":
                if not locked:
                    self._acquire()
                try:
                    if migrations.pending(conn, self.path):
                        failpoints.point("store.migrate")
                        migrations.apply(conn, self.path, upgrade=self._upgrade)
                        self._checkpoint_if_large(
                            conn
                        )  # what an upgrade wrote: now, and not after somebody's next write
                    if journal_mode(conn) != "wal":
                        conn.execute("PRAGMA journal_mode = WAL").fetchall()
                finally:
                    if not locked:
                        self.lock.release()
        except BaseException:
            self._close(conn)
            raise
        self._conn = conn
        self.opened += 1
        return conn

    def _drop(self, *, locked: bool = False) -> None:
        conn, self._conn = self._conn, None
        self._file = None
        if conn is None:
            return
        if locked:
            self._close(conn)
            return
        try:
            held = self.lock.acquire(self.timeout_s)
        except OSError:
            held = False
        if not held:  # closing without the lock could checkpoint into somebody's write: never close it
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(conn))
            return
        try:
            self._close(conn)
        except sqlite3.Error as err:
            tell(log, logging.DEBUG, "close failed path=%s reason=%s", self.path, err)
        finally:
            self.lock.release()

    def _close(self, conn: sqlite3.Connection) -> None:
        conn.close()
        self._handles -= 1

    def _rebuild(self, reason: str, of: tuple[int, int] | None) -> None:
        from gemmtuned.db import mend  # rarely needed, and programs import this module

        damaged = (
            of or self._file or identity(self.path)
        )  # of what we have open: another process may have mended what lies there by now
        self._drop()
        self._acquire()
        try:
            if identity(self.path) != damaged:
                return  # another process was faster
            faults.refuse_strange(self.path)
            tell(
                log,
                logging.WARNING,
                "store is damaged path=%s reason=%r: what can be read is salvaged",
                self.path,
                reason,
            )
            self._say(mend.rebuild(self.path, reason=reason, beat=self._beat))
            self._ready(locked=True)
        finally:
            self.lock.release()

    def _finish_salvage(self, *, locked: bool) -> None:
        """End what a killed process had begun."""
        from gemmtuned.db import mend

        if not locked:
            self._acquire()
        try:
            report = mend.finish(self.path)
            if report is not None:
                self._say(report)
        finally:
            if not locked:
                self.lock.release()

    def _say(self, report: Report) -> None:
        tell(
            log, logging.WARNING,
            "store was damaged path=%s reason=%r set_aside=%s salvaged_rows=%d lost_calls=%d",
            self.path, report.reason, self.path.with_name(report.set_aside), report.salvaged_rows, report.lost_calls,
        )  # fmt: skip


def _nothing() -> None:
    pass


def let_go() -> None:
    """Before a fork: close every database, so that the child inherits none of SQLite's locks."""
    for one in list(_all):
        one.let_go()


def _mind_forks() -> None:
    """Every use begins with this: some forks run no Python hooks, and some hooks use a database before ours has run."""
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        for one in list(_all):
            one.after_fork()


def _at_exit() -> None:
    for one in list(_all):
        one.timeout_s = min(one.timeout_s, 0.25)  # never hold up the end of the program
        one.close()


_all: weakref.WeakSet[Connection] = weakref.WeakSet()
_inherited: set[Path] = set()  # databases that were open when this process was forked
_process = os.getpid()  # that all of them are of
os.register_at_fork(before=let_go, after_in_child=_mind_forks)
atexit.register(_at_exit)
