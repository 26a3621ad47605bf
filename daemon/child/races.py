"""CHILD side: races of a candidate with torch's own kernel, and the conditions under which their times count."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

from gemmtuned.configs.errors import CandidateFailed, TryLater
from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.child.arms import Arms
from gemmtuned.daemon.child.cpu_wait import cpus, most_waited
from gemmtuned.daemon.child.measure import Arm, Clock, Race, WallClock, burst_for, pairs_for, race, time_alone
from gemmtuned.daemon.child.measure_cuda import GraphClock
from gemmtuned.daemon.child.outcome import DEFAULT, Entrant
from gemmtuned.daemon.child.verify import REFUSALS
from gemmtuned.daemon.protocol.options import SearchOptions

SCREEN_S: Final = 0.05  # a short race
SCREEN_PAIRS: Final = (3, 12)
RACE_S: Final = 0.15  # a race; long calls take longer: MIN_PAIRS is kept
READINGS_S: Final = 0.025  # a short race by a clock whose readings are of many calls
REST_S: Final = 1.0  # a GPU is left alone before the race of a rested device, which is short: soon it is warm
RESTED_S: Final = 0.1
BUSY_S: Final = 0.3  # a GPU is kept at work before the race of a busy device
COOL_S: Final = 2.0  # a slowed device, or a CPU in use, is given this long, twice, before the race is called off
SOON_S: Final = 0.1  # a race in which our threads waited for a CPU is run again at once for so long: a burst is over
FAR: Final = 0.9  # gain: what is below it in each of the first SCREEN_PAIRS[0] pairs is timed no further

AS_IT_IS, RESTED, BUSY = "", " rested", " busy"  # a device in a race, as its trial's note tells it

_T = TypeVar("_T")


class Races:
    """The races of one contest. coin: draws which of a pair begins."""

    def __init__(self, arms: Arms, clock: Clock, options: SearchOptions, coin: random.Random) -> None:
        self._arms, self._clock, self._options, self._coin = arms, clock, options, coin

    @property
    def states(self) -> tuple[str, ...]:
        """The states of the device in the races after the first."""
        return (RESTED, BUSY) if isinstance(self._clock, GraphClock) else (AS_IT_IS,)

    def time_alone(self, baseline: Arm) -> float:
        """Median time of stock torch with no rival beside it, in us."""
        rounds = pairs_for(self._warm_up(baseline), SCREEN_S, least=SCREEN_PAIRS[0], most=SCREEN_PAIRS[1])
        return time_alone(baseline, clock=self._clock, rounds=rounds)

    def short(self, baseline: Arm, arm: Arm, default_us: float) -> Race:
        """As long as SCREEN_S and SCREEN_PAIRS say, but no longer than it takes to see that a candidate is far behind.

        At M = 2048 a reading takes 1 to 2 ms of a GPU: 12 pairs of each of 20 to 30 candidates were 1 s of a search's
        2.4 s, half of it for candidates that are far behind.
        """
        least, most = SCREEN_PAIRS
        pairs = self._pairs(arm, max(default_us, self._warm_up(arm)), SCREEN_S, least=least, most=most)
        return race(baseline, arm, clock=self._clock, pairs=pairs, coin=self._coin, least=least, far=FAR)

    def longer(self, baseline: Arm, arm: Arm, default_us: float) -> Race:
        """A short race of twice the length."""
        pairs = self._pairs(arm, default_us, 2 * SCREEN_S, least=SCREEN_PAIRS[0], most=2 * SCREEN_PAIRS[1])
        return race(baseline, arm, clock=self._clock, pairs=pairs, coin=self._coin)

    def in_earnest(
        self, entrant: Entrant, member: Problem, state: str, than: Entrant | None = None
    ) -> tuple[Race, str]:
        """(a race on a device that was ours and not slowed down, its clock as text for the trial's note).

        than: what it races with; None: torch's own.
        With the operands before where those in use leave no room for graphs.  Raises TryLater when the device
        stays slowed: nobody's fault, the problem's turn comes again.
        """
        while True:
            try:
                return self._at_full_speed(entrant, member, state, than)
            except CandidateFailed:
                raise
            except REFUSALS:
                if self._arms.bench_in_use == 0:
                    raise
            self._arms.step_back()

    def _at_full_speed(self, entrant: Entrant, member: Problem, state: str, than: Entrant | None) -> tuple[Race, str]:
        if not isinstance(self._clock, GraphClock):
            return self.undisturbed(lambda: self._one(entrant, member, state, than)), ""
        slowed: tuple[str, ...] = ()
        for attempt in range(3):
            if attempt:
                time.sleep(COOL_S)
            run, now = self._one(entrant, member, state, than), self._clock.condition()
            slowed = now.slowed
            if not slowed:
                return run, f" sm_mhz={now.sm_mhz}" if now.sm_mhz else ""
        raise TryLater(f"{member}: the device is slowed down ({', '.join(slowed)}), its races do not count")

    def _one(self, entrant: Entrant, member: Problem, state: str, than: Entrant | None) -> Race:
        rival, kernel = (
            (DEFAULT, self._arms.default[member]) if than is None else (than.candidate, than.kernels[member])
        )
        baseline = self._arms.arm(rival, kernel, member)
        challenger = self._arms.arm(entrant.candidate, entrant.kernels[member], member)
        self._arms.watch(member, (baseline, challenger))
        try:
            call_us = max(self._warm_up(baseline), 0.1)
            burst = burst_for(call_us)
            reading_us = call_us * burst
            if isinstance(self._clock, GraphClock):
                self._warm_up(challenger)  # both are recorded before the device is made what it is to be
                reading_us = call_us * self._clock.launches(baseline)
                if state == RESTED:
                    time.sleep(REST_S)
                elif state == BUSY:
                    self._clock.keep_busy((baseline, challenger), BUSY_S)
            pairs = self._options.iters or pairs_for(reading_us, RACE_S)
            if state == RESTED:  # a long one would not be of a rested device
                pairs = min(pairs, pairs_for(reading_us, RESTED_S))
            return race(baseline, challenger, clock=self._clock, pairs=pairs, coin=self._coin, burst=burst)
        finally:
            if member != self._arms.main:  # made for this race alone
                for arm in (baseline, challenger):
                    self._clock.forget(arm)

    def undisturbed(self, measure: Callable[[], _T]) -> _T:
        """What measure() gives when our threads need not wait for a CPU meanwhile. Raises TryLater when they always do.

        Where there are more threads than CPUs they wait for each other: that says nothing, and the times count.
        """
        clock = self._clock
        if not isinstance(clock, WallClock) or self._arms.main.threads > cpus():
            return measure()
        waited = 0.0
        for attempt in range(3):
            if attempt:
                time.sleep(COOL_S)
            until_s = time.monotonic() + SOON_S
            while True:
                began_s, before_s = time.monotonic(), clock.waited_s()
                found = measure()
                after_s, ended_s = clock.waited_s(), time.monotonic()
                if before_s is None or after_s is None:
                    return found
                waited = (after_s - before_s) / max(ended_s - began_s, 1e-6)
                if waited <= most_waited(self._arms.main.threads):
                    return found
                if ended_s > until_s:
                    break
        share = min(waited / self._arms.main.threads, 1.0)
        raise TryLater(f"others use the CPU: our threads waited for it {share:.0%} of the time, so no time counts")

    def _pairs(self, arm: Arm, call_us: float, budget_s: float, *, least: int, most: int) -> int:
        """How many pairs of readings fit budget_s at call_us per call; a GPU's are of many calls, but less noisy."""
        if isinstance(self._clock, GraphClock):
            call_us *= self._clock.launches(arm)
            budget_s *= READINGS_S / SCREEN_S
        return pairs_for(call_us, budget_s, least=least, most=most)

    def _warm_up(self, arm: Arm) -> float:
        """Run it for the first times; the time of a later call in us."""
        for _ in range(self._options.warmup):
            arm.calls[0]()
        return min(self._clock.us(arm, (i % len(arm.calls),)) for i in range(2))
