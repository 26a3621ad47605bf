"""Names of files that are written whole before they are renamed into place."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from gemmtuned._testing import faults


def temporary_path(path: Path) -> Path:
    """A name next to `path` that no other writer has.

    The number of a process is not enough: containers and hosts that share a folder count theirs each for itself, and a
    process may have several threads that write.
    """
    return path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")


def put(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, in place of what is there, whose mode and owner it keeps. Raises OSError."""
    new = temporary_path(path)
    try:
        with new.open("wb") as file:
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
        before, ours = path.stat(), new.stat()
        with suppress(OSError):  # another's file, and we are not root
            if (before.st_uid, before.st_gid) != (ours.st_uid, ours.st_gid):
                os.chown(new, before.st_uid, before.st_gid)
        new.chmod(stat.S_IMODE(before.st_mode) & 0o777)
    new.replace(path)
