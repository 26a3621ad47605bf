"""Edits of operands in place: other contents in the same memory that a bound kernel has read before.

A kernel must see them, because programs edit weights (optimizers, LoRA) and reuse the memory of activations.  Edits
also carry rare values that every kernel must handle: zero rows (padding), magnitudes from 1e-30 to 1e30, NaN and Inf.
Rows of X do not affect each other's results, nor do columns of W, so one edit gives each of them another value; if
there are too few of them for all values, there are several edits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.dtypes import bits
from gemmtuned.kernels.families.operand import Inputs, Operand, negate_

SPECIAL: Final = (math.nan, math.inf, -math.inf)
_MOST_LINES: Final = 16  # lines with the same value, so that an edit of a large weight need not copy all of it
_EVERYWHERE: Final = 1 << 20  # in operands of up to so many elements every line gets every value, also all at once
# Exponents of 2 by which inputs of about 1 can be scaled: up to 1e30 and 1e-30, less for 16-bit floats
_EXPONENTS: Final = {"fp64": (200, -200, 60, -60), "fp16": (12, -10)}
_LARGE_X: Final = 2.0**7
_LARGE_W: Final = 2.0**12
_NEAR_LARGEST: Final = 64800.0
_USUAL_EXPONENTS: Final = (100, -100, 20, -50)
_WITHOUT_INF: Final = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@dataclass(frozen=True, slots=True)
class Edit:
    """What to write where.

    marks: by operand, one number per line, where a line is what a row or column of Y depends on (row of X, column of W,
    element of a bias, row of a full C).  A finite mark multiplies the line, NaN or Inf is written into one random
    element of it, and 1 leaves it alone.
    bare: bias and C are all zeros meanwhile, so that small results stay visible.
    every_second: 0 or 1 if NaN and Inf are written only into even, or only into odd, lines.
    """

    what: str
    marks: dict[str, Tensor]
    seed: int
    bare: bool = False
    every_second: int | None = None

    def unit(self, y: Tensor, problem: Problem, operands: Sequence[Operand]) -> Tensor:
        """The factor by which each element of Y [..., M, N], and so its error, may be larger than usual."""
        size = torch.ones((), dtype=torch.float64, device=y.device)
        for o in operands:
            if o.name in self.marks:
                scale = o.per_line(self.marks[o.name].abs(), problem).to(y.device)
                scale = torch.where(scale.isfinite() & (scale > 0), scale, 1.0)
                if o.added:  # the sum may be as large as its larger part
                    scale = scale.clamp(min=1.0)
                size = size * (scale[:, None] if o.line_axis == "m" else scale)
        return size

    def without_inf(self, operands: Sequence[Operand]) -> Edit | None:
        """The edit without its infinite scales and without what is added, which gives the sums those scales multiply.

        None if no scale is infinite.  If one is, the sign of an infinite result is that of a sum, and so it is not
        clear where the sum is near 0.
        """
        infinite = [
            o.name for o in operands if o.scale_of and o.name in self.marks and self.marks[o.name].isinf().any()
        ]
        if not infinite:
            return None
        marks = {name: torch.where(m.isinf(), 1.0, m) if name in infinite else m for name, m in self.marks.items()}
        return replace(self, marks=marks, bare=True)

    def unclear_lines(self, problem: Problem, operands: Sequence[Operand]) -> Tensor | None:
        """Where results are sums times an infinite factor, of which any sum may be near 0; None if nowhere."""
        for o in operands:
            if o.of_sums and o.name in self.marks and self.marks[o.name].isinf().any():
                lines = o.per_line(self.marks[o.name].isinf(), problem)
                return lines[:, None] if o.line_axis == "m" else lines
        return None

    def in_every_second(self, odd: int) -> Edit:
        """The edit with NaN and Inf in the same elements, but only in even, or only in odd, lines."""
        return replace(self, every_second=odd)

    def odd_lines(self, y: Tensor, problem: Problem, operands: Sequence[Operand]) -> Tensor:
        """Elements of Y [..., M, N] that belong to odd lines with NaN or Inf."""

        def odd(marks: Tensor) -> Tensor:
            return (torch.arange(len(marks)) % 2 == 1) & ~marks.isfinite().all()

        return self.lines_with(odd, y, problem, operands)

    def lines_with(
        self, special: Callable[[Tensor], Tensor], y: Tensor, problem: Problem, operands: Sequence[Operand]
    ) -> Tensor:
        """Elements of Y [..., M, N] with a mark in their row or column that `is_special` (torch.isnan, say) finds."""
        found = torch.zeros((), dtype=torch.bool, device=y.device)
        for o in operands:
            if o.name in self.marks:
                lines = o.per_line(special(self.marks[o.name]).double(), problem).to(y.device) > 0
                found = found | (lines[:, None] if o.line_axis == "m" else lines)
        return found.expand(y.shape)

    @contextmanager
    def applied(self, inputs: Inputs) -> Iterator[None]:
        """While it lasts the inputs are edited; afterwards they are as before."""
        undo: list[Callable[[], object]] = []
        try:
            for operand, t in inputs:
                if operand.added and self.bare:
                    undo.append(partial(t.copy_, t.clone()))
                    t.zero_()
                if operand.name in self.marks:
                    marks = self.marks[operand.name]
                    if not operand.can_be_negated(t):  # powers of two: double every second, halve the others
                        undo.append(partial(t.bitwise_xor_, 1))
                        t.bitwise_xor_(1)
                        continue
                    if bool((marks == -1).all()):  # needs no copy of the operand, which may have gigabytes
                        undo.append(partial(negate_, negate_(t)))
                        continue
                    _mark(operand.lines(t), marks, self.seed, undo, self.every_second)
            yield
        finally:
            for back in reversed(undo):
                back()


def edits(problem: Problem, inputs: Inputs, *, seed: int, thorough: bool) -> Iterator[Edit]:
    """The edits that a kernel of this problem must handle.

    thorough: each value on every line, and each magnitude and zero in the whole of X and of W, about 25 calls more.
    A packed weight is not edited: the user has promised that it does not change.
    """
    plain = problem.weight_state != "packed"
    codes = [o.name for o, t in inputs if o.has_codes(t)]  # NaN, say, cannot be written into codes
    present = [(o, t) for o, t in inputs if o.line_axis and o.name not in codes and (plain or not o.weight)]
    lines = {o.name: o.lines(t).shape[-2] for o, t in present}
    for o, _ in present:
        yield Edit(f"{called(o)} edited in place", {o.name: torch.full((lines[o.name],), -1.0).double()}, seed)
    for o, t in inputs:
        as_a_whole = o.name in codes or (o.weight and not o.line_axis)
        if (plain or not o.weight) and as_a_whole and o.can_be_negated(t):
            yield Edit(f"{called(o)} edited in place", {o.name: torch.full((1,), -1.0).double()}, seed)
        if (plain or not o.weight) and not o.can_be_negated(t):
            most = 2.0 if o.line_axis else 4.0
            yield Edit(f"{called(o)} edited in place", {o.name: torch.full((1,), most).double()}, seed)
    draw = random.Random(seed)  # noqa: S311
    factors = [(o, t) for o, t in present if not o.added]
    for o, t in factors:
        what = f"{'rows' if o.line_axis == 'm' else 'columns'} of {called(o, 'the ')}"
        everywhere = thorough and t.numel() <= _EVERYWHERE
        count, values = lines[o.name], (0.0, *(() if o.bent else _magnitudes(problem, t)))
        for marks in _shared_out(values, count, draw, everywhere=everywhere):
            yield Edit(f"{what} zero, large and small", {o.name: marks}, draw.getrandbits(32), bare=True)
        for marks in _shared_out(_special(t), count, draw, everywhere=everywhere):
            both = {o.name: marks}
            for other, _ in factors:  # 0 x Inf is NaN: a row of zeros may not be skipped, nor one whose scale is 0
                if o.weight and not other.weight and lines[other.name] > 1:
                    both[other.name] = torch.ones(lines[other.name], dtype=torch.float64)
                    both[other.name][draw.randrange(lines[other.name])] = 0.0
            yield Edit(f"NaN and Inf in {what}", both, draw.getrandbits(32))
    for o, t in present:
        if o.added:
            values = (0.0, *_magnitudes(problem, t)[:2], *_special(t))
            for marks in _shared_out(values, lines[o.name], draw, everywhere=thorough):
                what = f"zero, large, small, NaN and Inf in {called(o, 'the ')}"
                yield Edit(what, {o.name: marks}, draw.getrandbits(32))
    for o, t in factors if thorough else ():
        if t.numel() > _EVERYWHERE:
            continue
        for mark in (0.0, *(() if o.bent else _magnitudes(problem, t))):
            marks = torch.full((lines[o.name],), mark, dtype=torch.float64)
            yield Edit(f"{called(o)} times {mark:.0e}", {o.name: marks}, seed, bare=mark != 0)


def up_to_the_largest(problem: Problem, inputs: Inputs, stock: Callable[[], Tensor]) -> Iterator[Edit]:
    """Results as large as fp16 holds, from 32000 to 65000: a kernel that has less room inside gives Inf for them.

    The other magnitudes keep a distance, since there a rounding may decide between a number and Inf.  stock: gives the
    default's result for the inputs as they are.
    """
    x, w = (next((o for o, _ in inputs if o.name == name), None) for name in ("x", "w"))
    if problem.dtype != "fp16" or problem.out_dtype != "fp16" or x is None or w is None or w.line_axis != "n":
        return
    seed = inputs.seed
    with Edit("", {}, seed, bare=True).applied(inputs):
        y = stock().double().abs()
    most = y.flatten(0, -2).amax(0).cpu()
    if problem.weight_state != "plain" or inputs["w"].dtype != torch.float16 or len(most) != problem.n:
        return
    rows = torch.full((x.lines(inputs["x"]).shape[-2],), _LARGE_X, dtype=torch.float64)
    columns = torch.exp2(torch.floor(torch.log2(_NEAR_LARGEST / (_LARGE_X * most.clamp(min=1e-6)))))
    marks = {"x": rows, "w": columns.clamp(max=_LARGE_W)}
    largest = Edit("results up to the largest of fp16", marks, seed, bare=True)
    with largest.applied(inputs):
        has_room = bool(stock().isfinite().all())  # partial sums of the default's may be fp16, too
    if has_room:
        yield largest


def called(o: Operand, article: str = "") -> str:
    """The operand's name in messages."""
    names = {"x": "X", "w": f"{article}weight", "bias": f"{article}bias", "c": "C"}
    return names.get(o.name, f"{article}{o.name.replace('_', ' of ')}")


