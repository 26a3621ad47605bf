"""The connection to the database, which guards all reads and writes.

It guards against faults that have all been seen: a connection used across a fork, a database deleted or replaced under
its writers (SQLite goes on writing into the unlinked file), a corrupt file, a full disk, a write that overlaps a
checkpoint, a deferred transaction that fails at once instead of waiting.  Callers pass a function and get its result:
`write` runs it as one BEGIN IMMEDIATE transaction under the lock file, `read` as one snapshot.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sqlite3
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from gemmtuned._testing import faults as failpoints
from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.frame_lock import FrameLock
from gemmtuned.configs.processes import own_process
from gemmtuned.configs.stderr_lines import tell
from gemmtuned.configs.unpatched import builtins, os
from gemmtuned.db import faults, migrations
from gemmtuned.db.files import identity
from gemmtuned.db.handle import LAST_LOG_BYTES, Beat, Handle, end_transaction, foreign_keys, under_lock
from gemmtuned.db.lockfile import LockFile, locks_of

__builtins__ = builtins

__all__ = ["Beat", "Connection"]

T = TypeVar("T")
log = logging.getLogger(__name__)

MIN_SQLITE: Final = (3, 37)  # STRICT tables; RETURNING came in 3.35
AT_END_S: Final = 0.25
FORK_WAIT_S: Final = 0.05  # for each of two locks; a fork may ask twice


class Connection:
    """A Store's connection. Threads share it; forked children have their own."""

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
        self.lock = LockFile(locks_of(path.resolve(), locks) / f"{path.name}.lock")
        self._create = create
        self._handle = Handle(
            path, self.lock, timeout_s=timeout_s, create=create, upgrade=upgrade, beat=beat or _nothing
        )
        self._examined = 0
        self._thread = FrameLock()
        _all.add(self)
        self._guarded(self._handle.ready)

    @property
    def path(self) -> Path:
        """The file that is in use, behind all links."""
        return self._handle.path

    @property
    def opened(self) -> int:
        """A number that rises with every open, which voids what was remembered of the file before."""
        return self._handle.opened

    @property
    def timeout_s(self) -> float:
        """How long any call waits for others."""
        return self._handle.timeout_s

    def write(self, work: Callable[[sqlite3.Connection], T], *, durable: bool = False, unchecked: bool = False) -> T:
        """Run work as one transaction. durable: the commit survives a power cut, not only a kill.

        unchecked: work has made sure that no row names those that it removes, and SQLite does not look for them.
        A corrupt file is set aside, and work done on the new one. Raises StoreBusy, StoreError: then nothing was kept.
        """
        return self._guarded(lambda: self._write(work, durable, unchecked))

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run work on one snapshot of the database. Raises as `write` does."""

        def once() -> T:
            conn = self._handle.ready()
            conn.execute("BEGIN")  # where a handler asks in the middle of a call, this fails, and that call's stays
            try:
                return work(conn)
            finally:
                if conn.in_transaction:
                    conn.execute("ROLLBACK")

        return self._guarded(once)

    def vacuum(self) -> None:
        """Rewrite the file without its free pages. Programs that flush meanwhile try again a second later."""

        def once() -> None:
            conn = self._handle.ready()
            with under_lock(self._handle):
                try:
                    conn.execute("PRAGMA temp_store = FILE")  # the copy may be larger than memory
                    conn.execute("VACUUM")
                    conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                finally:
                    conn.execute("PRAGMA temp_store = MEMORY")

        self._guarded(once)

    def checkpoint(self) -> None:
        """Move the write-ahead log into the database and truncate it, unless a reader holds it."""

        def once() -> None:
            conn = self._handle.ready()
            with under_lock(self._handle):
                failpoints.point("store.checkpoint")
                conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

        self._guarded(once)

    def file(self) -> tuple[int, int]:
        """(st_dev, st_ino) of the open file. Ask within `write` or `read`: between them it may be closed."""
        return self._handle.file or (0, 0)

    def lies_at(self) -> tuple[int, int] | None:
        """(st_dev, st_ino) of the file at the path, which the next use opens; None when there is none."""
        return identity(self._handle.named)

    def refuse_newer(self) -> None:
        """Raise StoreError when a newer version has brought the file up to its own schema."""
        self.read(lambda conn: _refuse_newer(conn, self.path))

    def close(self) -> None:
        """Close under the lock: the last connection to close checkpoints. The next use opens again."""
        _mind_forks()
        with self._thread:
            self._handle.drop()
            self.lock.close()

    def put_down(self) -> None:
        """As `close`, but when the lock cannot be had it does nothing and raises StoreBusy."""
        _mind_forks()
        with self._thread, under_lock(self._handle):
            self._handle.drop(locked=True)

    def mend(self, reason: str, of: tuple[int, int] | None = None) -> None:
        """Rebuild the file from what can be read, and report the begin and the end.

        of: the file that was found damaged, as `lies_at` named it.  If another file lies there by now, somebody was
        faster and nothing is done.  Raises StoreError, also for a file that was never a database.
        """
        _mind_forks()
        with self._thread:
            try:
                self._handle.rebuild(reason, of)
            except (sqlite3.Error, UnicodeDecodeError, OSError) as err:
                self._handle.drop()
                raise faults.store_error(err, self.path, waited_s=self.timeout_s) from err

    def close_between_uses(self) -> None:
        """Close between two uses in a user's program, so that it holds no descriptor, mapping or lock.

        If others write for longer than FORK_WAIT_S, the handle stays open this time.
        """
        self.close_before_fork()
        with self._thread:
            if self._handle.conn is None:
                self.lock.close()
        _note_use()

    def close_before_fork(self) -> None:
        """Before a fork: close, so that the child inherits nothing of SQLite's. The next use opens again.

        If other threads use the handle for longer than FORK_WAIT_S, it stays open and the child does without the
        database.  We wait no longer for other processes, either: one that holds the lock has the database open, so ours
        is not the last connection to close, and only the last one writes to the file.
        """
        _mind_forks()
        if self._handle.conn is None and not self._thread.is_taken:  # mostly so: nothing is written for it
            return
        if not self._thread.enter(FORK_WAIT_S):
            return
        try:
            conn = self._handle.conn
            if conn is None or conn.in_transaction:
                return
            held = self.lock.acquire(FORK_WAIT_S)
            try:
                if not self._handle.is_cut_off() and (held or identity(self.path) == self._handle.file):
                    self._handle.conn = self._handle.file = None
                    self._handle.close(conn)
            finally:
                if held:
                    self.lock.release()
        except (sqlite3.Error, OSError) as err:
            tell(log, logging.DEBUG, "close before a fork failed path=%s reason=%s", self.path, err)
        finally:
            self._thread.leave()

    def after_fork(self) -> None:
        """In a forked child: leak the parent's handle, which must not even be closed here, and stay away from the file.

        SQLite in the child believes that it holds the parent's locks, and takes none of its own: the last other process
        to close would then delete the log while the child uses it.
        """
        self._thread = FrameLock()
        self._handle.leak()
        self.lock.after_fork()

    # --- the methods below are called with self._thread held ---

    def _guarded(self, once: Callable[[], T]) -> T:
        global _in_use
        _mind_forks()
        with self._thread as outermost:
            _in_use = True
            if outermost:
                end_transaction(self._handle)
                self.lock.free()
            doubted = mended = False
            while True:
                try:
                    return once()
                except (sqlite3.Error, UnicodeDecodeError) as err:  # noqa: PERF203
                    what = faults.kind(err)
                    if what == "other" and self._damaged():
                        what = "corrupt"  # an index that disagrees with its table, a column that is gone
                    if what == "corrupt" and self._create and not mended:
                        if doubted or _is_surely_damaged(self._handle):
                            self.mend(str(err))
                            mended = True
                        doubted = True  # one read that the disk refused is damage to SQLite, too
                        continue
                    if what in ("corrupt", "full", "io", "readonly", "cantopen"):
                        self._handle.drop()  # the next use opens again: the fault may be mended by then
                    raise faults.store_error(err, self.path, waited_s=self.timeout_s) from err
                except (OSError, OverflowError, UnicodeEncodeError, MemoryError) as err:
                    if isinstance(err, MemoryError):  # Python's exception for SQLITE_NOMEM
                        self._handle.drop()
                    raise faults.other_error(err, self.path) from err

    def _damaged(self) -> bool:
        """Check the whole file, once per open, since the error may be the caller's as well."""
        from gemmtuned.db import upkeep  # rarely needed, and programs import this module

        if self._handle.conn is None or self._examined == self.opened:
            return False
        self._examined = self.opened
        try:
            return bool(upkeep.findings(self._handle.conn))
        except (sqlite3.Error, UnicodeDecodeError) as err:
            return faults.kind(err) == "corrupt"  # an error of the disk says nothing about the file

    def _write(self, work: Callable[[sqlite3.Connection], T], durable: bool, unchecked: bool) -> T:
        self._handle.ready()
        results: list[T] = []
        try:
            with under_lock(self._handle), foreign_keys(self._handle, off=unchecked):
                failpoints.point("store.begin")
                conn = self._handle.ready_to_write()  # again, since the file may have been set aside while we waited
                _transact(self._handle, conn, work, durable, results)
                self._after_commit(conn, durable)
        except Exception as err:
            if not results:
                raise
            _tell_trouble(self.path, err)
        return results[0]

    def _after_commit(self, conn: sqlite3.Connection, durable: bool) -> None:
        """Housekeeping after a commit. Its errors must not reach the caller, who would do the work a second time."""
        try:
            failpoints.point("store.committed")
            if durable:
                conn.execute("PRAGMA synchronous = NORMAL")
            self._handle.checkpoint_if_large(conn)
        except (sqlite3.Error, OSError, MemoryError) as err:
            _tell_trouble(self.path, err)
            with contextlib.suppress(sqlite3.Error, OSError):
                self._handle.drop(locked=True)  # opened anew at the next use


