"""CHILD side: is a candidate's result as good as the default's, on everything that is known to trip kernels.

For every candidate, three seeds of every kind of inputs (kernels/families/base.py) are compared with an exact fp64
result on sampled rows, and with the default's result everywhere.  Then single checks, each for a known fault:
output nobody wrote, reads and writes beside the operands, writes beside the result, NaN and Inf lost or made up, a
result kept in memory that the next call overwrites, a weight edited in place and not noticed, a result that is wrong
once in many calls, results that differ from call to call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.options import DEFAULTS, SearchOptions
from gemmtuned.kernels.backends.base import Kernel
from gemmtuned.kernels.dtypes import UNIT_ROUNDOFF
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.families.base import KINDS, SAMPLED_WEIGHTS, SPECIAL_KINDS, Inputs, Sample
from gemmtuned.kernels.families.error import Error, limits, measure_error, reach
from gemmtuned.kernels.switches import deterministic

SEEDS: Final = (1, 2, 3)
OFTEN: Final = 105  # calls on one input, for results that are wrong once in 50; with all other checks 130
OFTEN_FLOPS: Final = 1e9  # above it 7: a second otherwise
_GUARD: Final = 0xA5  # fills the memory before and behind a result
_BLOCK_BYTES: Final = 512  # what torch's allocator rounds to on a GPU
REPEATS: Final = 20  # identical calls that must agree bitwise when the problem is deterministic
# Above these each seed has one kind of inputs instead of all three: a second a case otherwise
LARGE_FLOPS: Final = 2e10
LARGE_WEIGHTS: Final = SAMPLED_WEIGHTS
# Elements outside the sampled rows are compared with the default's; both may be off by more than was seen inside
_UNSAMPLED: Final = 1.5
# What a backend may raise when it cannot run a problem (torch: mostly RuntimeError)
REFUSALS: Final = (RuntimeError, ValueError, TypeError, IndexError, MemoryError, CandidateFailed)


@dataclass(frozen=True, slots=True)
class Verdict:
    """outcome: ok, wrong, refused (it raised) or rejected (outside the tolerance asked for); note says why.

    err: largest r seen; baseline_err: the default's.  err_ratio: largest share of elements outside AITER's tolerance.
    """

    outcome: str
    err: float | None
    baseline_err: float
    note: str = ""
    err_ratio: float | None = None


class _Wrong(Exception):
    """A check failed; the text says which, on what inputs, by how much."""


class _Rejected(_Wrong):
    """Right by our gate, and outside the tolerance that somebody asked for."""


@dataclass(frozen=True, slots=True)
class _Case:
    """Inputs with the default's and the exact result, and what a candidate may be off by."""

    inputs: Inputs
    stock: Tensor
    sample: Sample
    exact: Tensor
    default: Error
    limit: Error
    apart: float  # largest allowed |candidate - default|


_Check = Callable[[Kernel], "tuple[Error, float] | Tensor | None"]  # raises _Wrong


def verify(
    problem: Problem,
    kernels: Mapping[Candidate, Kernel],
    default: Kernel,
    *,
    device: torch.device,
    before: Callable[[Candidate], object] = lambda candidate: None,
    options: SearchOptions = DEFAULTS,
) -> dict[Candidate, Verdict]:
    """A verdict on every candidate; `before` is called with it whenever it is the next one to run.

    Runs under the caller's switches (kernels/switches.py).  Raises CandidateFailed when the default itself fails.
    """
    verdicts: dict[Candidate, Verdict] = {}
    worst, mismatch = dict.fromkeys(kernels, 0.0), dict.fromkeys(kernels, 0.0)
    baseline = 0.0
    announced: Candidate | None = None
    try:
        for default_r, check in _checks(problem, default, device, options):
            baseline = max(baseline, default_r)
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
                except _Wrong as err:
                    outcome = "rejected" if isinstance(err, _Rejected) else "wrong"
                    verdicts[candidate] = Verdict(outcome, None, baseline, f"{problem} {candidate}: {err}")
                except REFUSALS as err:
                    verdicts[candidate] = Verdict(
                        "refused", None, baseline, f"{problem} {candidate}: {first_line(err)}"
                    )
            if len(verdicts) == len(kernels):
                break
    except REFUSALS as err:
        raise CandidateFailed(f"{problem}: torch's own kernel fails: {first_line(err)}") from err
    return {c: verdicts.get(c) or Verdict("ok", worst[c], baseline, "", mismatch[c]) for c in kernels}


def default_error(problem: Problem, default: Kernel, *, device: torch.device) -> float:
    """The default's r on one set of randn inputs; 0 for dtypes that we have no limits for."""
    if problem.out_dtype not in UNIT_ROUNDOFF:
        return 0.0
    return next(_cases(problem, default, device)).default.r


def first_line(err: BaseException) -> str:
    """Type and first line of an exception: torch's messages run over pages."""
    lines = str(err).strip().splitlines()
    return f"{type(err).__name__}: {lines[0][:300]}" if lines else type(err).__name__


