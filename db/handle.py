"""The SQLite handle of a database: it opens, opens anew when the file was replaced, closes, checkpoints and mends.

A process has one handle per file.  `Connection` (connect.py) decides when each of these is done and holds the lock of
its threads meanwhile; whatever closes or checkpoints also holds the lock file.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gemmtuned._testing import faults as failpoints
from gemmtuned.configs import clock
from gemmtuned.configs.errors import StoreBusy, StoreError
from gemmtuned.configs.open_files import free_bytes
from gemmtuned.configs.stderr_lines import tell
from gemmtuned.configs.unpatched import builtins, os, sleep
from gemmtuned.db import faults, migrations, stale_log
from gemmtuned.db.descriptors import Descriptors
from gemmtuned.db.files import connect, identity, journal_mode, leave_log, make, refuse_network, salvage_is_finished
from gemmtuned.db.lockfile import LockFile

if TYPE_CHECKING:
    from gemmtuned.db.mend import Report

__builtins__ = builtins

Beat = Callable[[], None]
log = logging.getLogger(__name__)
MAX_WAL_BYTES: Final = 4 << 20  # a longer log (WAL) makes any writer checkpoint, about 15 ms; else the daemon does
LONG_LOG_BYTES: Final = 64 << 20  # programs add nothing to a longer log, which some reader keeps from being cut
LAST_LOG_BYTES: Final = 256 << 20  # the same limit for a program's last counts; none where the disk has LAST_ROOM_BYTES
_OTHERS_CLOSE_S: Final = 0.02
LAST_ROOM_BYTES: Final = 1 << 30  # room and more: what is not written then is lost
_READER: Final = (
    "a program has been reading the database for long (an open transaction, in a sqlite3 shell or a notebook): close it"
)
_untouchable: dict[Path, str] = {}  # databases that this process must not use any more, and why


class Handle:
    """The handle. create: make a missing file. upgrade: migrate an older schema. beat: called while a file is mended.

    named: the path as given; path: with links resolved.  conn: None while closed.  file: (st_dev, st_ino) of the file
    that it writes to, or that could not be opened.  opened: rises with every open, which voids what was remembered.
    """

    def __init__(
        self, path: Path, lock: LockFile, *, timeout_s: float, create: bool, upgrade: bool, beat: Beat
    ) -> None:
        self.named = path if path.is_absolute() else Path.cwd() / path
        self.path = self.named.resolve()  # SQLite puts the log beside the file that a link points to, and so must we
        self.lock, self.timeout_s = lock, timeout_s
        self.conn: sqlite3.Connection | None = None
        self.file: tuple[int, int] | None = None
        self.opened = 0
        self._local: tuple[int, int] | None = None  # the file of which is known that it is on no network
        self.most_log_bytes = LONG_LOG_BYTES
        self.is_last = False  # the program ends, and writes for the last time
        self._log_told = False
        self.set_aside: Path | None = None  # the damaged file in whose place this process put a new one last
        self.log = stale_log.Log()
        self._create, self._upgrade, self.beat = create, upgrade, beat
        self._descriptors: Descriptors | None = None  # those of conn, in a program that is not ours
        self._handles = 0  # how many SQLite handles are open: conn, and those that could not be closed

    def acquire(self) -> None:
        """Take the lock file. Raises StoreBusy when others held it for all of timeout_s."""
        if not self.lock.acquire(self.timeout_s, make=True):
            raise faults.busy(self.path, self.timeout_s)

    def ready(self, *, locked: bool = False) -> sqlite3.Connection:
        """A connection to the file that lies at path now, opened again if that is another one."""
        self.refuse_untouchable()
        found = identity(self.named)
        if self.conn is not None and found == self.file:
            self.log.note(self.path, found)
            return self.conn
        self.drop(locked=locked)
        self.path = self.named.resolve()  # a link may point elsewhere by now
        if salvage_is_finished(self.path):
            self._finish_salvage(locked=locked)
            found = identity(self.path)
        if found is None:
            if not self._create:
                raise faults.no_database(self.path)
            _make(self, locked=locked)
            found = identity(self.path)
        elif self.log.is_of_another(self.path, found):
            _put_log_away(self, found, locked=locked)
        self.file = found
        if found != self._local:  # else it was asked of this very file
            refuse_network(self.path)
            self._local = found
        if self._upgrade:  # the daemon and commands, which wait long
            faults.refuse_without_locks(self.path)
        self._handles += 1
        descriptors = None if self._upgrade else Descriptors(self.path)
        try:
            failpoints.point("store.open")
            conn = connect(self.path, self.timeout_s)
            if not self._upgrade:
                leave_log(conn)
        except BaseException:
            self._handles -= 1
            raise
        self.conn, self._descriptors = conn, descriptors
        try:
            if migrations.pending(conn, self.path) or journal_mode(conn) != "wal":
                self._set_up(conn, locked=locked)
            elif descriptors is not None:
                descriptors.find()
        except BaseException:
            if conn is self.conn and not self.is_cut_off():
                self.conn = None
                self.close(conn)
            raise
        self.log.note(self.path, found)
        self.opened += 1
        return conn

    def _set_up(self, conn: sqlite3.Connection, *, locked: bool) -> None:
        """Make the schema of a new file, or bring an older one up to date."""
        if self._upgrade and migrations.identity(conn)[1] and migrations.pending(conn, self.path):
            migrations.load()  # before the lock: it takes longer than most upgrades
        if locked:
            _keeps_log(conn, self.timeout_s, wait=True)
        else:
            _acquire_with_log(self, conn, self._descriptors)
        try:
            if self._descriptors is not None:
                self._descriptors.find()
            if migrations.pending(conn, self.path):
                failpoints.point("store.migrate")
                self._migrate(conn)
        finally:
            if not locked:
                self.lock.release()

    def _migrate(self, conn: sqlite3.Connection) -> None:
        """Apply the pending steps of the schema, under the lock; an upgrade is reported, since programs wait for it."""
        _, had = migrations.identity(conn)
        began_s = clock.monotonic()
        if had and self._upgrade:
            mb = os.stat(self.path).st_size / 1e6
            tell(log, logging.INFO, "upgrading path=%s schema=%d to=%d mb=%.0f", self.path, had, migrations.SCHEMA, mb)
        migrations.apply(conn, self.path, upgrade=self._upgrade, check=self.refuse_untouchable)
        self.checkpoint_if_large(conn)  # an upgrade's log, now and not after somebody's next write
        if had:
            tell(log, logging.INFO, "upgraded path=%s seconds=%.1f", self.path, clock.monotonic() - began_s)

    def commit(self, conn: sqlite3.Connection) -> None:
        """Commit a transaction, if its file is still the one at our path."""
        self.refuse_untouchable()
        conn.execute("COMMIT")
        self.log.note(self.path, self.file)  # it may have been empty before

    def refuse_untouchable(self) -> None:
        """Raise StoreError for a database whose use by this process, even a close, could harm others."""
        if self.path in _untouchable or self.is_cut_off():
            raise StoreError(f"{self.path}: {_untouchable[self.path]}")

    def is_cut_off(self) -> bool:
        """Whether the program has closed SQLite's descriptors; then the handle is leaked and no other is opened.

        SQLite would share memory and locks between the two handles, and would not know that the descriptors are gone.
        """
        conn = self.conn
        if conn is None or self._descriptors is None or self._descriptors.are_there():
            return False
        _leak(conn)
        self.conn = self.file = self._descriptors = None
        _untouchable[self.path] = "the program closed its descriptors while counts were written, so it is let alone"
        return True

    def drop(self, *, locked: bool = False) -> None:
        """Close the handle under the lock file, or leak it if the lock cannot be had. locked: the caller holds it."""
        if self.is_cut_off():
            return
        conn, self.conn = self.conn, None
        self.file = None
        if conn is None:
            return
        if locked:
            self.close(conn)
            return
        try:
            held = self.lock.acquire(self.timeout_s)
        except OSError:
            held = False
        if not held:  # a close without the lock could checkpoint into somebody's write
            _leak(conn)
            return
        try:
            self.close(conn)
        except sqlite3.Error as err:
            tell(log, logging.DEBUG, "close failed path=%s reason=%s", self.path, err)
        finally:
            self.lock.release()

    def close(self, conn: sqlite3.Connection) -> None:
        """Close this handle, under the lock."""
        conn.close()
        self._handles -= 1

    def leak(self) -> None:
        """In a forked child: keep the parent's handle for ever, because it must not even be closed here."""
        conn, self.conn = self.conn, None
        if conn is not None:
            _leak(conn)
        if self._handles:
            _untouchable[self.path] = (
                "open when this process was forked, so it cannot be used safely here. "
                "Fork by os.fork or multiprocessing while nothing is written, or start processes anew (spawn)"
            )

    def checkpoint_if_large(self, conn: sqlite3.Connection) -> None:
        """Under the lock: checkpoint when the log is longer than MAX_WAL_BYTES."""
        size = self._log_bytes()
        if size <= MAX_WAL_BYTES:
            return
        conn.execute("PRAGMA busy_timeout = 0")  # do not wait for a reader
        try:
            ((kept, _, _),) = conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            if (
                kept and size > LONG_LOG_BYTES and self._upgrade and not self._log_told
            ):  # in a program the flush says it
                tell(log, logging.WARNING, "log grows path=%s-wal mb=%d reason=%r", self.path, size >> 20, _READER)
            self._log_told = bool(kept) and (self._log_told or size > LONG_LOG_BYTES)
        except sqlite3.DatabaseError as err:
            tell(log, logging.WARNING, "checkpoint failed path=%s reason=%s", self.path, err)
        finally:
            conn.execute(f"PRAGMA busy_timeout = {int(self.timeout_s * 1000)}")

    def ready_to_write(self) -> sqlite3.Connection:
        """As `ready`, under the lock. In a user's program it raises StoreBusy when a reader has made the log too long.

        A snapshot that somebody holds open for hours must not fill the disk; counts stay in memory meanwhile.
        """
        conn = self.ready(locked=True)
        if self._upgrade or self._log_bytes() <= self.most_log_bytes:
            return conn
        self.checkpoint_if_large(conn)
        if self._log_bytes() > self.most_log_bytes and not (self.is_last and _has_room(self.path.parent)):
            raise StoreBusy(f"{self.path}-wal: more than {self.most_log_bytes >> 20} MiB, for {_READER}")
        return conn

    def _log_bytes(self) -> int:
        try:
            return os.stat(f"{self.path}-wal").st_size
        except OSError:
            return 0

    def rebuild(self, reason: str, of: tuple[int, int] | None) -> None:
        """Salvage what can be read into a new file, put it in place of the damaged one, and open it."""
        from gemmtuned.db import mend  # late: rarely needed, and users' programs import this module

        self.refuse_untouchable()  # a descriptor of the program's may have been read
        # of the file that we have open: another process may have mended the one at the path
        damaged = of or self.file or identity(self.path)
        self.drop()
        with under_lock(self):
            if identity(self.path) != damaged:
                return  # another process was faster
            faults.refuse_strange(self.path)
            migrations.refuse_newer_header(self.path)
            tell(
                log, logging.WARNING,
                "store is damaged path=%s reason=%r: what can be read is salvaged", self.path, reason,
            )  # fmt: skip
            self._say(mend.rebuild(self.path, reason=reason, beat=self.beat))
            self.ready(locked=True)

    def _finish_salvage(self, *, locked: bool) -> None:
        """Finish a salvage that a killed process had begun."""
        from gemmtuned.db import mend

        with under_lock(self, held=locked):
            report = mend.finish(self.path)
            if report is not None:
                self._say(report)

    def _say(self, report: Report) -> None:
        self.set_aside = self.path.with_name(report.set_aside)
        tell(
            log, logging.WARNING,
            "store was damaged path=%s reason=%r set_aside=%s salvaged_rows=%d lost_calls=%s",
            self.path, report.reason, self.set_aside, report.salvaged_rows, report.lost,
        )  # fmt: skip


