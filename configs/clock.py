"""The time as the system has it, whatever the program we are in has made of it.

Tests and simulations put clocks of their own in the place of time.time, time.monotonic and datetime: freezegun and its
like the functions of the module `time` and every name that leads to one, time-machine what C runs for them.  A clock
that stands still or goes backwards would keep our thread from its next flush, have a program wait at its end, and write
counts of years that never were.  So what runs in a host (hooks/, and what they use of db/ and configs/) asks here:
functions that no name elsewhere leads to, and in a host the C library's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gemmtuned.configs.unpatched import builtins, clock_gettime_ns

__builtins__ = builtins

MONOTONIC = time.CLOCK_MONOTONIC
REALTIME = time.CLOCK_REALTIME
_read_ns: Callable[[int], int] = clock_gettime_ns


def monotonic() -> float:
    """Seconds since some moment; never less than before."""
    return _read_ns(MONOTONIC) / 1e9


def now_s() -> float:
    """Seconds since 1970, UTC."""
    return _read_ns(REALTIME) / 1e9


def now_ns() -> int:
    """Nanoseconds since 1970, UTC."""
    return _read_ns(REALTIME)


def take_from(libc: Any) -> None:
    """Read the clocks by this C library, a ctypes.CDLL: in a host, which has ctypes loaded anyway."""
    import ctypes

    class Timespec(ctypes.Structure):
        _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    byref, clock_gettime = ctypes.byref, libc.clock_gettime

    def read_ns(which: int) -> int:
        found = Timespec()
        clock_gettime(which, byref(found))
        return int(found.seconds * 1_000_000_000 + found.nanoseconds)

    global _read_ns
    _read_ns = read_ns
