"""CHILD side: is a candidate's result as good as the default's, on every input that is known to expose kernels' faults?

For every candidate, three seeds of every kind of inputs (kernels/families/base.py) are compared with an exact fp64
result on sampled rows, and with the default's result everywhere.  Then come single checks, each for a known fault:
 - checks.py: output that was not written, reads and writes beside the operands, writes beside the result, a result in
   memory that the next call overwrites, results that differ from call to call;
 - kernels/families/edits.py: X, weight and bias edited under one bound closure, which exposes what it keeps from an
   earlier call; and zero rows, 1e30, 1e-30, NaN and Inf;
 - surroundings.py: what surrounds a call, such as shared memory, gradients and autocast.

Faults that are rare, late, or need several threads take many calls to find: the races look for them (measure.py), and
the last check of the one candidate that has won (last_check.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from subprocess import SubprocessError
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.passing import with_lack
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.child.checks import (
    Bound,
    Case,
    Infinite,
    Rejected,
    Wrong,
    apart_on_others,
    case_of,
    check_beside_result,
    check_case,
    check_fresh,
    check_padded,
    check_poisoned,
    check_repeats,
    check_same_closure,
    check_untouched,
    other_inputs,
)
from gemmtuned.daemon.child.surroundings import surroundings
from gemmtuned.daemon.protocol.options import DEFAULTS, SearchOptions
from gemmtuned.kernels.backends.base import Kernel
from gemmtuned.kernels.dtypes import UNIT_ROUNDOFF
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.families.base import PADDED, SAMPLED_WEIGHTS
from gemmtuned.kernels.families.edits import Edit, edits, holding, patterns, up_to_the_largest
from gemmtuned.kernels.families.error import Error, held_to
from gemmtuned.kernels.families.operand import Inputs

SEEDS: Final = (1, 2, 3)
# Above these each seed has one kind of inputs instead of all three, since a case takes a second
LARGE_FLOPS: Final = 2e10
LARGE_WEIGHTS: Final = SAMPLED_WEIGHTS
THOROUGH_FLOPS: Final = 5e7  # up to here (about a millisecond of two cores) all edits; above, at a smaller size
# What a backend may raise when it cannot run a problem (torch: mostly RuntimeError)
REFUSALS: Final = (
    RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, MemoryError,
    OSError, ImportError, SyntaxError, SubprocessError, CandidateFailed,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Checked:
    """outcome: ok, wrong, refused (it raised) or rejected (outside the tolerance asked for); note says why.

    err: the largest error r seen; baseline_err: the default's.  err_ratio: largest share of elements outside AITER's
    tolerance.  apart_by_rms: how far from the default's any result on inputs of about 1 may be, by the RMS of the
    default's.
    """

    outcome: str
    err: float | None
    baseline_err: float
    note: str = ""
    err_ratio: float | None = None
    apart_by_rms: float = math.inf


_Check = Callable[[Kernel], "tuple[Error, float] | Tensor | None"]  # raises Wrong


def verify(
    problem: Problem,
    kernels: Mapping[Candidate, Kernel],
    default: Kernel,
    *,
    device: torch.device,
    before: Callable[[Candidate], object] = lambda candidate: None,
    options: SearchOptions = DEFAULTS,
) -> dict[Candidate, Checked]:
    """A verdict on every candidate; `before` is called with each candidate before it runs.

    Runs under the caller's switches (kernels/torch_flags.py).  Raises CandidateFailed when the default itself fails.
    """
    if problem.out_dtype not in UNIT_ROUNDOFF:
        return {
            c: Checked("refused", None, 0.0, f"{problem} {c}: no error limits for {problem.out_dtype}") for c in kernels
        }
    held: dict[Problem, dict[Candidate, Kernel]] = {}
    for candidate, kernel in kernels.items():
        held.setdefault(held_to(problem, kernel), {})[candidate] = kernel
    found = {}
    for to, group in held.items():
        found.update(_verified(to, group, default, device, before, options))
    return {candidate: found[candidate] for candidate in kernels}


def _verified(
    problem: Problem,
    kernels: Mapping[Candidate, Kernel],
    default: Kernel,
    device: torch.device,
    before: Callable[[Candidate], object],
    options: SearchOptions,
) -> dict[Candidate, Checked]:
    """As verify, by the limits of `problem` for all of them."""
    verdicts: dict[Candidate, Checked] = {}
    worst, mismatch = dict.fromkeys(kernels, 0.0), dict.fromkeys(kernels, 0.0)
    baseline, apart_by_rms = 0.0, 0.0
    announced: Candidate | None = None
    measured: Case | None = None
    try:
        for case, check in _checks(problem, default, device, options):
            if case is not measured:
                measured, baseline = case, max(baseline, case.default.r)
                apart_by_rms = max(apart_by_rms, case.apart_by_rms if case.inputs.kind == "randn" else 0.0)
            for candidate, kernel in kernels.items():
                if candidate in verdicts:
                    continue
                if candidate != announced:
                    before(candidate)
                    announced = candidate
                try:
                    found = check(kernel)
                    if isinstance(found, tuple):
                        worst[candidate] = max(worst[candidate], found[0].r)
                        mismatch[candidate] = max(mismatch[candidate], found[1])
                except Wrong as err:
                    outcome = "rejected" if isinstance(err, Rejected) else "wrong"
                    verdicts[candidate] = Checked(outcome, None, baseline, f"{problem} {candidate}: {err}")
                except REFUSALS as err:
                    verdicts[candidate] = Checked(
                        "refused", None, baseline, f"{problem} {candidate}: {first_line(err)}"
                    )
            if len(verdicts) == len(kernels):
                break
    except REFUSALS as err:
        raise CandidateFailed(f"{problem}: torch's own kernel fails: {first_line(err)}") from err
    return {c: verdicts.get(c) or Checked("ok", worst[c], baseline, "", mismatch[c], apart_by_rms) for c in kernels}


def default_error(problem: Problem, default: Kernel, *, device: torch.device) -> float:
    """The default's error r on one set of randn inputs; 0 for dtypes without limits."""
    if problem.out_dtype not in UNIT_ROUNDOFF:
        return 0.0
    return next(_cases(problem, default, device)).default.r


