"""Files that anybody may have put where ours belong: only regular ones are read, and no more of them than is meant."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

SMALL_BYTES: Final = 4096


def read_regular(path: Path, limit: int, flags: int = 0) -> bytes:
    """At most `limit` bytes of a regular file. Raises OSError for any other: to open a pipe would wait for its writer.

    flags: further ones of os.open.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        parts = []
        while limit > 0 and (part := os.read(fd, min(limit, 1 << 20))):
            parts.append(part)
            limit -= len(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def read_small(path: Path, limit: int = SMALL_BYTES) -> str:
    """The text of a small file, cut off at so many bytes. Raises OSError, as read_regular does."""
    return read_regular(path, limit).decode(errors="replace")
