"""Edits of operands where they lie: other contents in the very memory that a bound kernel has read before.

A kernel must see them, for programs edit weights (optimizers, LoRA) and reuse the memory of activations.  They also
carry the values that few inputs have and every kernel must bear: zero rows (padding), magnitudes from 1e-30 to 1e30,
NaN and Inf.  Rows of X do not touch each other's results, nor do columns of W, so one edit gives each of them another
value; where there are too few of them for all values, several edits share the values out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.families.base import Inputs

SPECIAL: Final = (math.nan, math.inf, -math.inf)
_MOST_LINES: Final = 16  # that get one value: an edit of a large weight must not copy all of it
_EVERYWHERE: Final = 1 << 20  # elements of an operand all of whose lines get every value, also all at once
# Exponents of 2 that inputs of about 1 can be scaled by: 1e30 and 1e-30, and what 16-bit floats cannot hold between
_EXPONENTS: Final = {"fp64": (200, -200, 60, -60), "fp16": (12, -10)}
_USUAL_EXPONENTS: Final = (100, -100, 20, -50)


@dataclass(frozen=True, slots=True)
class Edit:
    """What to write where.

    marks: by operand (a, b, bias), a number for each line (row of X, column of W, element of a bias, row of a full C).
    A finite one multiplies the line, NaN or Inf is written at one random place of it; 1 leaves it alone.
    without_bias: the bias is all zeros meanwhile, so that small results do not drown in it.
    """

    what: str
    marks: dict[str, Tensor]
    seed: int
    without_bias: bool = False

    def unit(self, y: Tensor, *, adds: bool) -> Tensor:
        """How much larger than usual each element of Y [..., M, N] may be, and its error with it."""
        size = torch.ones((), dtype=torch.float64, device=y.device)
        for name, marks in self.marks.items():
            scale = marks.abs().to(y.device)
            scale = torch.where(scale.isfinite() & (scale > 0), scale, 1.0)
            if name == "bias":  # a sum is as large as its larger part
                scale = scale.clamp(min=1.0)
            size = size * (scale[:, None] if name == "a" or (name == "bias" and adds) else scale)
        return size

    @contextmanager
    def applied(self, inputs: Inputs) -> Iterator[None]:
        """The inputs are so inside, and as they were outside."""
        undo: list[Callable[[], object]] = []
        try:
            if self.without_bias and inputs.bias is not None:
                undo.append(partial(inputs.bias.copy_, inputs.bias.clone()))
                inputs.bias.zero_()
            for name, marks in self.marks.items():
                operand: Tensor | None = getattr(inputs, name)
                assert operand is not None
                if bool((marks == -1).all()):  # needs no copy of what may be gigabytes
                    undo.append(operand.neg_().neg_)
                    continue
                lines = operand.mT if name == "b" else operand if operand.dim() > 1 else operand.unsqueeze(-1)
                _mark(lines, marks, self.seed, undo)
            yield
        finally:
            for back in reversed(undo):
                back()


def edits(problem: Problem, inputs: Inputs, *, seed: int, thorough: bool) -> Iterator[Edit]:
    """Those that a kernel of this problem must bear.

    thorough: each value on every line, and each magnitude and zero in the whole of X and of W: some 25 calls more.
    A packed weight is a copy by the user's will: it is left alone.
    """
    weight = problem.weight_state == "plain"
    lines = {"a": problem.m, "b": problem.n}
    if inputs.bias is not None:
        lines["bias"] = inputs.bias.shape[0] if inputs.bias.dim() == 1 else inputs.bias.shape[-2]
    named = {"a": "X", "b": "weight", "bias": "bias"}
    for name, count in lines.items():
        if weight or name != "b":
            yield Edit(f"{named[name]} edited in place", {name: torch.full((count,), -1.0, dtype=torch.float64)}, seed)
    magnitudes = tuple(2.0**e for e in _EXPONENTS.get(problem.dtype, _USUAL_EXPONENTS))
    draw = random.Random(seed)  # noqa: S311
    operands = ("a", "b") if weight else ("a",)
    everywhere = {name: thorough and getattr(inputs, name).numel() <= _EVERYWHERE for name in operands}
    for name in operands:
        what = "rows of X" if name == "a" else "columns of the weight"
        for marks in _shared_out((0.0, *magnitudes), lines[name], draw, everywhere=everywhere[name]):
            yield Edit(f"{what} zero, large and small", {name: marks}, draw.getrandbits(32), without_bias=True)
        for marks in _shared_out(SPECIAL, lines[name], draw, everywhere=everywhere[name]):
            both = {name: marks}
            if name == "b" and problem.m > 1:  # 0 x Inf is NaN: a row of zeros may not be skipped
                both["a"] = torch.ones(problem.m, dtype=torch.float64)
                both["a"][draw.randrange(problem.m)] = 0.0
            yield Edit(f"NaN and Inf in {what}", both, draw.getrandbits(32))
    if "bias" in lines:
        for marks in _shared_out((0.0, *magnitudes[:2], *SPECIAL), lines["bias"], draw, everywhere=thorough):
            yield Edit("zero, large, small, NaN and Inf in the bias", {"bias": marks}, draw.getrandbits(32))
    for name in operands if thorough else ():
        if getattr(inputs, name).numel() > _EVERYWHERE:
            continue
        for mark in (0.0, *magnitudes):
            marks = torch.full((lines[name],), mark, dtype=torch.float64)
            yield Edit(f"{named[name]} times {mark:.0e}", {name: marks}, seed, without_bias=mark != 0)


def patterns(x: Tensor, *, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Other contents of X [..., M, K] that programs have and random numbers never: (what they are, the values)."""
    yield "X without negative numbers", x.abs().to(x.dtype)  # behind a ReLU or a softmax
    draw = torch.Generator(device=x.device).manual_seed(seed)
    at = torch.randint(x.shape[-1], (*x.shape[:-1], 1), generator=draw, device=x.device)
    yield "X with one number in each row", torch.zeros_like(x).scatter_(-1, at, x.gather(-1, at))
    alike = x.clone()
    alike[..., : x.shape[-1] // 2] = x[..., :1, : x.shape[-1] // 2]
    yield "rows of X that begin alike", alike


@contextmanager
def holding(operand: Tensor, values: Tensor) -> Iterator[None]:
    """The operand has these values inside, and its own outside."""
    before = operand.clone()
    operand.copy_(values)
    try:
        yield
    finally:
        operand.copy_(before)


def _shared_out(values: Sequence[float], count: int, draw: random.Random, *, everywhere: bool) -> Iterator[Tensor]:
    """Marks of `count` lines, at random places, so that each value is somewhere; everywhere: on each line, in turn."""
    order = draw.sample(range(count), count)
    at_once = len(values) if everywhere else min(len(values), count)
    marked = count if everywhere else min(count, max(count // 2, at_once), _MOST_LINES * at_once)
    for turn in range(len(values) if everywhere else -(-len(values) // at_once)):
        marks = torch.ones(count, dtype=torch.float64)
        for number, line in enumerate(order[:marked]):
            marks[line] = values[(number % at_once + turn * (1 if everywhere else at_once)) % len(values)]
        yield marks


def _mark(lines: Tensor, marks: Tensor, seed: int, undo: list[Callable[[], object]]) -> None:
    """lines: [..., count, length]; marks lie on the CPU."""
    at = (marks != 1).nonzero()[:, 0]
    here = at.to(lines.device)
    if len(at) == len(marks):
        undo.append(partial(lines.copy_, lines.clone()))
    else:
        undo.append(partial(lines.index_copy_, -2, here, lines.index_select(-2, here)))
    finite = marks[at].isfinite()
    scaled, written = at[finite].to(lines.device), at[~finite]
    if len(scaled):
        # By way of fp64: 2^100 is no fp16, and 0 x 2^100 is none of its business
        values = lines.index_select(-2, scaled).double() * marks[at[finite]].to(lines.device).unsqueeze(-1)
        lines.index_copy_(-2, scaled, values.to(lines.dtype))
    if len(written):
        draw = torch.Generator().manual_seed(seed)
        *batch, _, length = lines.shape
        places = [torch.randint(size, (len(written),), generator=draw) for size in (*batch, length)]
        index = [place.to(lines.device) for place in (*places[:-1], written, places[-1])]
        lines.index_put_(tuple(index), marks[written].to(lines.device, lines.dtype))
