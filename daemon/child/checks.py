"""CHILD side: the checks of the numeric gate, each for a known fault; verify.py says in which order they run.

A check raises Wrong when the kernel fails it, or whatever the kernel itself raises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.protocol.options import SearchOptions
from gemmtuned.kernels.backends.base import Kernel, Run
from gemmtuned.kernels.dtypes import UNIT_ROUNDOFF
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.families.error import DEVIATIONS, Error, Spread, limits, measure_error, quantised
from gemmtuned.kernels.families.operand import Inputs, Sample, negated
from gemmtuned.kernels.torch_flags import deterministic

REPEATS: Final = 20  # identical calls that must agree bitwise when the problem is deterministic
# Elements outside the sampled rows are compared with the default's, and both may have larger errors than the samples
_UNSAMPLED: Final = 1.5
_ROUGHLY: Final = 2.0**-5  # share of the largest value: no rounding to 16 bits or more is so far off
_GUARD: Final = 0xA5  # the byte that fills memory before and behind a result
_BLOCK_BYTES: Final = 512  # torch's allocator rounds sizes up to this on a GPU
_MOST_FREED_BYTES: Final = 32 << 20  # a larger block comes fresh from the system, full of zeros, whatever was freed


class Wrong(Exception):
    """A check failed; the message says which, on what inputs, and by how much."""


class Rejected(Wrong):
    """The result passes our gate, but is outside the tolerance that somebody asked for."""


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs with the default's and the exact result, and the largest errors that a candidate may have."""

    inputs: Inputs
    stock: Tensor
    sample: Sample
    exact: Tensor
    default: Error
    limit: Error
    apart: float  # largest allowed |candidate - default|
    bits: bool = False  # only one result is right, and the default gives it

    @property
    def apart_by_rms(self) -> float:
        """`apart` by the RMS of the default's results."""
        return self.apart / root_mean_square(self.stock)


@dataclass(frozen=True, slots=True)
class Bound:
    """One closure of each kernel, bound once and kept, so that a kernel that remembers earlier calls is noticed."""

    weights: tuple[Tensor, ...]
    runs: dict[int, Run] = field(default_factory=dict)

    def run(self, kernel: Kernel) -> Run:
        """The kernel's closure. The kernels must live as long as this does."""
        if id(kernel) not in self.runs:
            self.runs[id(kernel)] = kernel.bind(*self.weights)
        return self.runs[id(kernel)]


def case_of(problem: Problem, default: Kernel, inputs: Inputs, sample: Sample, w64: Tensor | None = None) -> Case:
    """The case that these inputs make; w64 as for Family.reference."""
    family = family_of(problem)
    exact = family.reference(problem, inputs, sample, w64)
    stock = inputs.run(default)
    error = measure_error(sample.of(stock), exact)
    if not UNIT_ROUNDOFF[problem.out_dtype] and error.m:
        raise CandidateFailed(f"{inputs}: sums of integers have one right value, and torch gives others here")
    limit = limits(problem, error, Spread.of(exact, family.x_rows(problem, inputs, sample)))
    apart = _UNSAMPLED * (limit.m + error.m) * float(exact.abs().square().mean().sqrt())
    bits = family.is_exact(inputs.kind) and torch.equal(sample.of(stock), exact.to(stock.dtype))
    return Case(inputs, stock, sample, exact, error, limit, apart, bits)


def check_case(case: Case, options: SearchOptions, run: Run) -> tuple[Error, float]:
    """A kernel's error on this case, and the share of elements outside AITER's tolerance."""
    y = run(*case.inputs.activations)
    check_form(y, case.stock)
    error = measure_error(case.sample.of(y), case.exact)
    if case.bits and not same_bits(y, case.stock):
        raise Wrong(f"{case.inputs}: {int((y != case.stock).sum())} elements differ, where no sum is ever rounded")
    if not error.within(case.limit):
        raise Wrong(
            f"{case.inputs}: error r={error.r:.1e} m={error.m:.1e}, allowed r={case.limit.r:.1e} m={case.limit.m:.1e}"
        )
    check_near(y, case.stock, case.apart, str(case.inputs))
    ratio = err_ratio(case.exact, case.sample.of(y), atol=options.atol, rtol=options.rtol)
    if options.err_ratio is not None and ratio > options.err_ratio:
        raise Rejected(f"{case.inputs}: {ratio:.4f} of the elements mismatch, {options.err_ratio:g} was asked for")
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


def check_form(y: object, stock: Tensor) -> None:
    """dtype, shape, strides and device are torch's."""
    if not isinstance(y, Tensor):
        raise Wrong(f"gives {type(y).__name__}, expected a Tensor")
    for what in ("dtype", "shape", "device", "layout"):
        if getattr(y, what) != getattr(stock, what):
            raise Wrong(f"{what} is {getattr(y, what)}, torch gives {getattr(stock, what)}")
    if y.stride() != stock.stride():
        raise Wrong(f"strides are {y.stride()}, torch gives {stock.stride()}")


