"""The connection to the database: opened, kept, given up and mended in one place.

What is guarded against here, each seen happen: a connection used across fork, a database deleted or replaced under
its writers (SQLite goes on writing into the unlinked file), a corrupt file, a full disk, a write that overlaps a
checkpoint, a deferred transaction that fails at once instead of waiting.  Callers hand in a function and get its
result: `write` runs it as one BEGIN IMMEDIATE transaction under the lock file, `read` as one snapshot.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from gemmtuned.configs.errors import StoreError
from gemmtuned.db import faults, migrations
from gemmtuned.db.lockfile import LockFile, file_mode

T = TypeVar("T")
log = logging.getLogger(__name__)

MIN_SQLITE: Final = (3, 37)  # STRICT tables; RETURNING came in 3.35
MAX_WAL_BYTES: Final = 16 << 20  # above this a writer checkpoints; else only the daemon does
JOURNAL_LIMIT_BYTES: Final = 64 << 20
NETWORK_FILESYSTEMS: Final = ("nfs", "cifs", "smb", "9p", "lustre", "gpfs", "ceph", "glusterfs", "afs", "fuse.sshfs")


class Connection:
    """The one writer's connection of a Store. Threads share it; forked children get their own."""

    def __init__(self, path: Path, *, locks: Path, timeout_s: float, create: bool) -> None:
        if sqlite3.sqlite_version_info < MIN_SQLITE:
            raise StoreError(f"SQLite {sqlite3.sqlite_version} is too old, 3.37 is needed: use a newer Python")
        self.path = path.resolve()  # SQLite puts the log beside the file that a link points to, and so must we
        self.lock = LockFile(locks / f"{path.name}.lock")
        self.timeout_s = timeout_s
        self.opened = 0  # rises with every open: what was remembered of the file before is void
        self._create = create
        self._conn: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None  # (st_dev, st_ino) of what _conn writes to
        self._pid = os.getpid()
        self._thread = threading.RLock()
        _all.add(self)
        with self._thread:
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

    def checkpoint(self) -> None:
        """Bring the write-ahead log into the database and cut it to nothing, unless a reader holds it."""

        def once() -> None:
            conn = self._ready()
            self._acquire()
            try:
                conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            finally:
                self.lock.release()

        self._guarded(once)

    def file(self) -> tuple[int, int]:
        """(st_dev, st_ino) of the open file."""
        return self._file or (0, 0)

    def close(self) -> None:
        """Close under the lock: the last connection to close checkpoints. The next use opens again."""
        with self._thread:
            self._drop()
            self.lock.close()

    def mend(self, reason: str) -> None:
        """Set the damaged file aside, salvage what can be read into a new one and log one warning.

        Does nothing when another process was faster.  Raises StoreError.
        """
        with self._thread:
            try:
                self._set_aside(reason)
            except (sqlite3.Error, OSError) as err:
                self._drop()
                raise faults.store_error(err, self.path, waited_s=self.timeout_s) from err

    def after_fork(self) -> None:
        """In a forked child: leak the parent's handle, which must not even be closed here."""
        self._thread = threading.RLock()
        self._pid = os.getpid()
        conn, self._conn = self._conn, None
        if conn is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(conn))  # never freed, so never closed
        self.lock.after_fork()

    # --- below: self._thread is held ---

    def _guarded(self, once: Callable[[], T]) -> T:
        if os.getpid() != self._pid:  # forked by something that runs no Python hooks
            self.after_fork()
        with self._thread:
            for last in (False, True):
                try:
                    return once()
                except sqlite3.Error as err:  # noqa: PERF203
                    what = faults.kind(err)
                    if what == "corrupt" and self._create and not last:
                        self.mend(str(err))
                        continue
                    if what in ("corrupt", "full", "io", "readonly", "cantopen"):
                        self._drop()  # open again next time: what is wrong may be mended by then
                    raise faults.store_error(err, self.path, waited_s=self.timeout_s) from err
                except OSError as err:
                    raise faults.store_error(err, self.path) from err
            raise AssertionError("unreachable")

    def _write(self, work: Callable[[sqlite3.Connection], T], durable: bool) -> T:
        self._ready()
        self._acquire()
        try:
            conn = self._ready(locked=True)  # again: it may have been set aside while we waited
            if durable:
                conn.execute("PRAGMA synchronous = FULL")
            conn.execute("BEGIN IMMEDIATE")
            try:
                result = work(conn)
                conn.execute("COMMIT")
            except BaseException:
                if conn.in_transaction:
                    conn.execute("ROLLBACK")
                raise
            finally:
                if durable:
                    conn.execute("PRAGMA synchronous = NORMAL")
            self._checkpoint_if_large(conn)
            return result
        finally:
            self.lock.release()

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
        except sqlite3.DatabaseError as err:  # the transaction is committed: this must not undo the caller's belief
            log.warning("checkpoint failed path=%s reason=%s", self.path, err)
        finally:
            conn.execute(f"PRAGMA busy_timeout = {int(self.timeout_s * 1000)}")

    def _acquire(self) -> None:
        if not self.lock.acquire(self.timeout_s):
            raise faults.busy(self.path, self.timeout_s)

    def _ready(self, *, locked: bool = False) -> sqlite3.Connection:
        """The connection to the file that now lies at path, opened or opened again."""
        found = _identity(self.path)
        if self._conn is not None and found == self._file:
            return self._conn
        self._drop(locked=locked)
        if found is None:
            if not self._create:
                raise StoreError(
                    f"{self.path}: no such database. Run a program with AITER_TUNE_GEMM=1 first, or set GEMMTUNED_DB"
                )
            _make(self.path)
        _refuse_network(self.path)
        conn = connect(self.path, self.timeout_s)
        try:
            if migrations.pending(conn, self.path) or _journal_mode(conn) != "wal":
                if not locked:
                    self._acquire()
                try:
                    if migrations.pending(conn, self.path):
                        migrations.apply(conn)
                    if _journal_mode(conn) != "wal":
                        conn.execute("PRAGMA journal_mode = WAL").fetchall()
                finally:
                    if not locked:
                        self.lock.release()
        except BaseException:
            conn.close()
            raise
        self._conn, self._file = conn, _identity(self.path)
        self.opened += 1
        return conn

    def _drop(self, *, locked: bool = False) -> None:
        conn, self._conn = self._conn, None
        self._file = None
        if conn is None:
            return
        if locked:
            conn.close()
            return
        try:
            held = self.lock.acquire(self.timeout_s)
        except OSError:
            held = False
        if not held:  # closing without the lock could checkpoint into somebody's write: never close it
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(conn))
            return
        try:
            conn.close()
        except sqlite3.Error as err:
            log.debug("close failed path=%s reason=%s", self.path, err)
        finally:
            self.lock.release()

    def _set_aside(self, reason: str) -> None:
        from gemmtuned.db import salvage  # rarely needed, and programs import this module

        damaged = self._file or _identity(self.path)
        self._drop()
        self._acquire()
        try:
            if _identity(self.path) != damaged:
                return  # another process was faster
            aside = salvage.set_aside(self.path)
            new = self._ready(locked=True)
            rows = 0
            try:
                rows = salvage.copy(aside, new)
            finally:
                text = "store was damaged path=%s reason=%r set_aside=%s salvaged_rows=%d"
                log.warning(text, self.path, reason, aside, rows)
        finally:
            self.lock.release()


