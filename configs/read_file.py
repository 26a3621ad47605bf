"""Files that anybody may have put where ours belong: only regular ones are read, and no more of them than is meant."""

from __future__ import annotations

import errno
import stat
from pathlib import Path
from typing import Final

from gemmtuned.configs.unpatched import builtins, os

__builtins__ = builtins

SMALL_BYTES: Final = 4096
_PIECE_BYTES: Final = 1 << 16  # room that is not needed is given back to Linux, which takes longer than to read


def open_regular(path: Path, flags: int = 0) -> tuple[int, os.stat_result]:
    """A regular file, open to be read, with its facts; any other is OSError: to open a pipe would wait for its writer.

    flags: further ones of os.open.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return fd, facts


def read_regular(path: Path, limit: int) -> bytes:
    """At most `limit` bytes of a regular file. Raises OSError, as open_regular does."""
    fd, _ = open_regular(path)
    try:
        parts = []
        while limit > 0 and (part := os.read(fd, min(limit, _PIECE_BYTES))):
            parts.append(part)
            limit -= len(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def read_small(path: Path, limit: int = SMALL_BYTES) -> str:
    """The text of a small file, cut off at that many bytes. Raises OSError, as open_regular does."""
    return read_regular(path, limit).decode(errors="replace")
