"""CHILD side: time candidates so that noise cannot pass for a gain.

Weights are cold: every call reads another copy of the weight, and the copies together exceed twice the last-level
cache, as layer after layer does in a model (with a warm weight a bf16 M=1 candidate looked 1.5x and was 1.0x).

A race consists of pairs: baseline and challenger run one right after the other, in random order.  The statistic is the
logarithm of baseline/challenger of each pair.  When both arms are the same kernel, the random order makes its sign
random too, whatever the noise is (drift, bursts, a neighbour's load).  So the level of the signed-rank interval holds
without any assumption about the machine.

Results of both arms are checked during a race, after the time has been taken: a kernel that is seldom wrong, or wrong
from some call on, was not faster at the same work.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import psutil
import torch
from torch import Tensor

from gemmtuned.configs.cpu_wait import CpuWait
from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.child.checks import Watch, Wrong
from gemmtuned.kernels.backends.base import Kernel
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.families.operand import Inputs

COPIES_BYTES: Final = 1536 << 20  # all weight copies together stay below this
MAX_COPIES: Final = 256  # enough for tiny weights, which fit into the cache in a whole model, too
MIN_PAIRS: Final = 6  # with fewer no 95 % interval exists: 2 x 0.5^6 = 3 %
MAX_PAIRS: Final = 60
BURST_US: Final = 20.0  # shorter calls are timed several at a time, since clock and loop take 0.1 us
_UNTOLD_CACHE_BYTES: Final = 32 << 20
_Z95: Final = 1.959964


@dataclass(slots=True, eq=False)
class Arm:
    """A candidate ready to be timed: calls[i] runs it once, on copy i of the weight.

    watch: checks results between readings, once the right ones are known.
    """

    name: str
    calls: Sequence[Callable[[], object]]
    watch: Watch | None = None

    def look(self, y: object) -> None:
        """Raises CandidateFailed when a result of one of the calls is wrong."""
        if self.watch is not None:
            try:
                self.watch.look(y, "while it was raced")
            except Wrong as err:
                raise CandidateFailed(f"{self.name}: {err}") from err


class Clock(Protocol):
    """Measures the time of calls; tests use one with made-up times."""

    def us(self, arm: Arm, copies: Sequence[int]) -> float:
        """Microseconds a call, over one call on each of these weight copies.

        Raises CandidateFailed when the arm's watch finds a result wrong.
        """

    def forget(self, arm: Arm) -> None:
        """Free what was kept for this arm, which is not timed again."""


class WallClock:
    """The clock for CPUs, where a call has finished when it returns."""

    def __init__(self) -> None:
        self._wait = CpuWait()

    def us(self, arm: Arm, copies: Sequence[int]) -> float:
        """As Clock.us."""
        calls = [arm.calls[i] for i in copies]
        begin = time.perf_counter_ns()
        for call in calls[:-1]:
            call()
        last = calls[-1]()
        us = (time.perf_counter_ns() - begin) / 1e3 / len(calls)
        arm.look(last)
        return us

    def forget(self, arm: Arm) -> None:
        """Nothing is kept."""

    def waited_s(self) -> float | None:
        """As CpuWait.waited_s."""
        return self._wait.waited_s()


@dataclass(frozen=True, slots=True)
class Race:
    """The result of a race: medians in us; gain = baseline/challenger with its 95 % interval."""

    us: float
    baseline_us: float
    gain: float
    gain_low: float
    gain_high: float
    pairs: int


class Bench:
    """A problem's inputs in memory, shared by all candidates: activations once, and cold copies of the weights."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        family = family_of(problem)
        free = free_bytes(device)
        count = copies_needed(problem, last_level_cache_bytes(device), free)
        self.weights = family.weight_copies(problem, count=count, device=device)
        self._device = device
        self._inputs: dict[tuple[Problem, int], Inputs] = {}

    def arm(self, name: str, kernel: Kernel, problem: Problem, seed: int = 0) -> Arm:
        """This kernel bound to every weight copy, with X of `problem` (any M); packing happens here, untimed.

        seed: of the activations.
        """
        activations = self.inputs(problem, seed).activations

        def bound(weights: tuple[Tensor, ...]) -> Callable[[], object]:
            run = kernel.bind(*weights)
            return lambda: run(*activations)

        return Arm(name, [bound(weights) for weights in self.weights])

    def inputs(self, problem: Problem, seed: int = 0) -> Inputs:
        """Activations and the first weights, the same for all arms: another address can cost a few per cent."""
        inputs = self._inputs.get((problem, seed))
        if inputs is None:
            make = family_of(problem).make
            inputs = make(problem, kind="randn", seed=seed, device=self._device, weights=self.weights[0])
            self._inputs[problem, seed] = inputs
        return inputs