def connect(path: Path, timeout_s: float) -> sqlite3.Connection:
    """A bare read-write connection with our pragmas. Statements commit by themselves unless a BEGIN was sent."""
    conn = sqlite3.connect(
        f"{path.as_uri()}?mode=rw",
        uri=True,
        timeout=timeout_s,
        isolation_level=None,
        check_same_thread=False,
    )
    for pragma in (
        "synchronous = NORMAL",  # counts survive a kill; installs ask for FULL
        "wal_autocheckpoint = 0",
        f"journal_size_limit = {JOURNAL_LIMIT_BYTES}",
        "foreign_keys = ON",
        "trusted_schema = OFF",
        "temp_store = MEMORY",
    ):
        conn.execute(f"PRAGMA {pragma}").fetchall()
    return conn


def connect_read_only(path: Path, timeout_s: float = 5.0) -> sqlite3.Connection:
    """A connection that cannot write. Raises StoreError when there is no database or it cannot be read.

    Where the folder cannot be written SQLite needs a live writer to share memory with; without one, and without a
    log that would be missed, the file is read as it lies.
    """
    if not path.exists():
        raise StoreError(f"{path}: no such database. Run a program with AITER_TUNE_GEMM=1 first, or set GEMMTUNED_DB")
    path = path.resolve()
    uri = path.as_uri()
    try:
        try:
            return _probed(f"{uri}?mode=ro", timeout_s)
        except sqlite3.OperationalError as err:
            wal = path.with_name(path.name + "-wal")
            if faults.kind(err) not in ("readonly", "cantopen") or (wal.exists() and wal.stat().st_size):
                raise
            return _probed(f"{uri}?mode=ro&immutable=1", timeout_s)
    except (sqlite3.Error, OSError) as err:
        raise faults.store_error(err, path, waited_s=timeout_s) from err


def _probed(uri: str, timeout_s: float) -> sqlite3.Connection:
    conn = sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None)
    try:
        conn.execute("PRAGMA trusted_schema = OFF")
        conn.execute("SELECT count(*) FROM sqlite_master").fetchall()
    except BaseException:
        conn.close()
        raise
    return conn


def _journal_mode(conn: sqlite3.Connection) -> str:
    return str(conn.execute("PRAGMA journal_mode").fetchone()[0])


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file lies at path. stat alone: to open and close the file here would drop SQLite's locks on it."""
    try:
        facts = os.stat(path)  # noqa: PTH116
    except FileNotFoundError:
        return None
    return facts.st_dev, facts.st_ino


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    try:
        os.fchmod(fd, file_mode(path.parent))  # SQLite gives -wal and -shm the same mode
    finally:
        os.close(fd)


def _refuse_network(path: Path) -> None:
    """WAL needs memory shared by all who open the file, which no network file system has."""
    mounts = Path("/proc/self/mountinfo")
    if not mounts.exists():
        return
    real = str(path.parent.resolve())
    best, kind = "", ""
    for line in mounts.read_text(errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        point = left.split(" ")[4].replace("\\040", " ")
        if len(point) >= len(best) and (real == point or real.startswith(point.rstrip("/") + "/")):
            best, kind = point, right.split(" ")[0]
    if kind.startswith(NETWORK_FILESYSTEMS):
        raise StoreError(
            f"{path}: on {kind}, where SQLite cannot share memory. Set GEMMTUNED_HOME to a folder on a local disk"
        )


def _fork_child() -> None:
    for one in list(_all):
        one.after_fork()


def _at_exit() -> None:
    for one in list(_all):
        one.timeout_s = min(one.timeout_s, 0.25)  # never hold up the end of the program
        one.close()


_all: weakref.WeakSet[Connection] = weakref.WeakSet()
os.register_at_fork(after_in_child=_fork_child)
atexit.register(_at_exit)