def _transact(
    handle: Handle, conn: sqlite3.Connection, work: Callable[[sqlite3.Connection], T], durable: bool, results: list[T]
) -> None:
    """Do the work in one transaction. Once that is committed, `results` has its result."""
    if durable:
        conn.execute("PRAGMA synchronous = FULL")
    conn.execute("BEGIN IMMEDIATE")  # as in `read`
    try:
        _refuse_newer(conn, handle.path)
        result = work(conn)
        failpoints.point("store.commit")
        handle.commit(conn)
        results.append(result)
    except BaseException:
        if conn is handle.conn and conn.in_transaction:
            conn.execute("ROLLBACK")
        if durable:
            with contextlib.suppress(sqlite3.Error):
                conn.execute("PRAGMA synchronous = NORMAL")
        raise


def _tell_trouble(path: Path, err: Exception) -> None:
    tell(log, logging.WARNING, "written, and trouble after it path=%s reason=%s", path, err)


def _is_surely_damaged(handle: Handle) -> bool:
    """Close the file and look at all of it, twice if something is found. Raises StoreError if it cannot be read."""
    from gemmtuned.db import upkeep

    handle.drop()
    beat = handle.beat
    return bool(upkeep.damage(handle.path) if beat is _nothing else upkeep.damage_beside(handle.path, beat))


