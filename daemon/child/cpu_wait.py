"""CHILD side: how long our threads have waited for a CPU that they were not given.

A race beside a program that computes says nothing: of two threads on two CPUs one waits for the other, so a call of
0.3 ms takes 8 ms, a slice of the scheduler, whichever kernel runs.  Linux counts for each thread how long it was ready
to run and did not.  Seen on two CPUs, seconds waited in a second of racing two threads: 0.00 to 0.02 on a quiet
machine; 0.2 beside programs that use a tenth of both CPUs, 0.5 to 1 beside one that fills a CPU, 1 to 1.6 beside one
that fills both.

What the quota of a container takes is taken from the programs there, too: it is measured and not waited for.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

_MOST: Final = 0.4
_MOST_OF_ALL: Final = 0.01  # of a large machine, for problems of many threads
_MOST_EACH: Final = 0.1  # of a thread, then


def most_waited(threads: int) -> float:
    """Seconds that so many racing threads wait in a second, above which a race does not count."""
    return max(_MOST, min(_MOST_OF_ALL * cpus(), _MOST_EACH * threads))


@cache
def cpus() -> int:
    """How many CPUs this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on every system
        return os.cpu_count() or 1


class CpuWait:
    """The kernel's counters for this process; elsewhere in tests."""

    def __init__(self, proc: Path = Path("/proc/self"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._threads = proc / "task"
        self._quotas = _quotas(proc, cgroups)

    def waited_s(self) -> float | None:
        """Seconds that the threads of now have waited; only a difference means anything. None: nobody counts here."""
        try:
            counts = [_waited_ns(self._threads / thread / "schedstat") for thread in os.listdir(self._threads)]  # noqa: PTH208
        except (OSError, ValueError, IndexError):
            return None
        known = [count for count in counts if count is not None]
        return sum(known) / 1e9 - sum(map(_throttled_s, self._quotas)) if known else None


def _waited_ns(schedstat: Path) -> int | None:
    try:
        return int(schedstat.read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended, or this kernel does not count
        return None


def _quotas(proc: Path, cgroups: Path) -> list[Path]:
    """The `cpu.stat` of each control group that this process is in, of either version."""
    found: list[Path] = []
    with suppress(OSError, ValueError):
        for line in (proc / "cgroup").read_text().splitlines():
            number, names, path = line.split(":", 2)
            if number != "0" and "cpu" not in names.split(","):
                continue
            root = cgroups / names if names else cgroups
            group = root / path.strip("/")
            groups = [group, *group.parents[: len(group.parts) - len(root.parts)]]
            found += [one / "cpu.stat" for one in groups if (one / "cpu.stat").is_file()]
    return found


def _throttled_s(stat: Path) -> float:
    """Seconds that a quota has held CPUs back, summed over them, as waiting is over threads."""
    with suppress(OSError, ValueError):
        for line in stat.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "throttled_usec":
                return int(value) / 1e6
            if name == "throttled_time":  # of version 1, in ns
                return int(value) / 1e9
    return 0.0
