"""One lock file around every write and every checkpoint of a database.

SQLite before 3.51.3 can lose committed pages when a write and a checkpoint of two connections overlap
(sqlite.org/wal.html#walresetbug), and its own busy handler is unfair: with this lock in front eight writers wait at
most a tenth as long.  The kernel frees it when its holder dies.
"""

from __future__ import annotations

import contextlib
import errno
import stat
from pathlib import Path
from typing import Final

from gemmtuned._testing import faults
from gemmtuned.configs import clock
from gemmtuned.configs.open_files import make_folders
from gemmtuned.configs.processes import is_stopped
from gemmtuned.configs.unpatched import allocate_lock, builtins, fcntl, os, sleep
from gemmtuned.db.descriptors import identity_of

__builtins__ = builtins

STOPPED: Final = "stopped"
_FIRST_TABLE: Final = 64  # numbers that Linux has room for in each process from its start
_HIGH: Final = 640  # below the usual limit of 1024
_CLEAR: Final = 16  # numbers between the program's lowest free one and ours


class LockFile:
    """An exclusive lock between processes and between the threads of this one. Not re-entrant.

    A forked child drops its copy of the descriptor (`after_fork`): a copy left open would keep the lock held after
    the parent was killed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._which: tuple[int, int] | None = None  # the file it is, as long as it is ours
        self._thread = allocate_lock()

    def acquire(self, timeout_s: float, *, make: bool = False) -> bool:
        """True once we hold the lock, False when others held it for all of timeout_s. Raises OSError.

        If the file at the path was replaced, the new one is locked, since processes started since then lock that.
        make: if it was removed, make a new one; without `make` the removed file is locked and no folder is made.
        """
        deadline = clock.monotonic() + timeout_s
        if not self._thread.acquire(timeout=max(timeout_s, 0)):
            return False
        try:
            pause_s = 0.0005
            while True:
                fd = self._opened(make=make)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    left_s = deadline - clock.monotonic()
                    if left_s <= 0:
                        self._thread.release()
                        return False
                    sleep(min(pause_s, left_s))
                    pause_s = min(pause_s * 1.5, 0.008)
                else:
                    if self._is_current(make=make):  # it may have been removed before we had the lock
                        return True
        except BaseException:
            self._thread.release()
            raise

    def _opened(self, *, make: bool) -> int:
        if self._fd is None or not self._is_open() or not self._is_current(make=make):
            self.close()
            self._fd = out_of_the_way(open_lock(self.path))
            self._which = identity_of(self._fd)
        return self._fd

    def _is_current(self, *, make: bool) -> bool:
        """Whether the file that we have open is the one that others would lock."""
        found = lies_at(self.path)
        return found == self._which if found is not None else not make

    def release(self) -> None:
        """Release the lock; only its holder may call this. Never raises, because the guarded work is done."""
        try:
            faults.point("lock.release")
            if self._fd is not None and self._is_open():
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        except OSError:
            with contextlib.suppress(OSError):
                self.close()  # which releases the lock, too
        finally:
            self._thread.release()

    @property
    def is_open(self) -> bool:
        """Whether it has a descriptor."""
        return self._fd is not None

    def free(self) -> None:
        """Release what a call was kept from releasing; only who knows that nobody in this process holds it may call."""
        if self._thread.locked():
            self.release()

    def close(self) -> None:
        """Close the descriptor. The lock must not be held."""
        if self._fd is not None and self._is_open():
            os.close(self._fd)
        self._fd = None

    def _is_open(self) -> bool:
        """Whether the descriptor is still ours: the program may have closed it, and opened another file there."""
        return self._fd is not None and self._which is not None and identity_of(self._fd) == self._which

    def after_fork(self) -> None:
        """In the child: forget the parent's lock. Closing our copy of the descriptor does not release it."""
        self._thread = allocate_lock()
        self.close()


def locks_of(path: Path, locks: Path) -> Path:
    """Where the lock of the database at path lies: the same for all homes that use it, by a link or GEMMTUNED_DB."""
    folder, beside = path.parent, path.parent / "locks"
    if Path(os.path.realpath(locks)) in (folder, beside):  # Path.resolve raises where links lead in a circle
        return locks
    return beside if beside.is_dir() or beside.is_symlink() else folder


