"""CHILD side: one more check of the winner of all races, for faults that are late, rare, or need threads or sizes.

By now its kernel has been called some hundred times, and the results of its races were compared (checks.Watch).  The
parts of the check, in order:

    closures    the same closures that raced, with several weight copies, then with X, bias and weight edited
    sizes       a bucket is installed for all its sizes but was proven at three: as many as time allows are tried, with
                each remainder of M by 16 among them, since tiles end there
    threads     one closure in two threads, and two closures, each with its own inputs (on a CPU only: a GPU's launches
                follow one another on a stream)
    often       as many calls as fit a given time, with changing inputs, some results kept and others dropped at once,
                and a few more calls after a pause.  On a CPU, where large calls take long, half of that time goes to a
                small problem of the same candidate, which is verified first: a fault in one of N calls at every size
                is found in n calls with a probability of 1 - (1 - 1/N)^n.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.padding import fine_step
from gemmtuned.configs.passing import lack_in, lack_of
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.child.checks import (
    Case,
    Watch,
    Wrong,
    apart_on_others,
    case_of,
    check_case,
    check_near,
    same_bits,
)
from gemmtuned.daemon.child.measure import Arm
from gemmtuned.daemon.child.verify import REFUSALS, first_line, verify
from gemmtuned.daemon.protocol.options import SearchOptions
from gemmtuned.kernels.backends.base import Backend, Kernel, Run
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.families.error import held_to
from gemmtuned.kernels.families.operand import Inputs, Sample, negate_, negated

OFTEN_S: Final = 0.3  # for the many calls, at both sizes together
THREADS_S: Final = 0.1  # for calls from two threads at a time
SIZES_S: Final = 0.2  # for sizes of a bucket beyond those with each remainder by 16
LEAST_CALLS: Final = 3  # are made in any case
SMALL_US: Final = 30.0  # a problem whose calls take less needs no smaller one
THREADS_US: Final = 10_000.0  # where calls take longer, two threads call the smaller one
_WIDENED: Final = 1 << 22  # elements of W widened to fp64 at once
_CLOSURES: Final = 8  # closures over weight copies that are called once more, at most: all were checked in the races
_CLOSURES_US: Final = 2e5  # for these calls, but two closures are called in any case
_KEPT_BYTES: Final = 8 << 20  # results kept at a time
_KEPT: Final = 64
PAUSE_S: Final = 0.2  # before the few more calls
_SWITCH_S: Final = 1e-5  # Python's switch interval while two threads call a kernel
_YIELDING: Final = 0.3  # share of a kernel's lines of Python after which the other thread may run
_YIELD_S: Final = 2e-5
_REMAINDERS: Final = 16


@dataclass(frozen=True, slots=True)
class Proved:
    """How many calls of the winner were compared, at its own size and at a smaller one."""

    calls: int
    small_calls: int

    def __str__(self) -> str:
        return f"calls={self.calls} small_calls={self.small_calls}"


@dataclass(frozen=True, slots=True)
class Winner:
    """The winner: the problem it raced at, the one it is filed under, and its arm with the operands it raced on."""

    problem: Problem
    target: Problem
    covers: str
    candidate: Candidate
    backend: Backend
    kernel: Kernel
    default: Kernel
    arm: Arm
    inputs: Inputs
    weights: Sequence[tuple[Tensor, ...]]


def last_check(
    winner: Winner, *, device: torch.device, call_us: float, options: SearchOptions, sizes: Sequence[int] = ()
) -> Proved:
    """Run all parts of the check. sizes: those of the bucket that were proven already.

    Runs under the caller's switches, as verify does.  Raises Wrong, or what the kernel raises.
    """
    case = _check_closures(winner, device, options, max(2, min(_CLOSURES, int(_CLOSURES_US / max(call_us, 1.0)))))
    if winner.covers != "exact":
        _check_sizes(winner, case, device, sizes)
    own = Subject(winner.problem, winner.kernel, winner.default, winner.weights[0], case.apart_by_rms)
    small = None if device.type != "cpu" or call_us <= SMALL_US else _smaller(winner, device)
    if device.type == "cpu":
        check_threads(small if small is not None and call_us > THREADS_US else own, THREADS_S)
    each_s = OFTEN_S if small is None else OFTEN_S / 2
    return Proved(check_often(own, each_s), 0 if small is None else check_often(small, each_s))


def _check_closures(winner: Winner, device: torch.device, options: SearchOptions, count: int) -> Case:
    inputs, calls = winner.inputs, winner.arm.calls
    held = held_to(winner.problem, winner.kernel)
    case = case_of(held, winner.default, inputs, _narrow(winner.problem, device))
    check_case(case, options, lambda *activations: calls[0]())  # type: ignore[arg-type]
    watch = Watch(case.stock, case.apart)
    for call in calls[1 :: max(1, -(-(len(calls) - 1) // (count - 1)))]:
        watch.look(call(), "after the races")
    for number in dict.fromkeys((0, len(calls) - 1) if count > 2 else (0,)):
        weights = winner.weights[number]
        edited = [t for o, t in inputs if o.line_axis and not o.weight and o.can_be_negated(t)]
        if winner.problem.weight_state != "packed":
            of_weights = [o for o, _ in inputs if o.weight]
            edited += [t for o, t in zip(of_weights, weights, strict=True) if o.can_be_negated(t)]
        for operand in edited:
            with _negated(operand):
                y = calls[number]()
                stock = winner.default.bind(*weights)(*inputs.activations)
                assert isinstance(y, Tensor)
                check_near(y, stock, case.apart, "operand edited after the races")
    return case


@contextmanager
def _negated(operand: Tensor) -> Iterator[None]:
    negate_(operand)
    try:
        yield
    finally:
        negate_(operand)


def _check_sizes(winner: Winner, case: Case, device: torch.device, proven: Sequence[int]) -> None:
    """One closure, prepared as in a program, is right at the proven sizes and at more, called in a mixed order."""
    largest, family = winner.target, family_of(winner.target)
    kernel = winner.backend.prepare(winner.candidate, largest)
    inputs = family.make(largest, kind="randn", seed=4, device=device, weights=case.inputs.weights)
    stock = inputs.run(winner.default)
    run = kernel.bind(*inputs.weights)
    must, may = further_sizes(largest, proven)
    end_s = time.monotonic() + SIZES_S
    for number, m in enumerate((*must, *may)):
        if number >= len(must) and time.monotonic() > end_s:
            break
        rows = family.rows(largest.with_m(m), inputs, torch.arange(m, device=device))
        try:
            y = run(*rows)
        except REFUSALS as err:
            if lack_of(err) or not _refuses(winner.default, inputs, rows):
                raise
            continue  # no program can call it: block scales at M = 1, for example
        check_near(y, stock[..., :m, :].contiguous(), case.apart, f"at M = {m} of its bucket")


def _refuses(kernel: Kernel, inputs: Inputs, activations: Sequence[Tensor | None]) -> bool:
    try:
        kernel.bind(*inputs.weights)(*activations)
    except REFUSALS:
        return True
    return False


def further_sizes(largest: Problem, proven: Sequence[int]) -> tuple[list[int], list[int]]:
    """(sizes that must be tried, sizes that may) of the fine bucket that ends there, shuffled by the problem.

    Those that must be are its ends, those proven so far, and one with each remainder by 16.
    """
    low = max(1, largest.m - fine_step(largest.m) + 1)
    mixed = list(range(low, largest.m + 1))
    random.Random(str(largest)).shuffle(mixed)  # noqa: S311
    by_remainder = {m % _REMAINDERS: m for m in (*mixed, low, largest.m, *proven)}
    must = {low, largest.m, *proven, *by_remainder.values()}
    return [m for m in mixed if m in must], [m for m in mixed if m not in must]


def _smaller(winner: Winner, device: torch.device) -> Subject | None:
    """A small problem with the same tails, with the candidate's verified kernel for it; None if there is none."""
    p = winner.problem
    small = replace(p, batch=min(p.batch, 2), m=_cut(p.m, 16), n=_cut(p.n, 32), k=_cut(p.k, 64))
    try:
        kernel = winner.backend.prepare(winner.candidate, small)
    except REFUSALS as err:
        if lack_of(err):
            raise
        return None
    verdict = verify(small, {winner.candidate: kernel}, winner.default, device=device)[winner.candidate]
    if verdict.outcome == "refused":
        if lack_in(verdict.note):  # the check is still to be made
            raise CandidateFailed(f"at a smaller size: {verdict.note}")
        return None
    if verdict.outcome != "ok":
        raise Wrong(f"at a smaller size: {verdict.note}")
    return Subject.of(small, kernel, winner.default, device)


