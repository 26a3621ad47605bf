"""Names of processes for people: who uses a device, so that one can go and ask."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil

from gemmtuned.daemon.device.idle import LONGEST_S

LONGEST: Final = 40  # characters of a name
LOOK_S: Final = 2.0  # between two looks at all processes, which cost some 15 us each
SHARE: Final = 1 / 50  # and of one core at most
LEAST: Final = 0.1  # cores: who uses less is not worth naming
MOST: Final = 3
_PYTHON: Final = re.compile(r"python[0-9.]*|pypy[0-9.]*")


def name_of(command: Sequence[str]) -> str:
    """What people call a program that was started so: its script or module where Python runs it."""
    if not command:
        return ""
    program = Path(command[0].partition(" ")[0] if "/" not in command[0] else command[0]).name
    rest = list(command[1:])
    while _PYTHON.fullmatch(program) and rest:
        word = rest.pop(0)
        if word == "-m" and rest:
            return rest[0][:LONGEST]
        if word == "-c":
            return f"{program} -c"
        if word in ("-W", "-X") and rest:
            rest.pop(0)
        elif not word.startswith("-"):
            return Path(word).name[:LONGEST]
    return program[:LONGEST]


def name_of_process(pid: int | str) -> str:
    """`pytest`; "" where the machine does not tell: it has ended, or the number is of another process namespace."""
    try:
        return name_of(psutil.Process(int(pid)).cmdline()) or str(psutil.Process(int(pid)).name())
    except (psutil.Error, ValueError):
        return ""


def named(pid: int | str) -> str:
    """`pytest 8245`; `process 8245` where the machine does not tell us more."""
    return f"{name_of_process(pid) or 'process'} {pid}"


class Busiest:
    """Who uses the CPU most. ours: the root of the processes that do not count.

    times: (number, seconds of CPU) of all processes; replaced in tests.
    """

    def __init__(
        self,
        ours: int | None = None,
        *,
        times: Callable[[], Iterable[tuple[int, float]]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        name: Callable[[int], str] = named,
    ) -> None:
        self._ours = os.getpid() if ours is None else ours
        self._times, self._clock, self._name = times or cpu_seconds, clock, name
        self._last: tuple[float, dict[int, float]] | None = None
        self._again_s = float("-inf")
        self._said = ""

    def look(self) -> str:
        """`pytest 8245, cc1plus 8250`, of the time since the last look; "" while that is not known."""
        now_s = self._clock()
        if now_s < self._again_s:
            return self._said
        used = dict(self._times())
        took_s = self._clock() - now_s
        self._again_s = now_s + max(LOOK_S, took_s / SHARE)
        last, self._last = self._last, (now_s, used)
        self._said = ""
        if last is not None and 0 < now_s - last[0] <= 2 * LONGEST_S:
            least_s = LEAST * (now_s - last[0])
            grown = {pid: s - last[1].get(pid, s) for pid, s in used.items()}
            heaviest = sorted((pid for pid, s in grown.items() if s >= least_s), key=lambda pid: -grown[pid])
            self._said = ", ".join(self._name(pid) for pid in self._foreign(heaviest)[:MOST])
        return self._said

    def _foreign(self, pids: Sequence[int]) -> list[int]:
        return [pid for pid in pids if not _descends(pid, self._ours)]


def _descends(pid: int, root: int) -> bool:
    try:
        return pid == root or any(parent.pid == root for parent in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def cpu_seconds() -> Iterator[tuple[int, float]]:
    """(number, seconds of CPU) of each process that we may see."""
    for process in psutil.process_iter(["pid", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None:
            yield int(process.info["pid"]), float(times.user + times.system)
