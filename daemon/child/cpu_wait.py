"""CHILD side: how long our threads may have waited for a CPU in a race that counts.

A race beside a program that computes says nothing: of two threads on two CPUs one waits for the other, so a call of
0.3 ms takes 8 ms, a slice of the scheduler, whichever kernel runs.  Seen on two CPUs, seconds waited in a second of
racing two threads: 0.00 to 0.02 on a quiet machine; 0.2 beside programs that use a tenth of both CPUs, 0.5 to 1 beside
one that fills a CPU, 1 to 1.6 beside one that fills both.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Final

_MOST: Final = 0.4
_MOST_OF_ALL: Final = 0.01  # share on a large machine, for problems of many threads
_MOST_EACH: Final = 0.1  # per thread, then


def most_waited(threads: int) -> float:
    """Seconds per second that this many racing threads wait, above which a race does not count."""
    return max(_MOST, min(_MOST_OF_ALL * cpus(), _MOST_EACH * threads))


@cache
def cpus() -> int:
    """How many CPUs this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on every system
        return os.cpu_count() or 1
