"""One daemon on a CPU at a time: a lock for each CPU that a worker may run on, and one of the home.

Two threads of one core share it, so a CPU's siblings are locked with it.  Daemons on CPUs of their own (cpusets,
taskset) tune side by side.  Unlike a GPU's, a lock of the machine that cannot be had at all (its folder closed to us)
keeps nobody from tuning: others are still seen by their load, as they were before there were locks.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Final

from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.device.device_lock import DeviceLock, Lock, LockingError
from gemmtuned.daemon.device.devices import Monitor

logger = logging.getLogger("gemmtuned.daemon")

_TOPOLOGY: Final = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


class CpuLocks:
    """The locks of these CPUs in the folder of all users, taken after the home's own, in the order of their numbers.

    at_once: what can be had of them is kept where others hold the rest: a person wants it now, and others shall wait.
    """

    def __init__(self, own: DeviceLock, folder: Path, cpus: Collection[int], who: str, *, at_once: bool) -> None:
        self._own = own
        self._each = [DeviceLock(folder, f"cpu-{cpu}", who) for cpu in with_siblings(cpus)]
        self._at_once = at_once
        self._said: set[str] = set()

    def take(self) -> str:
        """Hold them all; "" when they are ours, else why they are not. Never waits."""
        found, trouble = [self._own.take()], ""
        for lock in self._each if self._at_once or not found[0] else ():
            try:
                found.append(lock.hold())
            except LockingError as err:
                trouble = trouble or str(err)
            if found[-1] and not self._at_once:
                break
        why = next(filter(None, found), "")
        if why and not self._at_once:
            self.drop()
        if trouble and not why and trouble not in self._said:
            self._said.add(trouble)
            logger.warning("CPUs not locked: daemons of other homes are seen by their load alone reason=%r", trouble)
        return why

    def lost(self) -> str:
        """As Lock.lost; where another has one of them, none is kept."""
        why = self._own.lost()
        for lock in self._each:
            with contextlib.suppress(LockingError):
                why = why or lock.hold()
        if why:
            self.drop()
        return why

    def drop(self) -> None:
        """Let them go."""
        for lock in (*self._each, self._own):
            lock.drop()


def with_siblings(cpus: Collection[int]) -> list[int]:
    """These CPUs and the other threads of their cores, in order; these alone where the kernel does not say."""
    found = set(cpus)
    for cpu in cpus:
        with contextlib.suppress(OSError, ValueError):
            for part in Path(_TOPOLOGY.format(cpu)).read_text("ascii").strip().split(","):
                first, _, last = part.partition("-")
                found |= set(range(int(first), int(last or first) + 1))
    return sorted(found)


def lock_of(monitor: Monitor, settings: Settings, who: str, *, at_once: bool) -> Lock:
    """The lock of all of the machine; for the CPUs also that of the home, which nobody else can hold."""
    if monitor.id != "cpu":
        return DeviceLock(settings.device_locks, monitor.id, who)
    own = DeviceLock(settings.locks, monitor.id, who, own=True)
    return CpuLocks(own, settings.device_locks, monitor.cpus, who, at_once=at_once)