@contextlib.contextmanager
def under_lock(handle: Handle, *, held: bool = False) -> Iterator[None]:
    """Hold the lock file inside. held: the caller holds it already and keeps it. Raises as `acquire` does."""
    if held:
        yield
        return
    handle.acquire()
    try:
        yield
    finally:
        handle.lock.release()


def end_transaction(handle: Handle) -> None:
    """End one that an exception from a signal's handler has cut off: it would keep all other programs waiting."""
    conn = handle.conn
    if conn is not None and conn.in_transaction and not handle.is_cut_off():
        with contextlib.suppress(sqlite3.Error):  # the next statement says what is wrong
            conn.execute("ROLLBACK")


@contextlib.contextmanager
def foreign_keys(handle: Handle, *, off: bool) -> Iterator[None]:
    """off: SQLite does not look inside for rows that name what is deleted. A transaction cannot switch that itself."""
    conn = handle.conn if off else None
    if conn is not None:
        conn.execute("PRAGMA foreign_keys = OFF")
    try:
        yield
    finally:
        if conn is not None and conn is handle.conn:  # else it was opened anew, with the look
            conn.execute("PRAGMA foreign_keys = ON")


def _make(handle: Handle, *, locked: bool) -> None:
    """Make an empty file, which gets neither the log nor the shared memory of one that was removed.

    SQLite would truncate that memory for a log of its own, and programs that have it mapped would die of SIGBUS.
    """
    if not stale_log.lies_at(handle.path):
        make(handle.path)
        return
    with under_lock(handle, held=locked):
        if identity(handle.path) is None:  # else another process was faster
            stale_log.put_away(handle.path)
            make(handle.path)