def _checks(
    problem: Problem, default: Kernel, device: torch.device, options: SearchOptions
) -> Iterator[tuple[float, _Check]]:
    """(the default's r, check) one at a time: the weights of large layers would not fit together."""
    for number, case in enumerate(_cases(problem, default, device)):
        if number == 0:  # first: a kernel that edits operands would spoil those of all others
            yield 0.0, partial(_check_untouched, case.inputs)
        yield case.default.r, partial(_check_case, case, options)
        if number == 0:
            for check in _single_checks(problem, default, case, device):
                yield 0.0, check


def _single_checks(problem: Problem, default: Kernel, case: _Case, device: torch.device) -> Iterator[_Check]:
    yield partial(_check_poisoned, case)
    yield partial(_check_fresh, case)
    yield partial(_check_often, case, OFTEN if problem.flops < OFTEN_FLOPS else 7)
    if device.type == "cuda":
        yield partial(_check_beside_result, case)
    if problem.weight_state == "plain":
        with _negated(case.inputs.b):
            stock = default.bind(case.inputs.b)(case.inputs.a, case.inputs.bias)
        yield partial(_check_weight_edit, case, stock)
    if problem.deterministic:
        yield partial(_check_repeats, case)
    make = family_of(problem).make
    for kind in SPECIAL_KINDS:
        special = make(problem, kind=kind, seed=case.inputs.seed, device=device, weight=case.inputs.b)
        yield partial(_check_special, case, default.bind(special.b)(special.a, special.bias), special)


def _cases(problem: Problem, default: Kernel, device: torch.device) -> Iterator[_Case]:
    """Seeds x kinds of inputs that errors are measured on; randn first."""
    family = family_of(problem)
    large = problem.flops > LARGE_FLOPS or problem.batch * problem.n * problem.k > LARGE_WEIGHTS
    for position, seed in enumerate(SEEDS):
        sample = family.sample(problem, seed=seed, device=device)
        weight: Tensor | None = None
        b64: Tensor | None = None
        for kind in (KINDS[position],) if large else KINDS:
            inputs = family.make(problem, kind=kind, seed=seed, device=device, weight=weight)
            if weight is None or b64 is None:
                weight, b64 = inputs.b, family.widen(inputs, sample)
            exact = family.reference(inputs, sample, b64)
            stock = default.bind(inputs.b)(inputs.a, inputs.bias)
            error = measure_error(sample.of(stock), exact)
            limit = limits(problem, error, reach(exact))
            apart = _UNSAMPLED * (limit.m + error.m) * float(exact.square().mean().sqrt())
            yield _Case(inputs, stock, sample, exact, error, limit, apart)


def _check_case(case: _Case, options: SearchOptions, kernel: Kernel) -> tuple[Error, float]:
    y = kernel.bind(case.inputs.b)(case.inputs.a, case.inputs.bias)
    _check_form(y, case.stock)
    error = measure_error(case.sample.of(y), case.exact)
    if not error.within(case.limit):
        raise _Wrong(
            f"{case.inputs}: error r={error.r:.1e} m={error.m:.1e}, allowed r={case.limit.r:.1e} m={case.limit.m:.1e}"
        )
    _check_near(y, case.stock, case.apart, str(case.inputs))
    ratio = err_ratio(case.exact, case.sample.of(y), atol=options.atol, rtol=options.rtol)
    if options.err_ratio is not None and ratio > options.err_ratio:
        raise _Rejected(f"{case.inputs}: {ratio:.4f} of the elements mismatch, {options.err_ratio:g} was asked for")
    return error, ratio


def err_ratio(exact: Tensor, y: Tensor, *, atol: float | None = None, rtol: float | None = None) -> float:
    """Share of elements with |exact - y| > atol + rtol * |y|, exact rounded to y's dtype (AITER's checkAllclose)."""
    usual = 5e-2 if y.dtype == torch.bfloat16 else 1e-2
    wide = y.double() if y.dtype == torch.float64 else y.float()
    reference = exact.to(y.dtype).to(wide.dtype)
    near = (reference - wide).abs() <= (usual if atol is None else atol) + (
        usual if rtol is None else rtol
    ) * wide.abs()
    return 1.0 - float(near.double().mean())


def _check_form(y: object, stock: Tensor) -> None:
    if not isinstance(y, Tensor):
        raise _Wrong(f"gives {type(y).__name__}, expected a Tensor")
    for what in ("dtype", "shape", "device", "layout"):
        if getattr(y, what) != getattr(stock, what):
            raise _Wrong(f"{what} is {getattr(y, what)}, torch gives {getattr(stock, what)}")
    if y.stride() != stock.stride():
        raise _Wrong(f"strides are {y.stride()}, torch gives {stock.stride()}")


def _check_near(y: Tensor, stock: Tensor, apart: float, what: str) -> None:
    """Every element near the default's: one wrong element outside the sampled rows shows here only."""
    distance = (y.double() - stock.double() if y.dtype == torch.float64 else y.float() - stock.float()).abs_()
    # 0 where both are the same Inf or both NaN; `not <=` keeps a NaN that only one of them has
    distance[(y == stock) | (y.isnan() & stock.isnan())] = 0
    bad = ~(distance <= apart)
    if bool(bad.any()):
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise _Wrong(
            f"{what}: {int(bad.sum())} of {y.numel()} elements off, the first at {where} is "
            f"{float(y[where]):.6g}, torch gives {float(stock[where]):.6g}, allowed apart {apart:.1e}"
        )


