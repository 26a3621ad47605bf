"""CHILD side: the winner of all races is looked at once more, for what shows late, seldom, between threads or sizes.

By now its kernel has been called some hundred times, and every one of its races' readings was compared (checks.Watch).
In this order:

    closures    the very closures that raced, each weight copy's, then with X, bias and weight edited under them
    sizes       a bucket is installed for all its sizes and was proven at three: all that its time allows are tried,
                each remainder of M by 16 among them, which is where tiles end
    threads     one closure in two threads, and two closures, each with its own inputs (on a CPU; a GPU's launches
                follow one another on a stream)
    often       many calls, in time that is given and not in number, results kept for some calls and dropped at once,
                the inputs changing.  Half of that time goes to a small problem of the same candidate (on a CPU, where
                large calls take long), which is verified first as any other is: what is wrong once in N calls at
                every size is found in n of them with a probability of 1 - (1 - 1/N)^n.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.padding import fine_step
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.checks import Case, Watch, Wrong, case_of, check_case, check_near, same_bits
from gemmtuned.daemon.measure import Arm
from gemmtuned.daemon.options import SearchOptions
from gemmtuned.daemon.verify import REFUSALS, first_line, verify
from gemmtuned.kernels.backends.base import Backend, Kernel, Run
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.families.base import Inputs, lay_out

OFTEN_S: Final = 0.3  # for calls that are compared, at both sizes together
THREADS_S: Final = 0.1  # for calls from two threads at a time
SIZES_S: Final = 0.2  # for sizes of a bucket beyond those with each remainder by 16
LEAST_CALLS: Final = 8  # however long they take
SMALL_US: Final = 200.0  # a problem whose calls take less needs no smaller one
_KEPT_BYTES: Final = 8 << 20  # results kept at a time
_KEPT: Final = 16
_SWITCH_S: Final = 1e-5  # Python changes threads so often while two of them call a kernel
_REMAINDERS: Final = 16


@dataclass(frozen=True, slots=True)
class Proved:
    """How many calls of the winner were compared in the end: at its own size, and at a smaller one."""

    calls: int
    small_calls: int

    def __str__(self) -> str:
        return f"calls={self.calls} small_calls={self.small_calls}"


@dataclass(frozen=True, slots=True)
class Winner:
    """What won: the problem it raced at, the one it is filed under, and its arm with the operands it raced on."""

    problem: Problem
    target: Problem
    covers: str
    candidate: Candidate
    backend: Backend
    kernel: Kernel
    default: Kernel
    arm: Arm
    inputs: Inputs
    weights: Sequence[Tensor]


def last_check(
    winner: Winner, *, device: torch.device, call_us: float, options: SearchOptions, sizes: Sequence[int] = ()
) -> Proved:
    """All of the above; sizes: those of the bucket that were proven already.

    Runs under the caller's switches, as verify does.  Raises Wrong, or what the kernel raises.
    """
    case = _check_closures(winner, device, options)
    if winner.covers != "exact":
        _check_sizes(winner, case, device, sizes)
    small = None if device.type != "cpu" or call_us <= SMALL_US else _smaller(winner, device)
    if device.type == "cpu":
        one = (
            small if small is not None and call_us > 50 * SMALL_US else (winner.problem, winner.kernel, winner.default)
        )
        check_threads(*one, device=device, seconds=THREADS_S)
    each_s = OFTEN_S if small is None else OFTEN_S / 2
    calls = check_often(winner.problem, winner.kernel, winner.default, device=device, seconds=each_s)
    return Proved(calls, 0 if small is None else check_often(*small, device=device, seconds=each_s))


def _check_closures(winner: Winner, device: torch.device, options: SearchOptions) -> Case:
    sample = family_of(winner.problem).sample(winner.problem, seed=0, device=device)
    inputs, calls = winner.inputs, winner.arm.calls
    case = case_of(winner.problem, winner.default, inputs, sample)
    check_case(case, options, lambda a, bias: calls[0]())  # type: ignore[arg-type,return-value]
    watch = Watch(case.stock, case.apart)
    for call in calls:
        watch.look(call(), "after the races")
    for number in dict.fromkeys((0, len(calls) - 1)):
        weight = winner.weights[number]
        edited = [t for t in (inputs.a, inputs.bias, weight) if t is not None]
        if winner.problem.weight_state != "plain":
            edited.pop()
        for operand in edited:
            with _negated(operand):
                y = calls[number]()
                stock = winner.default.bind(weight)(inputs.a, inputs.bias)
                assert isinstance(y, Tensor)
                check_near(y, stock, case.apart, "operand edited after the races")
    return case


@contextmanager
def _negated(operand: Tensor) -> Iterator[None]:
    operand.neg_()
    try:
        yield
    finally:
        operand.neg_()


def _check_sizes(winner: Winner, case: Case, device: torch.device, proven: Sequence[int]) -> None:
    """One closure, prepared as a program's is, at the sizes that were proven and at more of them, in a mixed order."""
    largest = winner.target
    kernel = winner.backend.prepare(winner.candidate, largest)
    inputs = family_of(largest).make(largest, kind="randn", seed=4, device=device, weight=case.inputs.b)
    stock = winner.default.bind(inputs.b)(inputs.a, inputs.bias)
    run = kernel.bind(inputs.b)
    must, may = further_sizes(largest, proven)
    end_s = time.monotonic() + SIZES_S
    for number, m in enumerate((*must, *may)):
        if number >= len(must) and time.monotonic() > end_s:
            break
        bias = inputs.bias
        if bias is not None and family_of(largest).adds:
            bias = bias[..., :m, :].contiguous()
        y = run(lay_out(inputs.a[..., :m, :], largest.layout[0])[0], bias)
        check_near(y, stock[..., :m, :].contiguous(), case.apart, f"at M = {m} of its bucket")


