"""CHILD side: find the solution of one unit of work.

Torch's default is timed first and is always a candidate.  All others are screened against it in short races; the best
few are verified; what passes races the default in earnest at every member of the unit, and the best of those races
again (if it does not win again, the next best).  Only a candidate that is clearly faster in every race, at every
member, is published; otherwise the verdict is that the default is best, which is a solution too.

Two races because the first one has several entrants and picks the luckiest: the second is of that one alone.  With the
same kernel in both arms each is won by chance in at most 2.5 % of cases, whatever the noise (measure.py), and the 2 %
that a gain must exceed makes it far less.

On a GPU which kernel is faster can depend on where operands lie, and on how long the device has been at work: one that
is held at its power limit clocks lower.  No interval of one place and one state tells that.  So the second race has
operands of its own and a rested device, and a small gain needs a third, elsewhere again, on a device that was kept
busy.  Of winners of the library's algorithms one was 1.02 times as fast as torch's rested and 1.09 under load, another
1.07 and 1.00 (2048x512x16384 and 256x2112x7168, lab/results/queued_races-h200-2026-11-24.json).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Final, TypeVar

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed, TableError, TryLater
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import DEFAULT_BACKEND, MODES, Candidate, Device, Environment, Solution
from gemmtuned.daemon.child.chain_search import tune_chain
from gemmtuned.daemon.child.checks import Watch, Wrong
from gemmtuned.daemon.child.clocks import clock_for
from gemmtuned.daemon.child.compile_ahead import Compilers
from gemmtuned.daemon.child.cpu_wait import cpus, most_waited
from gemmtuned.daemon.child.last_check import Winner, last_check
from gemmtuned.daemon.child.measure import (
    Arm,
    Bench,
    Clock,
    Race,
    WallClock,
    burst_for,
    pairs_for,
    race,
    time_alone,
)
from gemmtuned.daemon.child.measure_cuda import GraphClock
from gemmtuned.daemon.child.outcome import (
    DEFAULT,
    WORTH_IT,
    Default,
    Entrant,
    Question,
    eager_gain_low,
    keep_binary,
    preferred,
    solution_of,
)
from gemmtuned.daemon.child.verify import REFUSALS, default_error, first_line, verify
from gemmtuned.daemon.protocol.options import DEFAULTS, SearchOptions
from gemmtuned.daemon.protocol.wire import COMPILING, Trial
from gemmtuned.kernels.backends import BACKENDS, candidates
from gemmtuned.kernels.backends.base import CompiledBackend, Kernel
from gemmtuned.kernels.budget import MOST, in_turns
from gemmtuned.kernels.torch_flags import as_called

SCREEN_S: Final = 0.05  # a short race
SCREEN_PAIRS: Final = (3, 12)
RACE_S: Final = 0.15  # a race; long calls take longer: MIN_PAIRS is kept
FINALISTS: Final = 3
NEAR: Final = 1.03  # what screens this near to the best is screened once more, NEAR_MOST at most: noise is as large
NEAR_MOST: Final = 8
READINGS_S: Final = 0.025  # a short race by a clock whose readings are of many calls
REST_S: Final = 1.0  # a GPU is left alone before the race of a rested device, which is short: soon it is warm
RESTED_S: Final = 0.1
BUSY_S: Final = 0.3  # a GPU is kept at work before the race of a busy device
COOL_S: Final = 2.0  # a slowed device, or a CPU in use, is given this long, twice, before the race is called off
SOON_S: Final = 0.1  # a race in which our threads waited for a CPU is run again at once for so long: a burst is over
FAR: Final = 0.9  # gain: what is below it in each of the first SCREEN_PAIRS[0] pairs is timed no further
SURE: Final = 1.10  # a GPU's winner whose lower bound is below it needs a third race; more where more gain is asked for
_ROUGHLY: Final = 2.0**-5  # of the largest value: no rounding is so far off
_HOPELESS: Final = 0.97  # screened gain below which a candidate cannot be worth it; not below FAR

AS_IT_IS, RESTED, BUSY = "", " rested", " busy"  # a device in a race, as its trial's note tells it

_T = TypeVar("_T")
Emit = Callable[[Trial], None]
_compilers = Compilers()  # its processes start when there is something to compile


def tune_modes(
    members: Sequence[Problem],
    covers: str,
    target: Problem,
    environment: Environment,
    *,
    mode: str,
    skip: Collection[Candidate],
    emit: Emit,
    options: SearchOptions = DEFAULTS,
    clock: Clock | None = None,
    seed: int | None = None,
) -> tuple[Solution, ...]:
    """The solutions for target (for buckets: filed under its padded M), proven at every member; in `mode` first.

    members: the exact sizes to prove it at: target itself, or the smallest, the most called and the largest one.
    Times in the solution are those of the most called; gain_low is the worst over the members.
    skip: candidates that failed before; clock, seed: for tests.

    Takes about a second for decode sizes on a CPU.
    Raises CandidateFailed when torch's own kernel cannot run it, TryLater when the device is slowed down, or when a
    CPU is so much in use by others that times would not be those of the kernels.
    """
    if DEFAULT in skip:
        raise CandidateFailed(f"{target}: torch's own kernel failed before")
    device = torch_device(environment.device)
    # A new order every time: a repeated search of one problem is another draw
    coin = random.Random(seed)  # noqa: S311
    if target.batch_invariant:
        with as_called(target):
            return tune_chain(
                target, environment, device, mode=mode, skip=skip, emit=emit, options=options, clock=clock, seed=seed
            )
    with as_called(target):
        contest = _Contest(
            tuple(members), covers, target, environment, device, skip, emit, options, clock or clock_for(device), coin
        )
        winner = contest.run()
        graphs = environment.device.kind != "cpu"
        modes = (mode, *(other for other in MODES if other != mode and graphs))
        found = tuple(contest.solution(winner, which) for which in modes)
    if device.type == "cuda":  # what we no longer need is others'
        del contest, winner
        torch.cuda.empty_cache()
    return found


def torch_device(device: Device) -> torch.device:
    """The torch device of a device kind: the worker sees one only, chosen by its parent."""
    return torch.device("cpu" if device.kind == "cpu" else "cuda")


class _Contest:
    """One run of the search, from screening to the last race."""

    def __init__(
        self,
        members: tuple[Problem, ...],
        covers: str,
        target: Problem,
        environment: Environment,
        device: torch.device,
        skip: Collection[Candidate],
        emit: Emit,
        options: SearchOptions,
        clock: Clock,
        coin: random.Random,
    ) -> None:
        self.members = members
        self.target = target
        self._covers = covers
        self.main = members[len(members) // 2]  # of three the most called
        self.default_us = 0.0
        self.default_err = 0.0
        self._environment = environment
        self._device = device
        self._skip = skip
        self._emit = emit
        self._options = options
        self._clock = clock
        self._coin = coin
        self._benches: list[Bench] = []  # operands, at one place in memory each
        self._place = 0  # whose are in use
        self._arms: dict[Candidate, Arm] = {}
        self._failed: dict[Candidate, str] = {}  # in the compiler
        self._apart: dict[Problem, float] = {}  # how far from torch's a result may be
        self._wrong_at_first: dict[Candidate, str] = {}
        self._stock: dict[Problem, Tensor] = {}  # torch's own on the operands of the place in use

    def run(self) -> Entrant | None:
        """The winner, or None: the default is best."""
        default = self._default_kernels()
        offered = list(self._candidates())
        self._compile_ahead(offered)
        self._benches.append(Bench(self.main, self._device))
        entrants = self._screen(default, [candidate for candidate in offered if candidate not in self._failed])
        entrants = self._verify(default, entrants)
        if not self.default_err:
            self.default_err = default_error(self.main, default[self.main], device=self._device)
        winners = [e for e in entrants if self._race(default, e, attempt=1)]
        while winners:
            winner = preferred(winners)
            if (
                self._wins_again(default, winner)
                and self._is_right_still(default, winner)
                and self._keep_binary(winner)
            ):
                return winner
            winners.remove(winner)
        return None

    def solution(self, winner: Entrant | None, mode: str) -> Solution:
        """The verdict for the target in one mode, once the search has run; see outcome.py."""
        if winner is not None and mode == "eager" and isinstance(self._clock, GraphClock) and not winner.launch:
            more_us = self._clock.host_us(self._arms[winner.candidate]) - self._clock.host_us(self._arms[DEFAULT])
            if eager_gain_low(winner.races[self.main], more_us) <= self._options.min_gain:
                winner = None
        asked = Question(self.target, self._covers, self.main, self._environment)
        return solution_of(asked, winner, Default(self.default_us, self.default_err), mode)

    def _keep_binary(self, winner: Entrant) -> bool:
        started = self._start(winner.candidate)
        try:
            keep_binary(winner, BACKENDS[winner.candidate.backend], self.target)
        except CandidateFailed as err:
            self._report(winner.candidate, "confirm", "refused", started, note=first_line(err))
            return False
        except TableError as err:  # the disk refuses: no verdict on the winner
            raise TryLater(str(err)) from err
        return True

    def _default_kernels(self) -> dict[Problem, Kernel]:
        self._start(DEFAULT)
        try:
            return {m: BACKENDS[DEFAULT_BACKEND].prepare(DEFAULT, m) for m in self.members}
        except REFUSALS as err:
            raise CandidateFailed(f"{self.main}: torch's own kernel refuses: {first_line(err)}") from err

    def _candidates(self) -> Iterator[Candidate]:
        """Seeds first, then our own in turns of backends and sizes (the most called member, the largest), MOST in all.

        Those that a backend itself likes least give way.  A candidate must hold the rows of X of every member.
        """
        seeds, only = self._options.seeds, self._options.only
        if only is not None:
            return self._distinct(chain(seeds, only))
        lists: dict[tuple[str, Problem], list[Candidate]] = {}
        for size in dict.fromkeys((self.main, self.members[-1])):
            for candidate in candidates(size, self._environment):
                lists.setdefault((candidate.backend, size), []).append(candidate)
        return islice(self._distinct(chain(seeds, in_turns(lists.values()))), MOST)

    def _distinct(self, offered: Iterable[Candidate | None]) -> Iterator[Candidate]:
        seen = {DEFAULT, *self._skip}
        for candidate in offered:
            if candidate is not None and candidate not in seen and self._can_be_tried(candidate):
                seen.add(candidate)
                yield candidate

    def _can_be_tried(self, candidate: Candidate) -> bool:
        if self._environment.stamp_of(candidate) is None or not self._options.allows(candidate):
            return False
        backend = BACKENDS.get(candidate.backend)
        if isinstance(backend, CompiledBackend) and self._options.only is None:  # who asks for it is told why not
            return all(backend.holds(candidate, member) for member in self.members)
        return backend is not None

    def _compile_ahead(self, offered: Sequence[Candidate]) -> None:
        """Have everything compiled that must be, in other processes, before operands are made on the device."""
        todo = [c for c in offered if isinstance(BACKENDS[c.backend], CompiledBackend)]
        if not todo:
            return
        started = _now_us()
        self._failed = _compilers.run(todo, self.main, self._environment.device, before=self._compiling)
        for candidate, reason in self._failed.items():
            self._report(candidate, "screen", "refused", started, note=reason)

    def _screen(self, default: dict[Problem, Kernel], offered: Sequence[Candidate]) -> list[Entrant]:
        """A short race of every candidate at the most called member; the promising ones, best first."""
        started = _now_us()
        try:
            baseline = self._arm(DEFAULT, default[self.main], self.main)
            self.default_us = self._undisturbed(lambda: self._time_alone(baseline))
        except REFUSALS as err:
            raise CandidateFailed(f"{self.main}: torch's own kernel fails: {first_line(err)}") from err
        self._report(DEFAULT, "screen", "ok", started, us=self.default_us)
        promising = []
        for candidate in offered:
            started = self._start(candidate)
            try:
                kernels = {m: BACKENDS[candidate.backend].prepare(candidate, m) for m in self.members}
                arm = self._arm(candidate, kernels[self.main], self.main)
                self._look_at_first(default, candidate, arm)
                run = self._undisturbed(partial(self._short_race, baseline, arm))
            except REFUSALS as err:
                self._report(candidate, "screen", "refused", started, note=first_line(err))
                self._forget(candidate)
                continue
            good = run.gain > _HOPELESS
            self._report(
                candidate, "screen", "ok" if good else "slower", started, us=run.us, note=f"gain={run.gain:.3f}"
            )
            if good:
                promising.append(Entrant(candidate, kernels, run.gain))
            else:
                self._forget(candidate)
        promising.sort(key=lambda e: e.gain, reverse=True)
        near = [e for e in promising if e.gain * NEAR > promising[0].gain][:NEAR_MOST]
        if len(near) > FINALISTS:
            promising = self._screen_again(baseline, near)
        return promising[:FINALISTS]

    def _look_at_first(self, default: dict[Problem, Kernel], candidate: Candidate, arm: Arm) -> None:
        """A program's first call counts as well, and this is the only first one that there will be."""
        stock = self._stock_at(default, self.main)
        try:
            Watch(stock, _ROUGHLY * float(stock.abs().max())).look(arm.calls[0](), "its first call")
        except Wrong as err:
            self._wrong_at_first[candidate] = str(err)

    def _screen_again(self, baseline: Arm, near: list[Entrant]) -> list[Entrant]:
        """Those that one short race cannot tell apart, best first after another, twice as long."""
        looked = []
        for entrant in near:
            started = self._start(entrant.candidate)
            try:
                arm = self._arms[entrant.candidate]
                pairs = self._pairs(arm, self.default_us, 2 * SCREEN_S, least=SCREEN_PAIRS[0], most=2 * SCREEN_PAIRS[1])
                run = self._undisturbed(partial(race, baseline, arm, clock=self._clock, pairs=pairs, coin=self._coin))
            except REFUSALS as err:
                self._report(entrant.candidate, "screen", "refused", started, note=first_line(err))
                self._forget(entrant.candidate)
                continue
            entrant.gain = (entrant.gain * run.gain**2) ** (1 / 3)
            looked.append(entrant)
            note = f"gain={entrant.gain:.3f} of two"
            self._report(entrant.candidate, "screen", "ok", started, us=run.us, note=note)
        return sorted(looked, key=lambda e: e.gain, reverse=True)

    def _verify(self, default: dict[Problem, Kernel], entrants: list[Entrant]) -> list[Entrant]:
        """Those that give right results at every member."""
        for member in self.members:
            started = _now_us()
            verdicts = verify(
                member,
                {e.candidate: e.kernels[member] for e in entrants},
                default[member],
                device=self._device,
                before=self._start,
                options=self._options,
            )
            passed = []
            for entrant in entrants:
                verdict = verdicts[entrant.candidate]
                first = self._wrong_at_first.get(entrant.candidate, "")
                if verdict.outcome == "ok" and first:
                    verdict = replace(verdict, outcome="wrong", note=f"{member} {entrant.candidate}: {first}")
                self._report(
                    entrant.candidate, "verify", verdict.outcome, started,
                    err=verdict.err, note=verdict.note, err_ratio=verdict.err_ratio,
                )  # fmt: skip
                if member == self.main:
                    entrant.verdict = verdict
                    self.default_err = verdict.baseline_err
                if verdict.outcome == "ok":
                    passed.append(entrant)
                    self._apart[member] = verdict.apart
            entrants = passed
        return entrants

    def _is_right_still(self, default: dict[Problem, Kernel], winner: Entrant) -> bool:
        """Whether the very closures that raced give right results now that the races are over; see last_check.py."""
        started = self._start(winner.candidate)
        bench = self._benches[self._place]
        arm = self._arm(winner.candidate, winner.kernels[self.main], self.main)
        asked = Winner(
            self.main, self.target, self._covers, winner.candidate, BACKENDS[winner.candidate.backend],
            winner.kernels[self.main], default[self.main], arm, bench.inputs(self.main), bench.weights,
        )  # fmt: skip
        try:
            if isinstance(self._clock, GraphClock):
                self._clock.look(arm)
            proved = last_check(
                asked, device=self._device, call_us=winner.races[self.main].us, options=self._options,
                sizes=[member.m for member in self.members],
            )  # fmt: skip
        except (Wrong, CandidateFailed) as err:
            self._report(winner.candidate, "verify", "wrong", started, note=f"{self.main} {winner.candidate}: {err}")
            return False
        except REFUSALS as err:
            self._report(winner.candidate, "verify", "refused", started, note=first_line(err))
            return False
        self._report(
            winner.candidate, "verify", "ok", started, err=winner.verdict.err, note=str(proved),
            err_ratio=winner.verdict.err_ratio,
        )  # fmt: skip
        return True

    def _wins_again(self, default: dict[Problem, Kernel], winner: Entrant) -> bool:
        on_gpu = isinstance(self._clock, GraphClock)
        for attempt, state in enumerate((RESTED, BUSY) if on_gpu else (AS_IT_IS,), 2):
            if attempt == 3 and winner.gain_low >= SURE * self._options.min_gain / WORTH_IT:
                break
            self._move(attempt - 1)
            if not self._race(default, winner, attempt=attempt, state=state):
                return False
        return True

    def _race(self, default: dict[Problem, Kernel], entrant: Entrant, *, attempt: int, state: str = AS_IT_IS) -> bool:
        """True when it beats the default beyond noise, and by enough to be worth it, at every member."""
        for member in self.members:
            started = self._start(entrant.candidate)
            try:
                run, clocks = self._race_with_room(default, entrant, member, state)
            except CandidateFailed as err:  # what it gives inside a graph is not what it gave when it was verified
                self._report(entrant.candidate, "confirm", "wrong", started, note=first_line(err))
                return False
            except REFUSALS as err:  # no memory for its graph, for one
                self._report(entrant.candidate, "confirm", "refused", started, note=first_line(err))
                return False
            worst = entrant.races.get(member)
            # Of all races the worst one counts
            entrant.races[member] = run if worst is None or run.gain_low < worst.gain_low else worst
            won = run.gain_low > self._options.min_gain
            self._report(
                entrant.candidate, "confirm", "ok" if won else "slower", started, us=run.us, err=entrant.verdict.err,
                note=f"race={attempt}{state} m={member.m} gain={run.gain:.3f} low={run.gain_low:.3f} pairs={run.pairs}"
                + clocks,
            )  # fmt: skip
            if not won:
                return False
        return True

    def _move(self, place: int) -> None:
        """On a GPU, take the operands at this place in memory; the last one, where no more have room.

        All are kept to the end of the contest: else their memory would be handed out again.
        """
        if not isinstance(self._clock, GraphClock):
            return
        with suppress(*REFUSALS):
            while len(self._benches) <= place:
                self._forget_all()  # what graphs hold may be what operands need
                bench = Bench(self.main, self._device)
                if len(bench.weights) < len(self._benches[0].weights):  # so few might be warm
                    break
                self._benches.append(bench)
        self._take(min(place, len(self._benches) - 1))

    def _take(self, place: int) -> None:
        if place != self._place:
            self._place = place
            self._stock.clear()
            self._forget_all()

    def _race_with_room(
        self, default: dict[Problem, Kernel], entrant: Entrant, member: Problem, state: str
    ) -> tuple[Race, str]:
        """_fair_race, at the place before where the operands of this one leave no room for graphs."""
        while True:
            try:
                return self._fair_race(default, entrant, member, state)
            except CandidateFailed:
                raise
            except REFUSALS:
                if self._place == 0:
                    raise
            del self._benches[self._place :]
            self._take(self._place - 1)

    def _fair_race(
        self, default: dict[Problem, Kernel], entrant: Entrant, member: Problem, state: str
    ) -> tuple[Race, str]:
        """(a race on a device that was ours and not slowed down, its clock as text for the trial's note).

        Raises TryLater when the device stays slowed: nobody's fault, the problem's turn comes again.
        """
        if not isinstance(self._clock, GraphClock):
            return self._undisturbed(lambda: self._one_race(default, entrant, member, state)), ""
        slowed: tuple[str, ...] = ()
        for attempt in range(3):
            if attempt:
                time.sleep(COOL_S)
            run, now = self._one_race(default, entrant, member, state), self._clock.condition()
            slowed = now.slowed
            if not slowed:
                return run, f" sm_mhz={now.sm_mhz}" if now.sm_mhz else ""
        raise TryLater(f"{member}: the device is slowed down ({', '.join(slowed)}), its races do not count")

    def _undisturbed(self, measure: Callable[[], _T]) -> _T:
        """What measure() gives when our threads need not wait for a CPU meanwhile. Raises TryLater when they always do.

        Where there are more threads than CPUs they wait for each other: that says nothing, and the times count.
        """
        clock = self._clock
        if not isinstance(clock, WallClock) or self.main.threads > cpus():
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
                if waited <= most_waited(self.main.threads):
                    return found
                if ended_s > until_s:
                    break
        raise TryLater(
            f"the CPU is in use: our threads waited {waited:.1f} s in a second for it, such times do not count"
        )

    def _time_alone(self, baseline: Arm) -> float:
        rounds = pairs_for(self._warm_up(baseline), SCREEN_S, least=SCREEN_PAIRS[0], most=SCREEN_PAIRS[1])
        return time_alone(baseline, clock=self._clock, rounds=rounds)

    def _short_race(self, baseline: Arm, arm: Arm) -> Race:
        """As long as SCREEN_S and SCREEN_PAIRS say, but no longer than it takes to see that a candidate is far behind.

        At M = 2048 a reading takes 1 to 2 ms of a GPU: 12 pairs of each of 20 to 30 candidates were 1 s of a search's
        2.4 s, half of it for candidates that are far behind.
        """
        least, most = SCREEN_PAIRS
        pairs = self._pairs(arm, max(self.default_us, self._warm_up(arm)), SCREEN_S, least=least, most=most)
        return race(baseline, arm, clock=self._clock, pairs=pairs, coin=self._coin, least=least, far=FAR)

    def _pairs(self, arm: Arm, call_us: float, budget_s: float, *, least: int, most: int) -> int:
        """Of readings of an arm whose calls take so long; a GPU's readings are of many calls, but less noisy."""
        if isinstance(self._clock, GraphClock):
            call_us *= self._clock.launches(arm)
            budget_s *= READINGS_S / SCREEN_S
        return pairs_for(call_us, budget_s, least=least, most=most)

    def _one_race(self, default: dict[Problem, Kernel], entrant: Entrant, member: Problem, state: str) -> Race:
        baseline = self._arm(DEFAULT, default[member], member)
        challenger = self._arm(entrant.candidate, entrant.kernels[member], member)
        self._watch(default, member, (baseline, challenger))
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
            if member != self.main:  # made for this race alone
                for arm in (baseline, challenger):
                    self._clock.forget(arm)

    def _watch(self, default: dict[Problem, Kernel], member: Problem, arms: Iterable[Arm]) -> None:
        """Both arms are looked at alike, so that it costs both of them the same."""
        stock = self._stock_at(default, member)
        for arm in arms:
            if arm.watch is None:  # the gate saw other inputs of this kind: twice what it allowed there
                arm.watch = Watch(stock, 2 * self._apart.get(member, math.inf))

    def _stock_at(self, default: dict[Problem, Kernel], member: Problem) -> Tensor:
        """Torch's own result on what all arms of the member read."""
        if member not in self._stock:
            inputs = self._benches[self._place].inputs(member)
            self._stock[member] = inputs.run(default[member])
        return self._stock[member]

    def _arm(self, candidate: Candidate, kernel: Kernel, member: Problem) -> Arm:
        """Made once at the most called member; at others again for every race, so that packed weights do not add up."""
        arm = self._arms.get(candidate) if member == self.main else None
        if arm is None:
            arm = self._benches[self._place].arm(str(candidate), kernel, member)
            if member == self.main:
                self._arms[candidate] = arm
        return arm

    def _forget(self, candidate: Candidate) -> None:
        """It is not timed again: its graph's memory is free for others."""
        arm = self._arms.pop(candidate, None)
        if arm is not None:
            self._clock.forget(arm)

    def _forget_all(self) -> None:
        for candidate in list(self._arms):
            self._forget(candidate)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _warm_up(self, arm: Arm) -> float:
        """Run it for the first times; the time of a later call in us."""
        for _ in range(self._options.warmup):
            arm.calls[0]()
        return min(self._clock.us(arm, (i % len(arm.calls),)) for i in range(2))

    def _compiling(self, candidate: Candidate) -> None:
        self._emit(Trial(self.main, candidate, "start", None, None, "ok", COMPILING, _now_us()))

    def _start(self, candidate: Candidate) -> int:
        started = _now_us()
        self._emit(Trial(self.main, candidate, "start", None, None, "ok", "", started))
        return started

    def _report(
        self,
        candidate: Candidate,
        phase: str,
        outcome: str,
        started_us: int,
        *,
        us: float | None = None,
        err: float | None = None,
        note: str = "",
        err_ratio: float | None = None,
    ) -> None:
        self._emit(Trial(self.main, candidate, phase, us, err, outcome, note, started_us, err_ratio))


def _now_us() -> int:
    return time.time_ns() // 1000
