"""Devices to tune on, and what others do on them.

A `Monitor` watches one physical device.  The CPU's is here: others' use is what all processes used less what
the daemon and its children used.  A GPU's is in gpus.py.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import psutil

from gemmtuned.configs.solution import Device, cpu_device
from gemmtuned.daemon.device.attribution import OwnUse
from gemmtuned.daemon.device.idle import Limits, Reading
from gemmtuned.daemon.device.process_use import Busiest

SHORTEST_S: Final = 0.08  # the kernel counts CPU time in ticks of 10 ms; below 8 of them a share is mostly rounding


class Monitor(Protocol):
    """Watches one physical device."""

    @property
    def id(self) -> str:
        """One physical device: `cpu`, or a GPU's UUID. Where the worker is to run."""

    @property
    def name(self) -> str:
        """As people call it: `cpu`, `cuda:0` in the order of nvidia-smi."""

    @property
    def device(self) -> Device:
        """The kind of device: what problems are keyed by."""

    @property
    def conditions(self) -> str:
        """What may change without making solutions void, yet makes them worth another race: the driver's version."""

    @property
    def limits(self) -> Limits:
        """What counts as clear and as busy on it."""

    @property
    def pids(self) -> Sequence[int]:
        """The processes that the driver named there last; none where it names none, and for the CPU."""

    @property
    def cpus(self) -> Sequence[int]:
        """The CPUs that it is, by the kernel's numbers; none for a GPU."""

    def read(self, now_s: float, own: OwnUse | None = None) -> Reading:
        """What others did since the reading before, stamped with now_s; own: our worker, if one is there.

        Never raises: not known is others=None.
        """


@dataclass(frozen=True, slots=True)
class CpuSample:
    """Counters at one instant: seconds all processes, and our own process tree, have used in total."""

    clock_s: float
    busy_s: float
    own_s: float
    free_bytes: int


class CpuMonitor:
    """The cores this process may run on, as one device.

    sample: reads the counters; replaced in tests.  cores: how many there are to share.
    """

    id = name = "cpu"
    conditions = ""
    pids: Sequence[int] = ()

    def __init__(self, sample: Callable[[], CpuSample] | None = None, *, cores: int | None = None) -> None:
        self._sample = sample or _Counters()
        self._cores = cores or _usable_cores()
        self._last: CpuSample | None = None
        self._reading: Reading | None = None
        self._device = cpu_device()
        self._busiest = Busiest()
        self.cpus: Sequence[int] = _affinity()

    @property
    def device(self) -> Device:
        return self._device

    @property
    def limits(self) -> Limits:
        # 0.2 of a core: what a desktop or an idle server uses by itself; half a core: somebody works.  The second
        # terms let large machines have a little more noise, yet one busy thread of a server is always seen.
        cores = self._cores
        return Limits(
            clear=max(0.2, 0.01 * cores) / cores,
            busy=max(0.5, 0.02 * cores) / cores,
            free_bytes=512 << 20,  # torch takes 300 MiB, operands and their cold copies the rest
        )

    def read(self, now_s: float, own: OwnUse | None = None) -> Reading:
        if own is not None and isinstance(self._sample, _Counters):
            self._sample.adopt(own.pid)
        try:
            sample = self._sample()
        except (psutil.Error, OSError, ValueError, RuntimeError) as err:
            self._last = None
            return Reading(now_s, now_s, None, None, f"CPU counters cannot be read ({err})")
        last, self._last = self._last, sample
        if last is None:
            return Reading(now_s, now_s, None, sample.free_bytes, "first look at the CPU")
        span_s = sample.clock_s - last.clock_s
        if span_s < SHORTEST_S and self._reading is not None:
            self._last = last
            return self._reading
        if span_s <= 0:
            return Reading(now_s, now_s, None, sample.free_bytes, "the clock stands still")
        own_s = max(
            sample.own_s - last.own_s, 0.0
        )  # falls when a child's child died unseen: its time then looks foreign
        others_s = max(sample.busy_s - last.busy_s - own_s, 0.0)
        since_s = self._reading.at_s if self._reading else now_s - span_s
        if not now_s - span_s - 0.5 <= since_s <= now_s:  # now_s jumped against the monotonic clock
            since_s = now_s - span_s
        share = min(others_s / span_s / self._cores, 1.0)
        note = self._busiest.look() if share > self.limits.clear else ""
        self._reading = Reading(since_s, now_s, share, sample.free_bytes, note)
        return self._reading


def find_monitors(*, share_resident: bool = False) -> list[Monitor]:
    """One monitor for each device of this machine we can tune on; share_resident: see gpus.GpuMonitor."""
    from gemmtuned.daemon.device.gpus import find_gpus

    return [CpuMonitor(), *find_gpus(share_resident=share_resident)]


class _Counters:
    """Reads the kernel's counters: 40 us a time, so ten times a second costs nothing."""

    def __init__(self) -> None:
        self._tree = _Tree(os.getpid())
        self._cpus = _affinity()

    def adopt(self, pid: int) -> None:
        self._tree.adopt(pid)

    def __call__(self) -> CpuSample:
        # Our own first: what we use between the two looks then counts as foreign, never the other way round.
        own_s = self._tree.used_s()
        clock_s = time.monotonic()
        each = psutil.cpu_times(percpu=True)
        if self._cpus and max(self._cpus) < len(each):
            each = [each[cpu] for cpu in self._cpus]
        busy_s = sum(t.user + t.nice + t.system + getattr(t, "irq", 0.0) + getattr(t, "softirq", 0.0) for t in each)
        return CpuSample(clock_s, busy_s, own_s, psutil.virtual_memory().available)


class _Tree:
    """CPU time of a process and all that descend from it, those included that have died and were waited for."""

    def __init__(self, root: int) -> None:
        self._root = psutil.Process(root)
        self._children: dict[int, psutil.Process] = {}
        self._scan_again = 0.0

    def adopt(self, pid: int) -> None:
        if pid not in self._children:
            with contextlib.suppress(psutil.Error):
                self._children[pid] = psutil.Process(pid)

    def used_s(self) -> float:
        self._find_children()
        return self._time(self._root) + sum(self._time_of_child(child) for child in list(self._children.values()))

    def _find_children(self) -> None:
        # Looking for children reads every process of the machine: 12 us each.  It may take 2 % of one core; until it
        # is found, a child's child counts as foreign.
        start = time.monotonic()
        if start >= self._scan_again:
            with contextlib.suppress(psutil.Error):
                self._children = {child.pid: child for child in self._root.children(recursive=True)}
            self._scan_again = time.monotonic() + max(0.5, 50 * (time.monotonic() - start))

    def _time_of_child(self, child: psutil.Process) -> float:
        try:
            return self._time(child)
        except psutil.Error:  # it is gone: its time is in its parent's, if that one waited for it
            self._children.pop(child.pid, None)
            return 0.0

    @staticmethod
    def _time(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)


def _affinity() -> list[int]:
    try:
        return sorted(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on every system
        return []


def _usable_cores() -> int:
    return len(_affinity()) or psutil.cpu_count() or 1