def further_sizes(largest: Problem, proven: Sequence[int]) -> tuple[list[int], list[int]]:
    """(sizes of the fine bucket that ends there which must be tried, those that may), in an order of the problem's own.

    The former are its ends, those proven so far, and one with each remainder by 16.
    """
    low = max(1, largest.m - fine_step(largest.m) + 1)
    mixed = list(range(low, largest.m + 1))
    random.Random(str(largest)).shuffle(mixed)  # noqa: S311
    by_remainder = {m % _REMAINDERS: m for m in (*mixed, low, largest.m, *proven)}
    must = {low, largest.m, *proven, *by_remainder.values()}
    return [m for m in mixed if m in must], [m for m in mixed if m not in must]


def _smaller(winner: Winner, device: torch.device) -> tuple[Problem, Kernel, Kernel] | None:
    """A small problem with the same tails, and the candidate's kernel for it, verified; None where it has none."""
    p = winner.problem
    small = replace(p, batch=min(p.batch, 2), m=_cut(p.m, 16), n=_cut(p.n, 32), k=_cut(p.k, 64))
    try:
        kernel = winner.backend.prepare(winner.candidate, small)
    except REFUSALS:
        return None
    verdict = verify(small, {winner.candidate: kernel}, winner.default, device=device)[winner.candidate]
    if verdict.outcome == "refused":
        return None
    if verdict.outcome != "ok":
        raise Wrong(f"at a smaller size: {verdict.note}")
    return small, kernel, winner.default


def _cut(size: int, least: int) -> int:
    """A size from `least` to twice that with the same remainder."""
    return size if size < 2 * least else least + size % least


@dataclass(frozen=True, slots=True)
class _Known:
    """Inputs, and what is to come out."""

    a: Tensor
    bias: Tensor | None
    stock: Tensor
    apart: float


def _known(
    problem: Problem, default: Kernel, device: torch.device, weight: Tensor | None, seed: int
) -> tuple[Tensor, _Known]:
    family = family_of(problem)
    inputs = family.make(problem, kind="randn", seed=seed, device=device, weight=weight)
    case = case_of(problem, default, inputs, family.sample(problem, seed=seed, device=device))
    return inputs.b, _Known(inputs.a, inputs.bias, case.stock, case.apart)


def check_often(problem: Problem, kernel: Kernel, default: Kernel, *, device: torch.device, seconds: float) -> int:
    """Call one closure for so long, LEAST_CALLS times at least; how many calls were compared.

    Two inputs take turns at random, results live for up to 16 calls, and the first one to the end: a closure that
    hands out the same few buffers again and again overwrites it.
    """
    b, one = _known(problem, default, device, None, 21)
    _, two = _known(problem, default, device, b, 22)
    run = kernel.bind(b)
    kept = run(-one.a, one.bias)
    as_given = kept.clone()
    watches = [Watch(each.stock, 2 * each.apart) for each in (one, two)]
    at_once = max(1, min(_KEPT, _KEPT_BYTES // max(one.stock.nbytes, 1)))
    draw = random.Random(len(as_given))  # noqa: S311
    calls, end_s = 0, time.monotonic() + seconds
    while calls < LEAST_CALLS or time.monotonic() < end_s:
        turns = [draw.random() < 0.5 for _ in range(draw.randint(1, at_once))]
        results = [run(two.a, two.bias) if turn else run(one.a, one.bias) for turn in turns]
        for turn, y in zip(turns, results, strict=True):
            calls += 1
            watches[turn].look(y, f"call {calls} of many")
    if not same_bits(kept, as_given):
        raise Wrong(f"its first result was overwritten by one of {calls} later calls")
    return calls


def check_threads(problem: Problem, kernel: Kernel, default: Kernel, *, device: torch.device, seconds: float) -> None:
    """Two threads at a time: first with one closure, then with two closures of two weights."""
    b, one = _known(problem, default, device, None, 31)
    _, two = _known(problem, default, device, b, 32)
    other_b, other = _known(problem, default, device, None, 33)
    shared = kernel.bind(b)
    for name, calls in (
        ("one closure in two threads", ((shared, one), (shared, two))),
        ("two closures in two threads", ((shared, one), (kernel.bind(other_b), other))),
    ):
        _together(name, [_caller(run, known, seconds / 2, name) for run, known in calls])


def _caller(run: Run, known: _Known, seconds: float, name: str) -> Callable[[], None]:
    watch = Watch(known.stock, 2 * known.apart)

    def call() -> None:
        end_s, calls = time.monotonic() + seconds, 0
        with torch.inference_mode():  # a thread's own switch
            while calls < 3 or time.monotonic() < end_s:
                calls += 1
                watch.look(run(known.a, known.bias), name)

    return call


def _together(name: str, callers: Sequence[Callable[[], None]]) -> None:
    """Raises Wrong with what the first that failed met: whatever it raised, alone it did not."""
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
        raise err if isinstance(err, Wrong) else Wrong(f"{name}: {first_line(err)}") from err
