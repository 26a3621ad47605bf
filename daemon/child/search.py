"""CHILD side: find the solution of one unit of work.

    Offers      which candidates are tried                                  offers.py
    Screening   short races of all candidates, which leave the promising    screening.py
    Races       one race, and when its times count                          races.py
    Arms        operands in memory, and the candidates' calls on them       arms.py
    Trials      what the parent learns of each candidate                   trials.py
    Beside      the winner raced with kernels of serving engines            engines.py

Torch's default is timed first and is always a candidate.  All others are screened against it in short races, and the
best few are verified.  Those that pass race the default for longer at every member of the unit, and the best of them
races again (if it does not win again, the next best).  Only a candidate that is clearly faster in every race, at every
member, is published; otherwise the verdict is that the default is best, which is a solution too.

There are two races because the first one has several entrants and so picks the luckiest; the second has that one alone.
With the same kernel in both arms, each race is won by chance in at most 2.5 % of cases, whatever the noise
(measure.py), and far less often since a gain must exceed 2 %.

On a GPU it can depend on the operands' addresses which kernel is faster, and on how long the device has been working: a
device at its power limit has a lower clock.  The confidence interval of one race does not cover that.  So the second
race has operands of its own and a rested device, and a small gain needs a third race, with other operands again, on a
device that was kept busy.  One of cuBLASLt's algorithms was 1.02 times as fast as torch's on a rested device and 1.09
under load, another 1.07 and 1.00 (2048x512x16384 and 256x2112x7168,
lab/results/queued_races-h200-2026-11-24.json).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

import torch

from gemmtuned.configs.errors import CandidateFailed, TableError, TryLater
from gemmtuned.configs.passing import with_lack
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import DEFAULT_BACKEND, MODES, Candidate, Device, Environment, Solution
from gemmtuned.daemon.child.arms import Arms
from gemmtuned.daemon.child.chain_search import tune_chain
from gemmtuned.daemon.child.checks import Wrong
from gemmtuned.daemon.child.clocks import clock_for
from gemmtuned.daemon.child.compile_ahead import Compilers
from gemmtuned.daemon.child.engines import Beside
from gemmtuned.daemon.child.last_check import Winner, last_check
from gemmtuned.daemon.child.measure import Clock
from gemmtuned.daemon.child.measure_cuda import GraphClock
from gemmtuned.daemon.child.offers import Offers
from gemmtuned.daemon.child.outcome import (
    DEFAULT,
    MIN_GAIN,
    Default,
    Entrant,
    Question,
    eager_gain_low,
    keep_binary,
    preferred,
    solution_of,
)
from gemmtuned.daemon.child.races import AS_IT_IS, Races
from gemmtuned.daemon.child.screening import Screening
from gemmtuned.daemon.child.trials import Emit, Trials, now_us
from gemmtuned.daemon.child.verify import REFUSALS, default_error, first_line, verify
from gemmtuned.daemon.protocol.options import DEFAULTS, SearchOptions
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.backends.base import AheadBackend, CompiledBackend, Kernel
from gemmtuned.kernels.torch_flags import as_called

CLEAR_GAIN: Final = 1.10  # a smaller lower bound needs a third race on a GPU; scaled with the gain asked for

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
    """The solutions for target (for buckets: filed under its padded M), proven at every member; that of `mode` first.

    members: the exact sizes to prove it at: target itself, or the smallest, the most called and the largest one of a
    bucket.  Times in the solution are those of the most called; gain_low is the worst over the members.
    skip: candidates that failed before; clock, seed: for tests.

    Takes about a second for decode sizes on a CPU.
    Raises CandidateFailed when torch's own kernel cannot run the problem, TryLater when the device is slowed down, or
    when others use the CPU so much that times would say little about the kernels.
    """
    if DEFAULT in skip:
        raise CandidateFailed(f"{target}: torch's own kernel failed before")
    device = torch_device(environment.device)
    # another seed every time, so that a repeated search of a problem is independent of the first
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
    if device.type == "cuda":  # give unused memory back to other programs
        del contest, winner
        torch.cuda.empty_cache()
    return found


def torch_device(device: Device) -> torch.device:
    """The torch device of a device kind; a worker sees only one, which its parent has chosen."""
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
        self.main = members[len(members) // 2]  # the most called one, if there are three
        self.default_err = 0.0
        self._environment, self._device, self._clock = environment, device, clock
        self._options, self._coin = options, coin
        self._offers = Offers(members, environment, options, skip, BACKENDS)
        self._trials = Trials(self.main, emit)

    def run(self) -> Entrant | None:
        """The winner; None when the default is best."""
        self._trials.lacking(self._options.asks_for)
        default = self._default_kernels()
        offered = self._compiled(list(self._offers.at(self.main)))
        self._arms = Arms(self.main, default, self._device, self._clock)
        self._races = Races(self._arms, self._clock, self._options, self._coin)
        self._screening = Screening(
            self.members, self._arms, self._races, self._trials, BACKENDS, torchs_alone=self._options.torchs_alone
        )
        entrants = self._verify(self._screening.run(offered))
        self._engines = Beside(
            self.members, self._environment, self._screening, self._races, self._trials, self._options
        )
        if not self.default_err:
            self.default_err = default_error(self.main, default[self.main], device=self._device)
        winners = [e for e in entrants if self._race(e, attempt=1)]
        while winners:
            winner = preferred(winners)
            proven = self._wins_again(winner) and self._is_right_still(winner)
            if proven and self._keep_binary(winner) and self._engines.race(winner):
                return winner
            winners.remove(winner)
        return None

    def solution(self, winner: Entrant | None, mode: str) -> Solution:
        """The verdict for the target in one mode, once the search has run; see outcome.py."""
        if winner is not None and mode == "eager" and isinstance(self._clock, GraphClock) and not winner.launch:
            # the arms are made anew where a race with an engine's kernel had to free the operands' memory
            its, torchs = (winner.candidate, winner.kernels), (DEFAULT, self._arms.default)
            host_us = [self._clock.host_us(self._arms.arm(c, k[self.main], self.main)) for c, k in (its, torchs)]
            more_us = host_us[0] - host_us[1]
            if eager_gain_low(winner.races[self.main], more_us) <= self._options.min_gain:
                winner = None
        asked = Question(self.target, self._covers, self.main, self._environment)
        default = Default(self._screening.default_us, self.default_err, self._engines.of_torchs())
        return solution_of(asked, winner, default, mode)

    def _keep_binary(self, winner: Entrant) -> bool:
        started = self._trials.start(winner.candidate)
        try:
            keep_binary(winner, BACKENDS[winner.candidate.backend], self.target)
        except TableError as err:  # the disk refuses, which says nothing about the winner
            raise TryLater(str(err)) from err
        except REFUSALS as err:
            self._trials.report(winner.candidate, "confirm", "refused", started, note=first_line(err))
            return False
        return True

    def _default_kernels(self) -> dict[Problem, Kernel]:
        self._trials.start(DEFAULT)
        try:
            return {m: BACKENDS[DEFAULT_BACKEND].prepare(DEFAULT, m) for m in self.members}
        except REFUSALS as err:
            raise CandidateFailed(f"{self.main}: torch's own kernel refuses: {first_line(err)}") from err

    def _compiled(self, offered: Sequence[Candidate]) -> list[Candidate]:
        """The candidates that compile; other processes compile them before operands are made on the device."""
        todo = [c for c in offered if isinstance(BACKENDS[c.backend], CompiledBackend | AheadBackend)]
        if not todo:
            return list(offered)
        started = now_us()
        failed = _compilers.run(todo, self.main, self._environment.device, before=self._trials.compiling)
        for candidate, reason in failed.items():
            self._trials.report(candidate, "screen", "refused", started, note=reason)
        return [candidate for candidate in offered if candidate not in failed]

    def _verify(self, entrants: list[Entrant]) -> list[Entrant]:
        """The entrants that give right results at every member."""
        for member in self.members:
            started = now_us()
            verdicts = verify(
                member,
                {e.candidate: e.kernels[member] for e in entrants},
                self._arms.default[member],
                device=self._device,
                before=self._trials.start,
                options=self._options,
            )
            passed = []
            for entrant in entrants:
                verdict = verdicts[entrant.candidate]
                first = self._screening.wrong_at_first.get(entrant.candidate, "")
                if verdict.outcome == "ok" and first:
                    verdict = replace(verdict, outcome="wrong", note=f"{member} {entrant.candidate}: {first}")
                self._trials.report(
                    entrant.candidate, "verify", verdict.outcome, started,
                    err=verdict.err, note=verdict.note, err_ratio=verdict.err_ratio,
                )  # fmt: skip
                if member == self.main:
                    entrant.verdict = verdict
                    self.default_err = verdict.baseline_err
                if verdict.outcome == "ok":
                    passed.append(entrant)
                    self._arms.apart_by_rms[str(entrant.candidate), member] = verdict.apart_by_rms
            entrants = passed
        return entrants

    def _is_right_still(self, winner: Entrant) -> bool:
        """Whether the closures that raced still give right results after the races; see last_check.py."""
        started = self._trials.start(winner.candidate)
        arm = self._arms.arm(winner.candidate, winner.kernels[self.main], self.main)
        asked = Winner(
            self.main, self.target, self._covers, winner.candidate, BACKENDS[winner.candidate.backend],
            winner.kernels[self.main], self._arms.default[self.main], arm, self._arms.inputs(self.main),
            self._arms.bench.weights,
        )  # fmt: skip
        try:
            if isinstance(self._clock, GraphClock):
                self._clock.look(arm)
            proved = last_check(
                asked, device=self._device, call_us=winner.races[self.main].us, options=self._options,
                sizes=[member.m for member in self.members],
            )  # fmt: skip
        except (Wrong, CandidateFailed) as err:
            self._trials.report(
                winner.candidate, "verify", "wrong", started,
                note=with_lack(f"{self.main} {winner.candidate}: {err}", err),
            )  # fmt: skip
            return False
        except REFUSALS as err:
            self._trials.report(winner.candidate, "verify", "refused", started, note=first_line(err))
            return False
        self._trials.report(
            winner.candidate, "verify", "ok", started, err=winner.verdict.err, note=str(proved),
            err_ratio=winner.verdict.err_ratio,
        )  # fmt: skip
        return True

    def _wins_again(self, winner: Entrant) -> bool:
        for attempt, state in enumerate(self._races.states, 2):
            if attempt == 3 and winner.gain_low >= CLEAR_GAIN * self._options.min_gain / MIN_GAIN:
                break
            self._arms.move(attempt - 1)
            if not self._race(winner, attempt=attempt, state=state):
                return False
        return True

    def _race(self, entrant: Entrant, *, attempt: int, state: str = AS_IT_IS) -> bool:
        """True when it beats the default beyond noise, and by enough to be worthwhile, at every member."""
        for member in self.members:
            started = self._trials.start(entrant.candidate)
            try:
                run, clocks = self._races.in_earnest(entrant, member, state)
            except CandidateFailed as err:  # its result inside a graph differs from the verified one
                self._trials.report(entrant.candidate, "confirm", "wrong", started, note=first_line(err))
                return False
            except REFUSALS as err:  # for example no memory for its graph
                self._trials.report(entrant.candidate, "confirm", "refused", started, note=first_line(err))
                return False
            worst = entrant.races.get(member)
            # the worst of all races counts
            entrant.races[member] = run if worst is None or run.gain_low < worst.gain_low else worst
            won = run.gain_low > self._options.min_gain
            self._trials.report(
                entrant.candidate, "confirm", "ok" if won else "slower", started, us=run.us, err=entrant.verdict.err,
                note=f"race={attempt}{state} m={member.m} gain={run.gain:.3f} low={run.gain_low:.3f} pairs={run.pairs}"
                + clocks,
            )  # fmt: skip
            if not won:
                return False
        return True