def out_of_the_way(fd: int) -> int:
    """The same file with a high descriptor, which is not reused if the program closes it: new files get the lowest.

    That matters because another thread may run between our look at the descriptor and its close.  Returns the given
    descriptor if there is no high one.
    """
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _high_number(fd))
    except OSError:
        return fd
    os.close(fd)
    return high


def _high_number(lowest: int) -> int:
    """A free number far above the lowest free one, within the kernel's table for this process if it has such a one.

    To make that table larger takes the kernel 5 to 15 ms in a process with several threads: it waits for RCU.
    """
    size = _FIRST_TABLE if lowest < _FIRST_TABLE // 2 else _table_size()
    for number in range(size - 1, max(lowest + _CLEAR, size - 1 - _CLEAR), -1):
        if identity_of(number) is None:
            return number
    return _HIGH


def _table_size() -> int:
    """How many descriptors this process can have before the kernel makes its table larger; 0 when that is not known."""
    try:
        fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        _, _, rest = os.read(fd, 4096).partition(b"\nFDSize:")
        return int(rest.split(maxsplit=1)[0])
    except (OSError, ValueError, IndexError):
        return 0
    finally:
        os.close(fd)


def lies_at(path: Path) -> tuple[int, int] | None:
    """(st_dev, st_ino) of the file at path, to compare with what is open of a lock file; None when there is none."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def open_lock(path: Path) -> int:
    """Open a lock file, made if need be, with the narrowest mode: whoever can open it can hold it for ever.

    Only its owner may open it, and the group if the group may write to the folder, and so shares what it guards.  A
    wider mode of an earlier version is corrected.  Raises OSError, also for anything but a regular file: a FIFO or a
    device could block `open`.
    """
    make_folders(path.parent)
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        with contextlib.suppress(FileNotFoundError):
            return _ours(os.open(path, flags), path)
        with contextlib.suppress(FileExistsError):  # another process was faster
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            owner = path.parent.stat().st_uid
            if os.geteuid() == 0 != owner:  # a file that root makes must not lock the folder's owner out
                os.fchown(fd, owner, -1)
            return _ours(fd, path)


def _ours(fd: int, path: Path) -> int:
    """The descriptor, if it is of a lock file, which gets its mode whatever the umask."""
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, f"{what_lies_there(facts.st_mode)} lies there; remove it")
        mode = 0o660 if path.parent.stat().st_mode & stat.S_IWGRP else 0o600
        if os.geteuid() in (0, facts.st_uid) and stat.S_IMODE(facts.st_mode) != mode:
            os.fchmod(fd, mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def way_out(err: OSError) -> str:
    """What helps where a lock cannot be opened, as the end of a message; "" where its error does not tell."""
    if isinstance(err, NotADirectoryError):
        return ". Move it away, or set GEMMTUNED_HOME to another folder"
    if isinstance(err, PermissionError):
        who = f"uid {os.geteuid()}"
        return f". Give {who} write access to it and its folder, or set GEMMTUNED_HOME to a folder of its own"
    return ""


def what_lies_there(mode: int) -> str:
    """The kind of file with this st_mode, in words."""
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}
    return kinds.get(stat.S_IFMT(mode), "a regular file" if stat.S_ISREG(mode) else "a device")


def holder(path: Path) -> str:
    """Which process holds this lock: "pid 7 (name, user)"; "" when that is not known.

    If the process was stopped by a signal, the text contains STOPPED and how to continue it.

    /proc/locks lists locks by device and inode; those of other PID namespaces have a pid that does not exist here.
    """
    try:
        facts = path.stat()
        where = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
        lines = Path("/proc/locks").read_text("utf-8").splitlines()
        fields = (line.replace("-> ", "").split() for line in lines)
        pid = next(int(f[4]) for f in fields if f[1] == "FLOCK" and f[5] == where)
        process = Path(f"/proc/{pid}")
        more = f", {STOPPED}: kill -CONT {pid}" if is_stopped(pid) else ""
        return f"pid {pid} ({(process / 'comm').read_text('utf-8').strip()}, uid {process.stat().st_uid}{more})"
    except (OSError, ValueError, IndexError, StopIteration):
        return ""


def file_mode(folder: Path) -> int:
    """The mode of a new file: the group may write it if it may write to the folder.

    The group may read it if the folder is setgid and readable by it.
    """
    mode = folder.stat().st_mode
    if mode & stat.S_IWGRP:
        return 0o660
    return 0o640 if mode & stat.S_ISGID and mode & stat.S_IRGRP else 0o600
