"""Whether the times of calls can be used: while others use the CPUs, a call's time holds their turns as well.

With eight programs of one thread on two CPUs, a call of 0.1 ms now and then takes 3 to 8 ms: a time slice of the
scheduler.  So where the threads of this process waited much since the last flush, its counts are kept and its times
are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from gemmtuned.configs import clock
from gemmtuned.configs.cpu_wait import CpuWait
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import CROWDED
from gemmtuned.configs.unpatched import builtins

__builtins__ = builtins

MOST_THREADS: Final = 64  # whose waits are read, once a flush
SHORTEST_S: Final = 0.02  # one or two time slices of the scheduler: what threads spent in less says nothing


class Crowd:
    """How much the threads of this process wait for CPUs that others use. wait: the kernel's counters, or a test's.

    longer_s: how much longer this process has run for that reason, in seconds: the sum over the spans between looks of
    the span's time, multiplied by the share of it in which threads that could run waited.
    """

    def __init__(self, wait: CpuWait | None = None) -> None:
        self._wait = wait
        self._last = (0.0, 0.0)  # seconds that the threads ran and waited until the last look
        self._was_crowded = False
        self.longer_s, self._at_s = 0.0, clock.monotonic()

    def usable(self, sightings: Iterable[Sighting]) -> Iterator[Sighting]:
        """The sightings of the time since the last look, without their times where it was crowded."""
        crowded: bool | None = None  # asked only where one is timed: a look takes 10 to 50 us a thread
        for s in sightings:
            if s.sampled_calls and crowded is None:
                crowded = self.is_crowded()
            yield replace(s, sampled_calls=0, sampled_us=0.0) if s.sampled_calls and crowded else s

    def is_crowded(self) -> bool:
        """Whether our threads, since the last look, waited for more than a share of CROWDED of the time they could run.

        The last answer holds where the span is too short to tell, and where threads have ended, whose time is lost.
        """
        spent = self._spent_s()
        if spent is None:  # nobody counts: times are taken as they come
            return False
        ran_s, waited_s = (now - before for now, before in zip(spent, self._last, strict=True))
        if 0.0 <= ran_s < SHORTEST_S and waited_s < SHORTEST_S:
            return self._was_crowded
        self._last = spent
        now_s = clock.monotonic()
        span_s, self._at_s = now_s - self._at_s, now_s
        if ran_s >= 0.0:
            # of one thread: what it waited; of several: of the span, the share that they waited
            if waited_s > 0.0:
                self.longer_s += waited_s / (ran_s + waited_s) * min(span_s, ran_s + waited_s)
            # waited_s is negative where a quota has held others of our group
            self._was_crowded = waited_s > CROWDED * (ran_s + waited_s)
        return self._was_crowded

    def _spent_s(self) -> tuple[float, float] | None:
        try:
            if self._wait is None:
                self._wait = CpuWait(most=MOST_THREADS)
            return self._wait.spent_s()
        except Exception:  # the program has replaced what reads files: times count as they come
            return None