def _check_poisoned(case: _Case, kernel: Kernel) -> None:
    """New memory is full of NaN: what torch.empty gives by switch, the rest by the block freed just before."""
    run = kernel.bind(case.inputs.b)
    with deterministic(torch.are_deterministic_algorithms_enabled(), poison=True):
        for _ in range(2):
            freed = torch.full_like(case.stock, math.nan)
            del freed
            _check_near(run(case.inputs.a, case.inputs.bias), case.stock, case.apart, "memory poisoned with NaN")


def _check_fresh(case: _Case, kernel: Kernel) -> None:
    """Two results live side by side, and not in the operands' memory."""
    run = kernel.bind(case.inputs.b)
    first = run(case.inputs.a, case.inputs.bias)
    kept = first.clone()
    second = run(-case.inputs.a, case.inputs.bias)
    places = {t.untyped_storage().data_ptr() for t in (*case.inputs.buffers, first) if t.numel()}
    if second.untyped_storage().data_ptr() in places or not same_bits(first, kept):
        raise _Wrong("its result shares memory with an operand or with the result of the call before")


def _check_often(case: _Case, calls: int, kernel: Kernel) -> None:
    """Many equal calls: a race between threads, or a counter not reset, shows once in many."""
    run = kernel.bind(case.inputs.b)
    for number in range(1, calls + 1):
        y = run(case.inputs.a, case.inputs.bias)
        _check_near(y, case.stock, case.apart, f"call {number} on equal inputs")


def _check_beside_result(case: _Case, kernel: Kernel) -> None:
    """Nothing is written before or behind the result, which is made to lie between two blocks of known content.

    torch's allocator gives a freed block of just the right size to the next who asks for it; where it gave another, as
    to a kernel with a workspace, nothing is learnt and it is tried again.
    """
    run = kernel.bind(case.inputs.b)
    used = case.stock.untyped_storage().nbytes()
    size = -(-max(used, 1) // _BLOCK_BYTES) * _BLOCK_BYTES

    def block() -> Tensor:
        return torch.full((size,), _GUARD, dtype=torch.uint8, device=case.stock.device)

    for _ in range(4):
        blocks = sorted((block() for _ in range(8)), key=lambda b: b.data_ptr())
        places = [b.data_ptr() for b in blocks]
        middle = next((i for i in range(1, 7) if places[i] - places[i - 1] == places[i + 1] - places[i] == size), None)
        if middle is None:
            continue
        del blocks[middle]
        y = run(case.inputs.a, case.inputs.bias)
        hit = y.untyped_storage().data_ptr() == places[middle]
        torch.cuda.synchronize()
        del y
        behind = torch.empty(size, dtype=torch.uint8, device=case.stock.device)
        if not hit or behind.data_ptr() != places[middle]:
            continue
        if any(bool((zone != _GUARD).any()) for zone in (*blocks, behind[used:])):
            raise _Wrong("it writes beside its result")
        return


def _check_special(case: _Case, stock: Tensor, inputs: Inputs, kernel: Kernel) -> None:
    """padded, nan, inf: as the default gives them, with the NaN around padded operands left alone."""
    y = _check_untouched(inputs, kernel)
    _check_form(y, stock)
    _check_near(y, stock, case.apart, str(inputs))


def _check_untouched(inputs: Inputs, kernel: Kernel) -> Tensor:
    before = [buffer.clone() for buffer in inputs.buffers]
    y = kernel.bind(inputs.b)(inputs.a, inputs.bias)
    if not all(same_bits(old, new) for old, new in zip(before, inputs.buffers, strict=True)):
        for old, new in zip(before, inputs.buffers, strict=True):
            new.copy_(old)  # the next candidate starts from clean operands
        raise _Wrong(f"{inputs}: it writes into its operands or beside them")
    return y


def _check_weight_edit(case: _Case, stock: Tensor, kernel: Kernel) -> None:
    """The bound closure must see an edit of W in place: it may keep no copy."""
    inputs = case.inputs
    run = kernel.bind(inputs.b)
    run(inputs.a, inputs.bias)
    with _negated(inputs.b):
        _check_near(run(inputs.a, inputs.bias), stock, case.apart, "weight edited in place")


@contextmanager
def _negated(b: Tensor) -> Iterator[None]:
    b.neg_()
    try:
        yield
    finally:
        b.neg_()


def _check_repeats(case: _Case, kernel: Kernel) -> None:
    run = kernel.bind(case.inputs.b)
    first = run(case.inputs.a, case.inputs.bias)
    for _ in range(REPEATS - 1):
        if not same_bits(first, run(case.inputs.a, case.inputs.bias)):
            raise _Wrong(f"{REPEATS} equal calls do not agree bitwise, and the problem is deterministic")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equal, NaN included."""
    return a.numel() == 0 or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
