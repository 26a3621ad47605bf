"""Names of files that are written whole before they are renamed into place."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from gemmtuned._testing import faults


def temporary_path(path: Path) -> Path:
    """A name next to `path` that no other writer has.

    The number of a process is not enough: containers and hosts that share a folder count theirs each for itself, and a
    process may have several threads that write.  Raises IsADirectoryError for `.` and `/`, which name no file.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")


def create(new: Path, path: Path) -> int:
    """A descriptor of the new file `new`, to be written and renamed to `path` by take_place. Raises OSError.

    What lies at `path` may be closed to others, and so is the new text while it lies beside it: for us alone.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(new, flags, 0o600 if path.exists() else 0o666)


def put(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, in place of what is there, whose mode and owner it keeps. Raises OSError."""
    new = temporary_path(path)
    try:
        with os.fdopen(create(new, path), "wb") as file:
            faults.point("put.write")
            file.write(data)
            file.flush()
            faults.point("put.fsync")
            os.fsync(file.fileno())
        faults.point("put.rename")
        take_place(new, path)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise


def take_place(new: Path, path: Path) -> None:
    """Rename `new` to `path`. It gets the mode of the file that is there, and its owner where we may. Raises OSError.

    Others may have the right to write into a table, or not to read a page.
    """
    with suppress(FileNotFoundError):
        be_like(new, path.stat())
    new.replace(path)


def be_like(new: Path, before: os.stat_result) -> None:
    """Give a new file the mode of another, and its owner and group as far as we may. Raises OSError.

    Where the group cannot be kept, ours gets no more than all others have.
    """
    mode = stat.S_IMODE(before.st_mode) & 0o777
    owner, group = before.st_uid, before.st_gid
    for each in ((owner, group), (-1, group)):  # only root gives a file away, and we any of ours to a group we are in
        if (new.stat().st_uid, new.stat().st_gid) != (owner, group):
            with suppress(OSError):
                os.chown(new, *each)
    if new.stat().st_gid != group:
        mode &= 0o707 | (mode & 0o007) << 3
    new.chmod(mode)
