"""CHILD side: find the batch-invariant solution of a problem: one kernel for every M.

Torch picks its kernel by M, so its own results vary with M, and the search is for the fastest kernel that is proven not
to.  A few numbers of rows show most kernels that vary; the others are timed against torch's own at SIZES, and the best
of them must pass the whole proof (chain_proof.py) and the gate that every kernel passes.  A kernel that is slower than
torch is published all the same, with its times.  Without a proven kernel there is no solution, and the calls run on
stock torch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from statistics import geometric_mean
from typing import Final

import torch

from gemmtuned.configs.errors import CandidateFailed, TableError, TryLater
from gemmtuned.configs.human_units import duration
from gemmtuned.configs.problem import CHAIN_M, Problem
from gemmtuned.configs.rows_config import ROWS
from gemmtuned.configs.solution import DEFAULT_BACKEND, MODES, Candidate, Environment, Solution
from gemmtuned.daemon.child.chain_proof import A_FEW, prove
from gemmtuned.daemon.child.checks import Wrong
from gemmtuned.daemon.child.clocks import clock_for
from gemmtuned.daemon.child.compile_ahead import Compilers
from gemmtuned.daemon.child.last_check import Winner, last_check
from gemmtuned.daemon.child.measure import Arm, Bench, Clock, Race, pairs_for, race
from gemmtuned.daemon.child.measure_cuda import GraphClock
from gemmtuned.daemon.child.offers import distinct
from gemmtuned.daemon.child.outcome import DEFAULT, Default, Entrant, Question, keep_binary, solution_of
from gemmtuned.daemon.child.trials import Emit, Trials, now_us
from gemmtuned.daemon.child.verify import REFUSALS, first_line, verify
from gemmtuned.daemon.protocol.options import SearchOptions
from gemmtuned.kernels.backends import BACKENDS, candidates
from gemmtuned.kernels.backends.base import CompiledBackend, Kernel
from gemmtuned.kernels.budget import in_turns

SIZES: Final = (1, 16, 64, CHAIN_M)  # rows at which candidates are timed; each counts alike
MOST: Final = 20  # candidates of a search
SHORT_S: Final = 0.03  # for a race at one size, to choose among candidates
LONG_S: Final = 0.15  # for a race at one size of the candidate that is published
NEAR: Final = 1.03  # a candidate whose gain times this exceeds the best is as good
_compilers = Compilers()  # its processes start when there is something to compile


def tune_chain(
    target: Problem,
    environment: Environment,
    device: torch.device,
    *,
    mode: str,
    skip: Collection[Candidate],
    emit: Emit,
    options: SearchOptions,
    clock: Clock | None = None,
    seed: int | None = None,
) -> tuple[Solution, ...]:
    """The solutions for a batch-invariant problem, one per mode, all by the same kernel. The caller sets the switches.

    Their us and baseline_us are geometric means over SIZES of the kernel's time and torch's own; gain_low is the worst
    of the four.  Raises CandidateFailed when no kernel is proven, or torch's own cannot run the problem.
    """
    search = _ChainSearch(target, environment, device, skip, emit, options, clock or clock_for(device), seed)
    winner = search.run()
    if winner is None:
        raise CandidateFailed(f"{target}: no kernel here is proven to give a row the same bits in every batch")
    asked = Question(target, "exact", target, environment)
    modes = (mode, *(other for other in MODES if other != mode and environment.device.kind != "cpu"))
    default = Default(winner.races[target].baseline_us, winner.verdict.baseline_err)
    return tuple(solution_of(asked, winner, default, which) for which in modes)


class _ChainSearch:
    """One run, from a few numbers of rows to the whole proof of the best."""

    def __init__(
        self,
        target: Problem,
        environment: Environment,
        device: torch.device,
        skip: Collection[Candidate],
        emit: Emit,
        options: SearchOptions,
        clock: Clock,
        seed: int | None,
    ) -> None:
        self._target, self._environment, self._device = target, environment, device
        self._skip, self._options, self._clock = skip, options, clock
        self._trials = Trials(target, emit)
        self._coin = random.Random(seed)  # noqa: S311
        self._largest = target.at(CHAIN_M)
        self._sizes = [target.at(m) for m in SIZES]
        self._bench: Bench | None = None
        self._stock: dict[Problem, Arm] = {}

    def run(self) -> Entrant | None:
        """The fastest kernel that is proven, or None."""
        default = self._default()
        offered = list(islice(self._offered(), min(self._options.first or MOST, MOST)))
        failed = self._compile_ahead(offered)
        self._bench = Bench(self._largest, self._device)
        passed: list[Entrant] = []
        for candidate in offered:
            if candidate not in failed and not _is_needless(candidate, passed):
                passed += self._screen(default, candidate)
        best = max((e.gain for e in passed), default=0.0)
        tied = [e for e in passed if e.gain * NEAR > best]  # the simplest of these comes first
        for entrant in [*tied, *sorted((e for e in passed if e not in tied), key=lambda e: -e.gain)]:
            if self._is_proven(default, entrant):
                return entrant
        return None

    def _default(self) -> Kernel:
        self._trials.start(DEFAULT)
        try:
            return BACKENDS[DEFAULT_BACKEND].prepare(DEFAULT, self._largest)
        except REFUSALS as err:
            raise CandidateFailed(f"{self._target}: torch's own kernel refuses: {first_line(err)}") from err

    def _offered(self) -> Iterator[Candidate]:
        """Candidates that backends offer for the problem itself, and compiled ones that they offer at any of SIZES."""
        asked = self._options
        own = (candidates(p, self._environment) for p in (self._target, *self._sizes))
        listed = chain(asked.seeds, asked.only) if asked.only is not None else in_turns(own)
        return distinct(listed, self._skip, self._can_be_tried)

    def _can_be_tried(self, candidate: Candidate) -> bool:
        if self._environment.stamp_of(candidate) is None or not self._options.allows(candidate):
            return False
        backend = BACKENDS.get(candidate.backend)
        if isinstance(backend, CompiledBackend):
            return backend.holds(candidate, self._largest)
        return backend is not None and backend.name == ROWS

    def _compile_ahead(self, offered: Sequence[Candidate]) -> Collection[Candidate]:
        todo = [c for c in offered if isinstance(BACKENDS[c.backend], CompiledBackend)]
        started, before = now_us(), self._trials.compiling
        failed = _compilers.run(todo, self._largest, self._environment.device, before=before) if todo else {}
        for candidate, reason in failed.items():
            self._trials.report(candidate, "screen", "refused", started, note=reason)
        return failed

    def _screen(self, default: Kernel, candidate: Candidate) -> list[Entrant]:
        """The candidate with its gain over torch's own (below 1: it costs), if it passes a few numbers of rows."""
        started = self._trials.start(candidate)
        try:
            kernel = BACKENDS[candidate.backend].prepare(candidate, self._largest)
            prove(kernel, self._target, device=self._device, sizes=A_FEW)
            entrant = Entrant(candidate, dict.fromkeys(self._sizes, kernel), 1.0)
            self._time(default, entrant, SHORT_S)
        except (Wrong, *REFUSALS) as err:
            outcome = "wrong" if isinstance(err, Wrong) else "refused"
            self._trials.report(candidate, "screen", outcome, started, note=first_line(err))
            return []
        entrant.gain = entrant.races[self._target].gain
        us = entrant.races[self._target].us
        self._trials.report(candidate, "screen", "ok", started, us=us, note=f"gain={entrant.gain:.3f} over M={SIZES}")
        return [entrant]

    def _time(self, default: Kernel, entrant: Entrant, budget_s: float) -> None:
        """Race against torch's own at each of SIZES; the means of these races are the race of the target."""
        assert self._bench is not None
        for size in self._sizes:
            if size not in self._stock:
                self._stock[size] = self._bench.arm(str(DEFAULT), default, size)
            arms = self._stock[size], self._bench.arm(str(entrant.candidate), entrant.kernels[size], size)
            for arm in arms:
                for _ in range(self._options.warmup):
                    arm.calls[0]()
            call_us = max(self._clock.us(arm, (0,)) for arm in arms)
            if isinstance(self._clock, GraphClock):
                call_us *= self._clock.launches(arms[1])
            pairs = pairs_for(call_us, budget_s)
            entrant.races[size] = race(*arms, clock=self._clock, pairs=pairs, coin=self._coin)
            self._clock.forget(arms[1])
        entrant.races[self._target] = _together([entrant.races[size] for size in self._sizes])

    def _is_proven(self, default: Kernel, entrant: Entrant) -> bool:
        """Whether it passes the whole proof, the gate at each of SIZES and the last check; if so, keep its binary."""
        candidate, kernel = entrant.candidate, entrant.kernels[self._largest]
        started = self._trials.start(candidate)
        try:
            rows = prove(kernel, self._target, device=self._device, before=lambda: self._trials.start(candidate))
            self._pass_gate(default, entrant)
            self._time(default, entrant, LONG_S)
            proved = self._last_check(default, entrant)
            keep_binary(entrant, BACKENDS[candidate.backend], self._largest)
        except TableError as err:  # the disk refuses, which says nothing about the candidate
            raise TryLater(str(err)) from err
        except (Wrong, *REFUSALS) as err:
            outcome = "wrong" if isinstance(err, Wrong) else "refused"
            self._trials.report(candidate, "verify", outcome, started, note=first_line(err))
            return False
        run = entrant.races[self._target]
        note = f"{rows} rows alike at every M from 1 to {CHAIN_M}; {proved}"
        self._trials.report(candidate, "verify", "ok", started, err=entrant.verdict.err, note=note)
        self._trials.report(candidate, "confirm", "ok", started, us=run.us, note=_by_size(entrant, self._sizes))
        return True

    def _pass_gate(self, default: Kernel, entrant: Entrant) -> None:
        for size in self._sizes:
            verdict = verify(
                size, {entrant.candidate: entrant.kernels[size]}, default, device=self._device,
                before=self._trials.start, options=self._options,
            )[entrant.candidate]  # fmt: skip
            if verdict.outcome != "ok":
                raise Wrong(verdict.note)
            entrant.verdict = verdict

    def _last_check(self, default: Kernel, entrant: Entrant) -> str:
        assert self._bench is not None
        size = self._sizes[1]
        arm = self._bench.arm(str(entrant.candidate), entrant.kernels[size], size)
        asked = Winner(
            size, size, "exact", entrant.candidate, BACKENDS[entrant.candidate.backend], entrant.kernels[size],
            default, arm, self._bench.inputs(size), self._bench.weights,
        )  # fmt: skip
        proved = last_check(asked, device=self._device, call_us=entrant.races[size].us, options=self._options)
        return str(proved)


def _is_needless(candidate: Candidate, passed: Iterable[Entrant]) -> bool:
    """Whether a candidate in blocks of rows only pads more than one that passed and makes the same calls."""
    if candidate.backend != ROWS:
        return False
    kernel = json.loads(candidate.config).get("kernel")
    return any(e.candidate.backend == ROWS and json.loads(e.candidate.config)["kernel"] == kernel for e in passed)


def _together(races: Sequence[Race]) -> Race:
    gain = geometric_mean(r.gain for r in races)
    low, high = min(r.gain_low for r in races), max(r.gain_high for r in races)
    us, baseline_us = (geometric_mean(getattr(r, name) for r in races) for name in ("us", "baseline_us"))
    return Race(us, baseline_us, gain, low, high, min(r.pairs for r in races))


def _by_size(entrant: Entrant, sizes: Iterable[Problem]) -> str:
    races = ((p.m, entrant.races[p]) for p in sizes)
    times = (f"M={m} {duration(race.baseline_us)} to {duration(race.us)}" for m, race in races)
    return f"torch's own to batch-invariant: {', '.join(times)}"