def _refuse_newer(conn: sqlite3.Connection, path: Path) -> None:
    """Raise StoreError if a newer version has migrated the file while we had it open."""
    (version,) = conn.execute("PRAGMA user_version").fetchone()
    if version > migrations.SCHEMA:
        raise StoreError(migrations.too_new(path, version))


def at_end(one: Connection) -> None:
    """The program ends: allow its last counts a longer log than usual."""
    one._handle.most_log_bytes, one._handle.is_last = LAST_LOG_BYTES, True


def set_aside(one: Connection) -> Path | None:
    """The damaged file in whose place this process put a new one last; None when it has not."""
    return one._handle.set_aside


def _nothing() -> None:
    pass


def close_all_before_fork() -> None:
    """Before a fork: close every database, so that the child inherits none of SQLite's locks."""
    for one in list(_all) if _in_use else ():  # mostly none is, in a program that is not ours
        one.close_before_fork()


def _note_use() -> None:
    """Note whether any is in use, so that a fork need not look at each."""
    global _in_use
    _in_use = False
    for one in list(_all):
        if one._handle.conn is not None or one.lock.is_open or one._thread.is_taken:
            _in_use = True


def _mind_forks() -> None:
    """Notice a fork; every use calls this first, since some forks run no Python hooks, or run ours too late."""
    global _process
    if _process != own_process():
        _process = own_process()
        for one in list(_all):
            one.after_fork()


def _close_at_end(one: Connection) -> None:
    """As `close`; the end of the program waits neither for others nor for a disk that does not answer."""
    _mind_forks()
    one._handle.timeout_s = min(one.timeout_s, AT_END_S)
    if one._thread.enter(AT_END_S):
        try:
            one._handle.drop()
            one.lock.close()
        finally:
            one._thread.leave()


def _at_exit() -> None:
    for one in list(_all):
        _close_at_end(one)


_all: weakref.WeakSet[Connection] = weakref.WeakSet()
_in_use = False  # whether one of them may be
_process = own_process()  # that all of them are of
os.register_at_fork(before=close_all_before_fork, after_in_child=lambda: _mind_forks() if _in_use else None)
atexit.register(_at_exit)
