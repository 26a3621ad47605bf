"""Whether a hooked program runs products now: it counts them in a page for us to see (hooks/native/beat.h).

An engine may poll the CPU while it has no request: its CPU time then does not tell whether it works.  The page lies in
the program's own /dev/shm, which we reach through /proc, in another container too, where processes are shared.
"""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path
from typing import Final

from gemmtuned.configs.heartbeat_page import LINE_BYTES, SIZE_BYTES, page_of
from gemmtuned.configs.processes import namespace_of


def beats_of(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Products that this process has run, as far as it says; None where it says nothing."""
    try:
        owner = (proc / str(pid)).stat().st_uid
        inside = _number_inside(pid, proc)
        path = Path(f"{proc}/{pid}/root{page_of(inside, owner, namespace_of(pid, proc))}")
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != owner or facts.st_size != SIZE_BYTES:
            return None
        page = os.read(descriptor, SIZE_BYTES)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return _sum(page) if len(page) == SIZE_BYTES else None


_WORDS: Final = struct.Struct(f"={SIZE_BYTES // 8}Q")


def _sum(page: bytes) -> int:
    return sum(_WORDS.unpack(page)[:: LINE_BYTES // 8])


def _number_inside(pid: int, proc: Path) -> int:
    """The number that it has in its own PID namespace."""
    for line in (proc / str(pid) / "status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return pid
