"""What the error of a system call means for a database: by its number, and by whether the file's mode allows the call.

SQLite does not say which error the system gave it, so the same is tried with a file without a name in its folder.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
from collections.abc import Iterator
from pathlib import Path

from gemmtuned.configs.open_files import memory_limit
from gemmtuned.configs.unpatched import fcntl, os

READ_ONLY = (
    "its file system is read-only; Linux makes one so after an error of the disk, see the system log. "
    "Have it mounted for writing, or set GEMMTUNED_HOME to a folder on another disk"
)
_NO_SUCH_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)  # a file system without O_TMPFILE
_PSEUDO = "/proc/"


def meaning(err: OSError | None, path: Path) -> str:
    """What it is that refuses, and the way out; "" where the number says too little. path: of the database."""
    number = None if err is None else err.errno
    if number == errno.EPERM or (number == errno.EACCES and _mode_allows(err, path)):
        return (
            f"the system forbids this process a call that the mode of the file allows ({err}): a filter of system "
            "calls (seccomp), SELinux, AppArmor or an immutable file. Have it allowed to open, lock, write and sync "
            "files there, or call gemmtuned.disable() before it is forbidden"
        )
    if number == errno.ENOSYS:
        return (
            f"the system does not know a call that a database takes ({err}): it imitates Linux, or a filter of system "
            "calls (seccomp) says so. Have the call allowed, or run the program elsewhere"
        )
    if number in (errno.ENOMEM, errno.ENOBUFS):
        return no_memory(f" ({err})")
    return READ_ONLY if number == errno.EROFS else ""


def no_memory(why: str = "") -> str:
    """Why there is none, as far as is known, and what helps."""
    limit = memory_limit()
    return f"out of memory{why}{': ' + limit if limit else '. Try again when some is free'}"


def tried(folder: Path) -> OSError | None:
    """The error of the first call that is refused, of those that SQLite writes a file of this folder with."""
    try:
        with nameless(folder) as fd:
            os.ftruncate(fd, 1)
            os.pwrite(fd, b"\0", 0)
            os.pread(fd, 1, 0)
            os.fdatasync(fd)
            mmap.mmap(fd, 1).close()
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        return None if err.errno in _NO_SUCH_FILES else err
    return None


def no_locks(folder: Path) -> OSError | None:
    """The error with which a file in this folder can be locked by nobody; None where it can, as far as is known."""
    try:
        with _opened(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with nameless(folder) as fd:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        of_locks = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES)
        return err if err.errno in of_locks and err.filename is None else None
    return None


@contextlib.contextmanager
def nameless(folder: Path) -> Iterator[int]:
    """A file that is gone with its descriptor. Raises OSError."""
    with _opened(folder, os.O_RDWR | os.O_TMPFILE, 0o600) as fd:
        yield fd


@contextlib.contextmanager
def _opened(path: Path, flags: int, mode: int = 0) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield fd
    finally:
        os.close(fd)


def _mode_allows(err: OSError | None, path: Path) -> bool:
    """Whether the mode of the file that the error names, or else of the database, allows us to write it."""
    named = getattr(err, "filename", None)
    there = Path(os.fsdecode(named)) if isinstance(named, str | bytes | Path) else path
    if str(there).startswith(_PSEUDO):
        return os.access(there, os.R_OK)
    if os.path.lexists(there):
        return os.access(there, os.R_OK | os.W_OK)
    return os.access(there.parent, os.W_OK | os.X_OK)
