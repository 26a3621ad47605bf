"""Whether times of calls say anything: a program that waits for CPUs which others use sees theirs in each of its own.

Eight programs of one thread on two CPUs: a call of 0.1 ms takes a slice of the scheduler, 3 to 8 ms, now and then.  So
counts are kept and times are not, for as long as this process waited much since the flush before.
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

MOST_THREADS: Final = 64  # looked at, once a flush
SHORTEST_S: Final = 0.02  # a slice or two of the scheduler: less than that tells nothing of its own


class Crowd:
    """wait: the kernel's counters; elsewhere in tests.

    longer_s: how much longer this process has run because others used the CPUs: of the time that its threads could run,
    the share that they waited.
    """

    def __init__(self, wait: CpuWait | None = None) -> None:
        self._wait = wait
        self._last = (0.0, 0.0)  # what threads spent before they began
        self._was = False
        self.longer_s, self._at_s = 0.0, clock.monotonic()

    def without_its_times(self, sightings: Iterable[Sighting]) -> Iterator[Sighting]:
        """What was counted since the last time; without the times where others were in the way meanwhile."""
        crowded: bool | None = None  # unknown until one is timed: a look takes 10 to 50 us a thread
        for s in sightings:
            if s.sampled_calls and crowded is None:
                crowded = self.was_in_the_way()
            yield replace(s, sampled_calls=0, sampled_us=0.0) if s.sampled_calls and crowded else s

    def was_in_the_way(self) -> bool:
        """Since it was last asked: our threads waited for more than a share of CROWDED of the time they could use.

        After a moment that is too short to tell, and where threads have ended with what they spent, it is as it was.
        """
        spent = self._spent_s()
        if spent is None:  # nobody counts: times are taken as they come
            return False
        ran_s, waited_s = (now - before for now, before in zip(spent, self._last, strict=True))
        if 0.0 <= ran_s < SHORTEST_S and waited_s < SHORTEST_S:
            return self._was
        self._last = spent
        now_s = clock.monotonic()
        span_s, self._at_s = now_s - self._at_s, now_s
        if ran_s >= 0.0:
            # of a thread alone, what it waited; of several at a time, what each of them did
            if waited_s > 0.0:
                self.longer_s += waited_s / (ran_s + waited_s) * min(span_s, ran_s + waited_s)
            self._was = waited_s > CROWDED * (ran_s + waited_s)  # less than nothing: a quota held others of the group
        return self._was

    def _spent_s(self) -> tuple[float, float] | None:
        try:
            if self._wait is None:
                self._wait = CpuWait(most=MOST_THREADS)
            return self._wait.spent_s()
        except Exception:  # the program has replaced what reads files: that is to cost times their judge, and no counts
            return None