def copies_needed(problem: Problem, cache_bytes: int, free_bytes: int) -> int:
    """How many weight copies make every read cold: more than twice the cache and at least 3, if memory allows."""
    one = max(family_of(problem).weight_bytes(problem), 1)
    kinds = 2 if problem.weight_state == "packed" else 1  # each copy is kept packed and plain
    allowed = min(COPIES_BYTES, free_bytes // 4) // (one * kinds)
    wanted = max(3, 2 * cache_bytes // one + 1)
    return max(1, min(wanted, allowed, MAX_COPIES))


def free_bytes(device: torch.device) -> int:
    """Memory that this process may still take: what is free, but no more than its cap beside a loaded program."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    capped = int(torch.cuda.get_per_process_memory_fraction(index) * total) - torch.cuda.memory_reserved(index)
    return min(free, max(capped, 0))


def last_level_cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache; 32 MiB where the machine does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size) or _UNTOLD_CACHE_BYTES
    text = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    sizes = [int(t[:-1]) << {"K": 10, "M": 20, "G": 30}[t[-1]] for t in text if t[:-1].isdigit() and t[-1] in "KMG"]
    return max(sizes, default=_UNTOLD_CACHE_BYTES)


def time_alone(arm: Arm, *, clock: Clock, rounds: int) -> float:
    """Median us of `rounds` calls of one arm, each on the next weight copy."""
    with _no_collection():
        return statistics.median(clock.us(arm, (i % len(arm.calls),)) for i in range(rounds))


def race(
    baseline: Arm,
    challenger: Arm,
    *,
    clock: Clock,
    pairs: int,
    coin: random.Random,
    burst: int = 1,
    least: int = 0,
    far: float = 0.0,
) -> Race:
    """Time both arms in `pairs` pairs of `burst` calls per arm. The module's text says why that is fair.

    far: for screening; the race ends after `least` pairs if baseline/challenger was below far in each of them.  A race
    that decides has no `far`: the interval's level needs a number of pairs that does not depend on their times.
    """
    # calls of both arms go through the copies in turn, so that none is read again before all others were
    copies = itertools.cycle(range(len(baseline.calls)))
    ours: list[float] = []
    theirs: list[float] = []
    with _no_collection():
        for _ in range(pairs):
            arms = [(baseline, theirs), (challenger, ours)]
            if coin.random() < 0.5:
                arms.reverse()
            for arm, times in arms:
                times.append(clock.us(arm, tuple(itertools.islice(copies, burst))))
            if len(ours) == least and all(t < far * o for t, o in zip(theirs, ours, strict=True)):
                break
    logs = [math.log(max(t, 1e-6) / max(o, 1e-6)) for t, o in zip(theirs, ours, strict=True)]
    middle, low, high = signed_rank_interval(logs)
    return Race(
        statistics.median(ours), statistics.median(theirs), math.exp(middle), math.exp(low), math.exp(high), len(ours)
    )


def pairs_for(call_us: float, budget_s: float, *, least: int = MIN_PAIRS, most: int = MAX_PAIRS) -> int:
    """How many pairs of such calls fit a budget, but at least `least`, however long the calls take."""
    return int(min(most, max(least, budget_s * 1e6 / (2 * max(call_us, BURST_US)))))


def burst_for(call_us: float) -> int:
    """How many calls to time together, so that one reading takes at least BURST_US."""
    return max(1, min(16, math.ceil(BURST_US / max(call_us, 0.1))))


def signed_rank_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(middle, low, high): Hodges-Lehmann estimate and 95 % interval of the centre of symmetric values.

    Inverts Wilcoxon's signed-rank test: the interval's ends are the k-th smallest and largest of the means of all
    pairs.  Outliers move it little.  Below MIN_PAIRS values the interval is unbounded.
    """
    n = len(values)
    means = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2))
    middle = statistics.median(means)
    k = math.floor(n * (n + 1) / 4 - _Z95 * math.sqrt(n * (n + 1) * (2 * n + 1) / 24))
    if n < MIN_PAIRS or k < 1:
        return middle, -math.inf, math.inf
    return middle, means[k - 1], means[-k]


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