@dataclass(frozen=True, slots=True)
class Infinite:
    """Which results may differ from the default's because scales are infinite.

    unclear: elements that may be Inf of either sign, or NaN, if the default's is one of these: a sum near 0 times
    such a scale.  scaled: elements that may be NaN if the default's is Inf, and Inf if it is NaN: one kernel may
    multiply the whole sum by such a scale, another its parts or the operands, which gives infinities of both signs.
    """

    unclear: Tensor
    scaled: Tensor


def check_near(
    y: Tensor,
    stock: Tensor,
    apart: float,
    what: str,
    unit: Tensor | None = None,
    infinite: Infinite | None = None,
    leaked: Tensor | None = None,
) -> None:
    """Every element is near the default's: only this finds one wrong element outside the sampled rows.

    unit: factors of `apart`, one per element, where results differ much in size.
    leaked: elements into which the default lets NaN or Inf of another row; they may be NaN in the candidate's, too.
    """
    check_form(y, stock)
    if unit is not None or y.dtype == torch.float64 or _is_integer(y):
        distance = (y.double() - stock.double()).abs_()
    else:
        distance = (y.float() - stock.float()).abs_()
    # 0 where both are the same Inf or both NaN; `not <=` keeps a NaN that only one of them has
    distance[(y == stock) | (y.isnan() & stock.isnan())] = 0
    if infinite is not None:
        distance[infinite.unclear & ~y.isfinite() & ~stock.isfinite()] = 0
        distance[infinite.scaled & (y.isnan() & stock.isinf() | y.isinf() & stock.isnan())] = 0
    if leaked is not None:
        distance[leaked & y.isnan()] = 0
    if unit is not None:
        distance /= unit
    bad = ~(distance <= apart)
    if bool(bad.any()):
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise Wrong(
            f"{what}: {int(bad.sum())} of {y.numel()} elements off, the first at {where} is "
            f"{float(y[where]):.10g}, torch gives {float(stock[where]):.10g}, allowed apart {apart:.1e}"
        )


def check_untouched(inputs: Inputs, kernel: Kernel) -> Tensor:
    """Operands and the memory around them are unchanged."""
    before = [buffer.clone() for buffer in inputs.buffers]
    y = inputs.run(kernel)
    if not all(same_bits(old, new) for old, new in zip(before, inputs.buffers, strict=True)):
        for old, new in zip(before, inputs.buffers, strict=True):
            new.copy_(old)  # the next candidate starts from clean operands
        raise Wrong(f"{inputs}: it writes into its operands or beside them")
    return y


def check_padded(case: Case, stock: Tensor, inputs: Inputs, leaked: Tensor, kernel: Kernel) -> None:
    """Operands inside a buffer of NaN give the right result, and leave it unchanged; leaked: as in check_near."""
    check_near(check_untouched(inputs, kernel), stock, case.apart, str(inputs), leaked=leaked)


def check_poisoned(case: Case, bound: Bound, kernel: Kernel) -> None:
    """The result is right when new memory is full of NaN, then of large numbers, for kernels that clear NaN away.

    A switch of torch's has torch.empty give NaN; other numbers come from a block that was freed just before.
    """
    run = bound.run(kernel)
    inputs = case.inputs
    large = torch.finfo(case.stock.dtype).max / 4 if not _is_integer(case.stock) else math.inf
    for poison, name in ((math.nan, "NaN"), (large, "large numbers")):
        with deterministic(torch.are_deterministic_algorithms_enabled(), poison=poison != poison):
            for _ in range(2):
                freed = [_full_of(poison, t) for t in (case.stock, inputs["x"]) if t.nbytes <= _MOST_FREED_BYTES]
                del freed
                check_near(run(*inputs.activations), case.stock, case.apart, f"memory poisoned with {name}")


def _is_integer(t: Tensor) -> bool:
    return not t.is_floating_point() and not t.is_complex()


def _full_of(value: float, like: Tensor) -> Tensor:
    if _is_integer(like):  # integers have no NaN
        return torch.full_like(like, torch.iinfo(like.dtype).max)
    if like.is_floating_point() and value == value:
        value = min(value, torch.finfo(like.dtype).max)
    return torch.full_like(like, value)


def check_fresh(case: Case, kernel: Kernel) -> None:
    """Two results have memory of their own each, and not the operands'."""
    inputs = case.inputs
    run = kernel.bind(*inputs.weights)
    first = run(*inputs.activations)
    kept = first.clone()
    second = run(*inputs.having(x=negated(inputs["x"])).activations)
    addresses = {t.untyped_storage().data_ptr() for t in (*inputs.buffers, first) if t.numel()}
    if second.untyped_storage().data_ptr() in addresses or not same_bits(first, kept):
        raise Wrong("its result shares memory with an operand or with the result of the call before")


