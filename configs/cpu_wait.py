"""How long the threads of this process ran, and how long they waited for a CPU that they were not given.

Linux counts for each thread how long it was ready to run and did not.  What the quota of a container takes is no such
waiting: it is taken from the programs there at all times, so it belongs to what a call takes.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from gemmtuned.configs.unpatched import builtins, os

__builtins__ = builtins


class CpuWait:
    """The kernel's counters for this process; elsewhere in tests.

    most: how many threads are looked at, the oldest first, at 10 us each; None: all.
    """

    def __init__(
        self, proc: Path = Path("/proc/self"), cgroups: Path = Path("/sys/fs/cgroup"), *, most: int | None = None
    ) -> None:
        self._threads, self._most = proc / "task", most
        self._quotas = _quotas(proc, cgroups)

    def waited_s(self) -> float | None:
        """Seconds that the threads of now have waited; only a difference means anything. None: nobody counts here."""
        spent = self.spent_s()
        return None if spent is None else spent[1]

    def spent_s(self) -> tuple[float, float] | None:
        """Seconds that the threads of now (ran, waited); only differences mean anything. None: nobody counts here."""
        try:
            threads = sorted(os.listdir(self._threads), key=int)[: self._most]
            counts = [_spent_ns(self._threads / thread / "schedstat") for thread in threads]
        except (OSError, ValueError, IndexError):
            return None
        known = [count for count in counts if count is not None]
        if not known:
            return None
        ran, waited = (sum(count) / 1e9 for count in zip(*known, strict=True))
        return ran, waited - sum(map(_throttled_s, self._quotas))


def _spent_ns(schedstat: Path) -> tuple[int, int] | None:
    try:
        ran, waited = schedstat.read_text("utf-8").split()[:2]
        return int(ran), int(waited)
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended, or this kernel does not count
        return None


def _quotas(proc: Path, cgroups: Path) -> list[Path]:
    """The `cpu.stat` of each control group that this process is in, of either version."""
    found: list[Path] = []
    with suppress(OSError, ValueError):
        for line in (proc / "cgroup").read_text("utf-8").splitlines():
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
        for line in stat.read_text("utf-8").splitlines():
            name, _, value = line.partition(" ")
            if name == "throttled_usec":
                return int(value) / 1e6
            if name == "throttled_time":  # of version 1, in ns
                return int(value) / 1e9
    return 0.0
