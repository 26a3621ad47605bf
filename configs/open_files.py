"""A process that may open no more files: said as what it is, with what helps; the file is sound."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from typing import Final

_NEEDED: Final = 8  # descriptors that SQLite and we have open at once, at most
_RLIMIT_NOFILE: Final = 7  # Linux's number, on every architecture that torch is built for


def limit_reached(err: BaseException | None = None) -> str:
    """In words that a message can go on with, what helps where no more files can be opened; "" where that is not it.

    err: what was raised. None, or an error that has no number: whether as many as a database takes can be opened now.
    """
    number = err.errno if isinstance(err, OSError) else _probed()
    if number == errno.ENFILE:
        return "the machine has no room for more open files. Close programs, or raise it: sysctl -w fs.file-max=..."
    if number != errno.EMFILE:
        return ""
    soft, hard = _limits()
    raised, by = (hard, "") if hard > soft else (max(4 * soft, 1024), " (as root)")
    now = f"prlimit --pid {os.getpid()} --nofile={raised}:{max(raised, hard)}"
    return (
        f"this process has as many files open as it may ({soft}). Raise that{by}: ulimit -n {raised} before it starts "
        f"(LimitNOFILE= of a service), or if it runs on: {now}"
    )


def _limits() -> tuple[int, int]:
    """How many files this process may have open, and how far it may raise that.

    The C library is asked: torch does not import `resource`, and a program may have a resource.py of its own.
    """
    both = (ctypes.c_ulong * 2)()
    ctypes.CDLL(None).getrlimit(_RLIMIT_NOFILE, both)
    return both[0], both[1]


def _probed() -> int | None:
    held: list[int] = []
    try:
        for _ in range(_NEEDED):
            held.append(os.open("/", os.O_PATH | os.O_CLOEXEC))  # noqa: PERF401  what was opened is to be closed
    except OSError as err:
        return err.errno
    finally:
        for fd in held:
            with contextlib.suppress(OSError):
                os.close(fd)
    return None