def first_line(err: BaseException) -> str:
    """Type and first line of an exception, since torch's messages run over pages; and what it was short of."""
    lines = str(err).strip().splitlines()
    return with_lack(f"{type(err).__name__}: {lines[0][:300]}" if lines else type(err).__name__, err)


def _checks(
    problem: Problem, default: Kernel, device: torch.device, options: SearchOptions
) -> Iterator[tuple[Case, _Check]]:
    """The checks, made one at a time, since the weights of large layers would not fit into memory together."""
    for number, case in enumerate(_cases(problem, default, device)):
        if number == 0:  # before the others, whose operands a kernel that edits them would spoil
            yield case, partial(check_untouched, case.inputs)
        yield case, partial(_check_case, case, options)
        if number == 0:
            for check in _single_checks(problem, default, case, device):
                yield case, check


def _single_checks(problem: Problem, default: Kernel, case: Case, device: torch.device) -> Iterator[_Check]:
    bound = Bound(case.inputs.weights)
    yield partial(check_poisoned, case, bound)
    yield partial(check_fresh, case)
    if device.type == "cuda":
        yield partial(check_beside_result, case)
    if problem.deterministic:
        yield partial(check_repeats, case)
    inputs = case.inputs
    usual = partial(check_same_closure, inputs, case.stock, case.apart, bound)
    other = other_inputs(problem, inputs, seed=11)
    stock = other.run(default)
    apart = apart_on_others(case.apart_by_rms, stock)
    yield partial(check_same_closure, other, stock, apart, bound, what="other X and bias, elsewhere")
    every = edits(problem, inputs, seed=inputs.seed, thorough=problem.flops <= THOROUGH_FLOPS)
    largest = up_to_the_largest(problem, inputs, partial(inputs.run, default))
    for edit in chain(every, largest):
        finite = infinite = None
        if (plain := edit.without_inf(inputs.operands)) is not None:
            with plain.applied(inputs):
                finite = inputs.run(default)
        with edit.applied(inputs):
            stock = inputs.run(default)
            unit = edit.unit(stock, problem, inputs.operands)
            if (lines := edit.unclear_lines(problem, inputs.operands)) is not None:
                unclear = lines.to(stock.device).expand(stock.shape)
                infinite = Infinite(unclear, unclear)
            elif finite is not None:
                infinite = Infinite(finite.abs() <= case.apart, finite.isfinite() & ~stock.isfinite())
        stock, leaked = _without_leak(edit, stock, problem, inputs, default)
        with edit.applied(inputs):
            on = partial(check_same_closure, inputs, stock, case.apart, bound)
            yield partial(on, what=edit.what, unit=unit, infinite=infinite, leaked=leaked)
    for what, values in patterns(inputs["x"], seed=inputs.seed):
        with holding(inputs["x"], values):
            stock = inputs.run(default)
            yield partial(check_same_closure, inputs, stock, case.apart, bound, what=what)
    yield partial(usual, what="after all edits")
    yield from surroundings(problem, default, case)
    padded = family_of(problem).make(problem, kind=PADDED, seed=inputs.seed, device=device, weights=inputs.weights)
    try:
        stock = padded.run(default)
        leaked = stock.isnan()
        if bool(leaked.any()):  # the default reads beyond rows, see `_without_leak`
            activations = [None if t is None else t.contiguous() for t in padded.activations]
            weights = [t.contiguous() for t in padded.weights]
            stock = default.bind(*weights)(*activations)
    except REFUSALS:  # the library refuses rows so far apart, so no program has them
        return
    yield partial(check_padded, case, stock, padded, leaked)


