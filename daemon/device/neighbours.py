"""Programs that hold a GPU open, and whether they work: judged by their CPU time where the driver names no processes.

A server cannot launch GPU work without CPU time, and a quiet one takes next to none.  Some servers poll the CPU all the
time.  If such a program is hooked, its own counter of products decides, once it has counted any (heartbeat_reader.py).
We see the processes whose open files we may list: those of our own user, for root all of them, and never those of
another container.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final

import psutil

from gemmtuned.daemon.device.heartbeat_reader import beats_of
from gemmtuned.daemon.device.process_use import named

SPAN_S: Final = 0.2  # CPU time is counted in ticks of 10 ms
LOOK_S: Final = 1.0  # longest time between two looks for which a short burst still counts in full
_SAME_S: Final = 0.02  # looks this close together are one: all GPUs ask in one turn
_SCAN_S: Final = 1.0  # between two walks through all processes
_SLICE_S: Final = 0.004  # a turn's slice of a walk, ten turns a second: 4 % of a core while the walk lasts
_DEVICES: Final = "/dev/nvidia"
_MONITORS: Final = ("nvidia-smi", "nvidia-persistenced", "nvidia-persiste", "nv-hostengine", "dcgm-exporter", "nvitop")


class Neighbours:
    """The programs that hold a GPU of this machine open; all GPUs share one object.

    holders: walks through all processes and yields the pid of each that holds a GPU open, None for each other.  The
    walk goes on from turn to turn, a slice at a time: with thousands of processes a whole walk would delay a turn.
    """

    def __init__(
        self,
        holders: Callable[[], Iterator[int | None]] | None = None,
        *,
        cpu_s: Callable[[int], float | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._holders = holders or gpu_holders
        self._cpu_s = cpu_s or _cpu_s
        self._beaten: dict[int, int] = {}  # products that each hooked program had counted at the last look
        self._clock = clock
        self._known: dict[int, deque[tuple[float, float]]] = {}
        self._walk: Iterator[int | None] | None = None
        self._found: set[int] = set()
        self._scan_at_s = float("-inf")

    def busy(self, least: float, elsewhere: Collection[str] = ()) -> str | None:
        """A program that works, with why; "" when none does; None when no program is known to hold a GPU.

        least: cores that a program must use over SPAN_S since the last look.  If the last look is up to LOOK_S ago the
        same CPU time is enough, so that a burst is not averaged away.  elsewhere: pids that the driver names on other
        GPUs and not on this one; they do not count.
        """
        now_s = self._clock()
        self._scan(now_s)
        said, here = "", False
        for pid, seen in list(self._known.items()):
            if not seen or now_s - seen[-1][0] >= _SAME_S:
                used_s = self._cpu_s(pid)
                if used_s is None:
                    del self._known[pid]
                    continue
                seen.append((now_s, used_s))
            while len(seen) > 2 and now_s - seen[1][0] >= SPAN_S:
                seen.popleft()
            span_s, used_s = now_s - seen[0][0], seen[-1][1]
            if str(pid) in elsewhere:
                continue
            here = True
            ran = self._ran(pid)
            if ran is not None:
                said = f"{named(pid)}, which holds the GPU, runs products" if ran else said
            elif used_s - seen[0][1] > least * (SPAN_S if span_s <= LOOK_S else span_s) + 1e-6:
                said = f"{named(pid)}, which holds the GPU, works"
        return said if here else None

    def _ran(self, pid: int) -> bool | None:
        """Whether it ran products since the last look, by its own counter; None where the counter says nothing.

        That is so of a program whose products we do not see, and at the first look.
        """
        beats = beats_of(pid)
        last = self._beaten.get(pid)
        if not beats:
            return None
        self._beaten[pid] = beats
        return None if last is None else beats != last

    def _scan(self, now_s: float) -> None:
        if self._walk is None:
            if now_s < self._scan_at_s:
                return
            self._walk, self._found = self._holders(), set()
        for pid in self._walk:
            if pid is not None:
                self._found.add(pid)
            if self._clock() > now_s + _SLICE_S:
                return
        self._walk = None
        self._known = {pid: self._known.get(pid, deque()) for pid in self._found}
        self._beaten = {pid: beats for pid, beats in self._beaten.items() if pid in self._found}
        self._scan_at_s = now_s + _SCAN_S


def gpu_holders() -> Iterator[int | None]:
    """Processes, without our own and without monitors, that have a GPU's device file open, as far as we may look."""
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    for pid in psutil.pids():
        yield pid if pid not in ours and _holds_gpu(pid) and not _is_monitor(pid) else None


def _is_monitor(pid: int) -> bool:
    try:
        return psutil.Process(pid).name() in _MONITORS
    except psutil.Error:  # it has ended
        return True


def _holds_gpu(pid: int) -> bool:
    try:
        return any(_target(link).startswith(_DEVICES) for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # not ours to look at, or gone
        return False


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # closed meanwhile
        return ""


def _cpu_s(pid: int) -> float | None:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)
