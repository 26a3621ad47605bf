"""CHILD side: a short race of every candidate with torch's own kernel, after which the promising ones are left.

Where a candidate is far ahead of torch's own, those after it race with that one: torch's form of a quantised mixture
takes up to 300 times as long, and in 30 races it was nearly all of what a search took of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from gemmtuned.configs import engine_races
from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.child.arms import Arms
from gemmtuned.daemon.child.checks import Watch, Wrong, roughly_apart
from gemmtuned.daemon.child.measure import Arm, Race
from gemmtuned.daemon.child.outcome import DEFAULT, Entrant
from gemmtuned.daemon.child.races import Races
from gemmtuned.daemon.child.trials import Trials, now_us
from gemmtuned.daemon.child.verify import REFUSALS, first_line
from gemmtuned.kernels.backends.base import Backend, Kernel
from gemmtuned.kernels.families.error import held_to

FINALISTS: Final = 3
NEAR: Final = 1.03  # what screens this near to the best is screened once more, NEAR_MOST at most: noise is as large
NEAR_MOST: Final = 8
PACE: Final = 3.0  # screened gain from which a candidate takes torch's place in the races after its own
_HOPELESS: Final = 0.97  # screened gain below which a candidate cannot be worth it; not below FAR


@dataclass(frozen=True, slots=True)
class _Rival:
    """What candidates are raced with: the time of a call in us, and its gain over torch's own kernel."""

    arm: Arm
    us: float
    gain: float = 1.0


class Screening:
    """The screening of one contest. torchs_alone: as in SearchOptions."""

    def __init__(
        self,
        members: Sequence[Problem],
        arms: Arms,
        races: Races,
        trials: Trials,
        backends: Mapping[str, Backend],
        *,
        torchs_alone: bool,
    ) -> None:
        self.default_us = 0.0
        self.wrong_at_first: dict[Candidate, str] = {}
        self.timed: list[Entrant] = []  # engines' kernels that ran
        self._members, self._arms, self._races, self._trials = members, arms, races, trials
        self._backends, self._torchs_alone = backends, torchs_alone

    def run(self, offered: Sequence[Candidate]) -> list[Entrant]:
        """A short race of every candidate at the most called member; the promising ones, best first."""
        started = now_us()
        try:
            baseline = self._arms.arm(DEFAULT, self._arms.default[self._arms.main], self._arms.main)
            self.default_us = self._races.undisturbed(lambda: self._races.time_alone(baseline))
        except REFUSALS as err:
            raise CandidateFailed(f"{self._arms.main}: torch's own kernel fails: {first_line(err)}") from err
        self._trials.report(DEFAULT, "screen", "ok", started, us=self.default_us)
        self._torch = self._rival = _Rival(baseline, self.default_us)
        promising = []
        for candidate in offered:
            started = self._trials.start(candidate)
            try:
                kernels = {m: self._backends[candidate.backend].prepare(candidate, m) for m in self._members}
                arm = self._arms.arm(candidate, kernels[self._arms.main], self._arms.main)
                self._look_at_first(candidate, kernels[self._arms.main], arm)
                run, gain = self._race(self._races.short, candidate, arm)
            except REFUSALS as err:
                self._trials.report(candidate, "screen", "refused", started, note=first_line(err))
                self._arms.forget(candidate)
                continue
            if candidate.backend in engine_races.BACKENDS:
                self.timed.append(Entrant(candidate, kernels, gain))
            good = gain > _HOPELESS
            self._trials.report(
                candidate, "screen", "ok" if good else "slower", started, us=run.us, note=f"gain={gain:.3f}"
            )
            if good:
                promising.append(Entrant(candidate, kernels, gain))
                is_far_ahead = gain >= PACE * self._rival.gain and candidate not in self.wrong_at_first
                if is_far_ahead and not self._torchs_alone:
                    self._rival = _Rival(arm, run.us, gain)
            else:
                self._arms.forget(candidate)
        promising.sort(key=lambda e: e.gain, reverse=True)
        near = [e for e in promising if e.gain * NEAR > promising[0].gain][:NEAR_MOST]
        if len(near) > FINALISTS:
            promising = self._screen_again(near)
        return promising[:FINALISTS]

    def _look_at_first(self, candidate: Candidate, kernel: Kernel, arm: Arm) -> None:
        """A program's first call counts as well, and this is the only first one that there will be."""
        stock = self._arms.stock_at(self._arms.main)
        try:
            apart = roughly_apart(held_to(self._arms.main, kernel), stock)
            Watch(stock, apart).look(arm.calls[0](), "its first call")
        except Wrong as err:
            self.wrong_at_first[candidate] = str(err)

    def _race(self, how: Callable[[Arm, Arm, float], Race], candidate: Candidate, arm: Arm) -> tuple[Race, float]:
        """(a race with the rival, the gain over torch's own kernel).

        Where it fails, torch's own takes the rival's place: the rival may have failed, and not the candidate.
        """
        rival = self._rival
        if rival.arm not in (self._torch.arm, arm):
            self._trials.racing(candidate)
        try:
            run = self._races.undisturbed(partial(how, rival.arm, arm, rival.us))
        except REFUSALS:
            if rival is self._torch:
                raise
            if rival.arm is arm:
                self._rival = self._torch
                raise
            rival = self._torch
            self._trials.start(candidate)
            run = self._races.undisturbed(partial(how, rival.arm, arm, rival.us))
            self._rival = rival  # the candidate has not failed
        return run, rival.gain * run.gain

    def _screen_again(self, near: list[Entrant]) -> list[Entrant]:
        """Race those again, twice as long, that one short race cannot tell apart; best first."""
        looked = []
        for entrant in near:
            started = self._trials.start(entrant.candidate)
            try:
                run, gain = self._race(self._races.longer, entrant.candidate, self._arms[entrant.candidate])
            except REFUSALS as err:
                self._trials.report(entrant.candidate, "screen", "refused", started, note=first_line(err))
                self._arms.forget(entrant.candidate)
                continue
            entrant.gain = (entrant.gain * gain**2) ** (1 / 3)
            looked.append(entrant)
            note = f"gain={entrant.gain:.3f} of two"
            self._trials.report(entrant.candidate, "screen", "ok", started, us=run.us, note=note)
        return sorted(looked, key=lambda e: e.gain, reverse=True)