def _without_leak(
    edit: Edit, stock: Tensor, problem: Problem, inputs: Inputs, default: Kernel
) -> tuple[Tensor, Tensor | None]:
    """(the default's result if no row affected another, the elements where one does); a kernel may do either.

    Seen in torch 2.13 on CPUs with AMX: if K is no multiple of 32, the product in bf16 reads beyond the end of a row
    and multiplies that by 0, so that a row becomes NaN if the next one holds NaN or Inf.
    """
    if not bool((stock.isnan() & ~edit.lines_with(torch.isnan, stock, problem, inputs.operands)).any()):
        return stock, None
    alone = []
    for lines in (0, 1):
        with edit.in_every_second(lines).applied(inputs):
            alone.append(inputs.run(default))
    right = torch.where(edit.odd_lines(stock, problem, inputs.operands), alone[1], alone[0])
    leaked = stock.isnan() & ~right.isnan()
    return torch.where(leaked, right, stock), leaked


def _cases(problem: Problem, default: Kernel, device: torch.device) -> Iterator[Case]:
    """Seeds x kinds of inputs that errors are measured on; randn first."""
    family = family_of(problem)
    kinds = family.kinds(problem)
    large = problem.flops > LARGE_FLOPS or problem.batch * problem.n * problem.k > LARGE_WEIGHTS
    for position, seed in enumerate(SEEDS):
        sample = family.sample(problem, seed=seed, device=device)
        shared: dict[str, tuple[tuple[Tensor, ...], Tensor]] = {}
        for kind in kinds[position :: len(SEEDS)] if large else kinds:
            weights, w64 = shared.get(family.weights_of(kind), ((), None))
            inputs = family.make(problem, kind=kind, seed=seed, device=device, weights=weights)
            if w64 is None:
                w64 = family.widen(problem, inputs, sample)
                shared = {family.weights_of(kind): (inputs.weights, w64)}
            yield case_of(problem, default, inputs, sample, w64)


def _check_case(case: Case, options: SearchOptions, kernel: Kernel) -> tuple[Error, float]:
    return check_case(case, options, kernel.bind(*case.inputs.weights))