def check_beside_result(case: Case, kernel: Kernel) -> None:
    """Nothing is written before or behind the result, which lies between two blocks of known content.

    torch's allocator gives a freed block to the next request of the same size.  If the result got another block, as
    with a kernel that has a workspace, the attempt says nothing and is repeated.
    """
    run = kernel.bind(*case.inputs.weights)
    used = case.stock.untyped_storage().nbytes()
    size = -(-max(used, 1) // _BLOCK_BYTES) * _BLOCK_BYTES

    def block() -> Tensor:
        return torch.full((size,), _GUARD, dtype=torch.uint8, device=case.stock.device)

    for _ in range(4):
        blocks = sorted((block() for _ in range(8)), key=lambda b: b.data_ptr())
        addresses = [b.data_ptr() for b in blocks]
        middle = next(
            (i for i in range(1, 7) if addresses[i] - addresses[i - 1] == addresses[i + 1] - addresses[i] == size), None
        )
        if middle is None:
            continue
        del blocks[middle]
        y = run(*case.inputs.activations)
        hit = y.untyped_storage().data_ptr() == addresses[middle]
        torch.cuda.synchronize()
        del y
        behind = torch.empty(size, dtype=torch.uint8, device=case.stock.device)
        if not hit or behind.data_ptr() != addresses[middle]:
            continue
        if any(bool((zone != _GUARD).any()) for zone in (*blocks, behind[used:])):
            raise Wrong("it writes beside its result")
        return


def check_same_closure(
    inputs: Inputs,
    stock: Tensor,
    apart: float,
    bound: Bound,
    kernel: Kernel,
    *,
    what: str,
    unit: Tensor | None = None,
    infinite: Infinite | None = None,
    leaked: Tensor | None = None,
) -> None:
    """A closure that has run before is right for what the inputs hold now: it keeps nothing of what they held."""
    check_near(bound.run(kernel)(*inputs.activations), stock, apart, what, unit, infinite, leaked)


def check_repeats(case: Case, kernel: Kernel) -> None:
    """Equal calls agree bitwise, which is asked of problems whose program wants determinism."""
    run = kernel.bind(*case.inputs.weights)
    first = run(*case.inputs.activations)
    for _ in range(REPEATS - 1):
        if not same_bits(first, run(*case.inputs.activations)):
            raise Wrong(f"{REPEATS} equal calls do not agree bitwise, and the problem is deterministic")


def root_mean_square(y: Tensor) -> float:
    """The root mean square of the finite elements; above 0 also where all of them are 0."""
    sizes = y.abs().double() if y.dtype in (torch.float64, torch.complex128) else y.abs().float()
    finite = sizes.isfinite()
    count = max(int(finite.sum()), 1)
    return max(float(torch.linalg.vector_norm(sizes.masked_fill_(~finite, 0.0))) / math.sqrt(count), 1e-30)


def roughly_apart(problem: Problem, stock: Tensor) -> float:
    """How far from the default's result any other on the same inputs may be, before its error is measured.

    Inputs are of about 1.  At least what the gate allows: what is beyond is no matter of rounding.
    """
    largest = float(stock.abs().max())
    return _ROUGHLY * largest + DEVIATIONS * quantised(problem) * max(largest, 3.0 * root_mean_square(stock))


def apart_on_others(by_rms: float, stock: Tensor) -> float:
    """How far from the default's `stock` a result may be where inputs are not those of the case that by_rms is of.

    Twice as far as there, by the size of the results: the largest error differs from draw to draw.
    """
    return 2 * by_rms * root_mean_square(stock)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equal, NaN included."""
    return a.numel() == 0 or torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))


class Watch:
    """Checks results of one arm between the readings of a race: each must equal the first.

    Where two runs may differ in rounding, each must be as near torch's own as the gate allows.
    """

    def __init__(self, stock: Tensor, apart: float) -> None:
        self._stock, self._apart = stock, apart
        self._first: Tensor | None = None

    def look(self, y: object, what: str) -> None:
        """Raises Wrong, which begins with `what`."""
        if self._first is not None and isinstance(y, Tensor) and _equal(y, self._first):
            return
        if not isinstance(y, Tensor):
            raise Wrong(f"{what}: gives {type(y).__name__}, expected a Tensor")
        check_near(y, self._stock, self._apart, what)
        if self._first is None:
            self._first = y.clone()


def _equal(y: Tensor, first: Tensor) -> bool:
    return y.dtype == first.dtype and y.shape == first.shape and y.stride() == first.stride() and torch.equal(y, first)


def other_inputs(problem: Problem, inputs: Inputs, seed: int) -> Inputs:
    """Other activations, elsewhere in memory, for the same weights."""
    device, weights = inputs["x"].device, inputs.weights
    return family_of(problem).make(problem, kind="randn", seed=seed, device=device, weights=weights)