def _magnitudes(problem: Problem, t: Tensor) -> tuple[float, ...]:
    """Factors by which neither the operand nor a result of about 1 overflows or vanishes; 8 bits can only shrink."""
    if t.element_size() == 1:
        return (0.25, 2.0**-4)
    narrow = problem.out_dtype if t.dtype == torch.float32 else problem.dtype
    return tuple(2.0**e for e in _EXPONENTS.get(narrow, _USUAL_EXPONENTS))


def _special(t: Tensor) -> tuple[float, ...]:
    """NaN and infinities, as far as the dtype has them."""
    if not (t.is_floating_point() or t.is_complex()):
        return ()
    return (math.nan,) if t.dtype in _WITHOUT_INF else SPECIAL


def patterns(x: Tensor, *, seed: int) -> Iterator[tuple[str, Tensor]]:
    """(description, values) of contents of X [..., M, K] that programs have but random numbers never are."""
    raw = bits(x)
    positive = x.abs() if raw is x else (raw & 0x7F).view(x.dtype)
    yield "X without negative numbers", positive.to(x.dtype)  # behind a ReLU or a softmax
    draw = torch.Generator(device=x.device).manual_seed(seed)
    at = torch.randint(x.shape[-1], (*x.shape[:-1], 1), generator=draw, device=x.device)
    yield "X with one number in each row", torch.zeros_like(raw).scatter_(-1, at, raw.gather(-1, at)).view(x.dtype)
    alike = raw.clone()
    alike[..., : x.shape[-1] // 2] = raw[..., :1, : x.shape[-1] // 2]
    yield "rows of X that begin alike", alike.view(x.dtype)


@contextmanager
def holding(operand: Tensor, values: Tensor) -> Iterator[None]:
    """While it lasts the operand has these values; afterwards its own."""
    before = operand.clone()
    operand.copy_(values)
    try:
        yield
    finally:
        operand.copy_(before)


def _shared_out(values: Sequence[float], count: int, draw: random.Random, *, everywhere: bool) -> Iterator[Tensor]:
    """Marks for `count` lines so that each value is on some line; everywhere: on each line in turn."""
    order = draw.sample(range(count), count)
    at_once = len(values) if everywhere else min(len(values), count)
    marked = count if everywhere else min(count, max(count // 2, at_once), _MOST_LINES * at_once)
    for turn in range(len(values) if everywhere else -(-len(values) // max(at_once, 1))):
        marks = [1.0] * count
        for number, line in enumerate(order[:marked]):
            marks[line] = values[(number % at_once + turn * (1 if everywhere else at_once)) % len(values)]
        yield torch.tensor(marks, dtype=torch.float64)


def _mark(lines: Tensor, marks: Tensor, seed: int, undo: list[Callable[[], object]], every_second: int | None) -> None:
    """lines: [..., count, length]; marks lie on the CPU."""
    at = (marks != 1).nonzero()[:, 0]
    here, dtype, raw = at.to(lines.device), lines.dtype, bits(lines)
    if len(at) == len(marks):
        undo.append(partial(raw.copy_, raw.clone()))
    else:
        undo.append(partial(raw.index_copy_, -2, here, raw.index_select(-2, here)))
    finite = marks[at].isfinite()
    scaled, written = at[finite].to(lines.device), at[~finite]
    if len(scaled):
        # in fp64, because a factor such as 2^100 is Inf in fp16, and 0 x Inf would be NaN
        values = raw.index_select(-2, scaled).view(dtype).double() * marks[at[finite]].to(lines.device).unsqueeze(-1)
        raw.index_copy_(-2, scaled, bits(values.to(dtype)))
    if len(written):
        draw = torch.Generator().manual_seed(seed)
        *batch, _, length = lines.shape
        positions = [torch.randint(size, (len(written),), generator=draw) for size in (*batch, length)]
        kept = written >= 0 if every_second is None else written % 2 == every_second
        index = [at[kept].to(lines.device) for at in (*positions[:-1], written, positions[-1])]
        raw.index_put_(tuple(index), bits(marks[written[kept]].to(lines.device, dtype)))
