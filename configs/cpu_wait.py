"""How long the threads of this process ran, and how long they waited for a CPU that they were not given.

Linux counts for each thread how long it was ready to run and did not.  What the quota of a container takes is no such
waiting: it is taken from the programs there at all times, so it belongs to what a call takes.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from gemmtuned.configs.read_file import SMALL_BYTES
from gemmtuned.configs.unpatched import builtins, os

__builtins__ = builtins


class CpuWait:
    """The kernel's counters for this process; elsewhere in tests.

    most: how many threads are looked at, the oldest first, at 10 us each; None: all.
    """

    def __init__(
        self, proc: Path = Path("/proc/self"), cgroups: Path = Path("/sys/fs/cgroup"), *, most: int | None = None
    ) -> None:
        self._threads, self._most = str(proc / "task"), most
        self._quotas = _quotas(proc, cgroups)

    def waited_s(self) -> float | None:
        """Seconds that the threads of now have waited; only a difference means anything. None: nobody counts here."""
        spent = self.spent_s()
        return None if spent is None else spent[1]

    def spent_s(self) -> tuple[float, float] | None:
        """Seconds that the threads of now (ran, waited); only differences mean anything. None: nobody counts here."""
        try:
            threads = sorted(os.listdir(self._threads), key=int)[: self._most]
            counts = [_spent_ns(f"{self._threads}/{thread}/schedstat") for thread in threads]
        except (OSError, ValueError, IndexError):
            return None
        known = [count for count in counts if count is not None]
        if not known:
            return None
        ran, waited = (sum(count) / 1e9 for count in zip(*known, strict=True))
        return ran, waited - sum(map(_throttled_s, self._quotas))


def _spent_ns(schedstat: str) -> tuple[int, int] | None:
    try:
        ran, waited = _read(schedstat).split()[:2]
        return int(ran), int(waited)
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended, or this kernel does not count
        return None


def _read(path: str) -> bytes:
    """What the kernel says in one of its files, all of them short. Path.read_text takes three times as long."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, SMALL_BYTES)
    finally:
        os.close(fd)


def _quotas(proc: Path, cgroups: Path) -> list[str]:
    """The `cpu.stat` of each control group that this process is in, of either version."""
    found: list[str] = []
    with suppress(OSError, ValueError):
        for line in (proc / "cgroup").read_text("utf-8").splitlines():
            number, names, path = line.split(":", 2)
            if number != "0" and "cpu" not in names.split(","):
                continue
            root = cgroups / names if names else cgroups
            group = root / path.strip("/")
            groups = [group, *group.parents[: len(group.parts) - len(root.parts)]]
            found += [str(one / "cpu.stat") for one in groups if (one / "cpu.stat").is_file()]
    return found


def _throttled_s(stat: str) -> float:
    """Seconds that a quota has held CPUs back, summed over them, as waiting is over threads."""
    with suppress(OSError, ValueError):
        for line in _read(stat).splitlines():
            name, _, value = line.partition(b" ")
            if name == b"throttled_usec":
                return int(value) / 1e6
            if name == b"throttled_time":  # cgroup version 1 says it in ns
                return int(value) / 1e9
    return 0.0