def _cut(size: int, least: int) -> int:
    """A size from `least` to twice that with the same remainder."""
    return size if size < 2 * least else least + size % least


def _narrow(problem: Problem, device: torch.device) -> Sample:
    """As Family.sample, with fewer columns, because less memory is free after the races."""
    wide = family_of(problem).sample(problem, seed=0, device=device)
    width = max(_WIDENED // (problem.k * problem.batch), 16)
    return Sample(wide.rows, wide.cols[:: max(1, len(wide.cols) // width)])


@dataclass(frozen=True, slots=True)
class _Known:
    """Inputs and their right result."""

    inputs: Inputs
    stock: Tensor


def _known(problem: Problem, default: Kernel, weights: tuple[Tensor, ...], seed: int) -> _Known:
    make = family_of(problem).make
    inputs = make(problem, kind="randn", seed=seed, device=weights[0].device, weights=weights)
    return _Known(inputs, inputs.run(default))


@dataclass(frozen=True, slots=True)
class Subject:
    """A kernel, its problem, weights, and how far from the default's its results may be."""

    problem: Problem
    kernel: Kernel
    default: Kernel
    weights: tuple[Tensor, ...]
    apart_by_rms: float

    @classmethod
    def of(cls, problem: Problem, kernel: Kernel, default: Kernel, device: torch.device) -> Subject:
        """Make a subject with weights of its own."""
        inputs = family_of(problem).make(problem, kind="randn", seed=20, device=device)
        case = case_of(held_to(problem, kernel), default, inputs, _narrow(problem, device))
        return cls(problem, kernel, default, inputs.weights, case.apart_by_rms)


def check_often(subject: Subject, seconds: float) -> int:
    """Call one closure for so long, at least LEAST_CALLS times, and again after a pause; how many calls were compared.

    Two inputs alternate at random.  Results live for up to 64 calls, and the first one to the end, which a closure
    that reuses a few buffers would overwrite.
    """
    one, two = (_known(subject.problem, subject.default, subject.weights, seed) for seed in (21, 22))
    run = subject.kernel.bind(*subject.weights)
    first, second = one.inputs.activations, two.inputs.activations
    kept = run(*one.inputs.having(x=negated(one.inputs["x"])).activations)
    as_given = kept.clone()
    watches = [Watch(each.stock, apart_on_others(subject.apart_by_rms, each.stock)) for each in (one, two)]
    at_once = max(1, min(_KEPT, _KEPT_BYTES // max(one.stock.nbytes, 1)))
    draw = random.Random(len(as_given))  # noqa: S311
    calls, span = 0, _Span(seconds)
    while calls < LEAST_CALLS or not span.is_over():
        turns = [draw.random() < 0.5 for _ in range(draw.randint(1, at_once))]
        results = [run(*second) if turn else run(*first) for turn in turns]
        for turn, y in zip(turns, results, strict=True):
            calls += 1
            watches[turn].look(y, f"call {calls} of many")
    del results
    time.sleep(PAUSE_S)
    for number in range(LEAST_CALLS):
        watches[0].look(run(*first), f"call {number + 1} after a pause of {PAUSE_S:g} s")
    if not same_bits(kept, as_given):
        raise Wrong(f"its first result was overwritten by one of {calls} later calls")
    return calls


_tracing = threading.Lock()  # Python refuses a trace function while another thread installs one


def check_threads(subject: Subject, seconds: float) -> None:
    """Call from two threads at a time, first one closure, then two closures of two weights."""
    kernel, weights = subject.kernel, subject.weights
    others = (negated(weights[0]), *weights[1:])
    one, two = (_known(subject.problem, subject.default, weights, seed) for seed in (31, 32))
    other = _known(subject.problem, subject.default, others, 33)
    shared = kernel.bind(*weights)
    for name, calls in (
        ("one closure in two threads", ((shared, one), (shared, two))),
        ("two closures in two threads", ((shared, one), (kernel.bind(*others), other))),
    ):
        for lines_yield in (False, True):
            _together(
                name,
                [_caller(run, known, subject.apart_by_rms, seconds / 4, name, lines_yield) for run, known in calls],
            )


def _caller(
    run: Run, known: _Known, apart_by_rms: float, seconds: float, name: str, lines_yield: bool
) -> Callable[[], None]:
    """lines_yield: some lines of Python that the kernel runs first let the other thread run."""
    watch = Watch(known.stock, apart_on_others(apart_by_rms, known.stock))
    draw = random.Random(name)  # noqa: S311

    def give_way(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and draw.random() < _YIELDING:
            time.sleep(_YIELD_S)
        return give_way

    def call() -> None:
        calls, span = 0, _Span(seconds)
        with torch.inference_mode():  # the switch is per thread
            while calls < 3 or not span.is_over():
                calls += 1
                with _tracing:
                    sys.settrace(give_way if lines_yield else None)
                try:
                    y = run(*known.inputs.activations)
                finally:
                    with _tracing:
                        sys.settrace(None)
                watch.look(y, name)

    return call


class _Span:
    """A limit in seconds of this thread's CPU time; on a machine that others use, up to five times as long."""

    def __init__(self, seconds: float) -> None:
        self._used_s, self._end_s = time.thread_time() + seconds, time.monotonic() + 5 * seconds

    def is_over(self) -> bool:
        """Whether the time is over."""
        return time.thread_time() > self._used_s or time.monotonic() > self._end_s


def _together(name: str, callers: Sequence[Callable[[], None]]) -> None:
    """Run these in two threads; raises Wrong with the first error: alone, the kernel had none."""
    failed: list[Exception] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as err:
            failed.append(err)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in callers]
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    for err in failed:
        if isinstance(err, Wrong) or lack_of(err):
            raise err
        raise Wrong(f"{name}: {first_line(err)}") from err
