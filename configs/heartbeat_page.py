"""Where a hooked process counts its products for others to see: one page in /dev/shm (hooks/native/beat.h)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

LINE_BYTES: Final = 64  # a cache line for each thread, whose counter is the first 8 bytes of it
SIZE_BYTES: Final = 4096
_MEMORY: Final = Path("/dev/shm")  # noqa: S108  a folder of our own in it, which nobody else may write


def folder_of(uid: int) -> Path:
    """Where all pages of a user's processes lie."""
    return _MEMORY / f"gemmtuned-{uid}"


def page_of(pid: int, uid: int, namespace: int) -> Path:
    """The page of a process. pid: its number in its own PID namespace, whose inode is `namespace`.

    Containers may share /dev/shm, and each of them numbers its processes from 1 on.
    """
    return folder_of(uid) / f"beats-{namespace}-{pid}"