def _put_log_away(handle: Handle, found: tuple[int, int], *, locked: bool) -> None:
    """If another database was put in place of the former one, move that one's log away."""
    with under_lock(handle, held=locked):
        if handle.log.is_of_another(handle.path, found):  # else another process was faster
            aside = stale_log.put_away(handle.path)
            tell(log, logging.WARNING, "database was replaced path=%s log_set_aside=%s", handle.path, aside)


def _acquire_with_log(handle: Handle, conn: sqlite3.Connection, descriptors: Descriptors | None) -> None:
    """Take the lock with a log beside the file. It waits without the lock, which others need to close the file."""
    until_s = clock.monotonic() + handle.timeout_s
    handle.acquire()
    try:
        while not _keeps_log(conn, handle.timeout_s, wait=clock.monotonic() > until_s):
            if descriptors is not None:
                descriptors.find()
            handle.lock.release()
            sleep(_OTHERS_CLOSE_S)
            handle.acquire()
            handle.refuse_untouchable()
    except StoreBusy:
        raise  # the lock is not held
    except BaseException:
        handle.lock.release()
        raise


def _keeps_log(conn: sqlite3.Connection, timeout_s: float, *, wait: bool) -> bool:
    """Switch the file to a log (WAL). False if others have it open; with `wait` SQLite waits for them, then raises."""
    if journal_mode(conn) == "wal":
        return True
    try:
        conn.execute(f"PRAGMA busy_timeout = {timeout_s * 1000 if wait else 20:.0f}")
        conn.execute("PRAGMA journal_mode = WAL").fetchall()
    except sqlite3.OperationalError as err:
        if wait or faults.kind(err) != "busy":
            raise
        return False
    finally:
        conn.execute(f"PRAGMA busy_timeout = {timeout_s * 1000:.0f}")
    return True


def _has_room(folder: Path) -> bool:
    try:
        free = free_bytes(folder)
    except OSError:
        return False
    return free is None or free >= LAST_ROOM_BYTES


def _leak(conn: sqlite3.Connection) -> None:
    """Keep a reference for ever, so that the connection is never freed and never closed."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(conn))
