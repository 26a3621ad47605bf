"""Operands: what a family declares of each, and one set of them in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.dtypes import bits, torch_dtype
from gemmtuned.kernels.kernel import Kernel

# What one scale stands for: values of a row (or column) of the operand's result axis, and of K; None is all of them
SCALED_BLOCKS: Final[dict[str, tuple[int | None, int | None]]] = {
    "tensor": (None, None), "row": (1, None), "1x128": (1, 128), "128x128": (128, 128),
    "1x32": (1, 32), "1x64": (1, 64), "tensor+zero": (None, None), "row+zero": (1, None),
}  # fmt: skip
_REDUCED: Final = "ki"  # axes that are summed up
_IN_BYTES: Final = {"i4": 2, "fp4_e2m1": 2, "e8m0": 1}  # raw operands: numbers in a byte


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand of a family's call, or its result.

    axes: letters of b (batch), m, n, k, and in mixtures e (experts), t (top-k), h (rows of the first weight) and i
    (inter), one for each axis, in the order in which torch's call takes them.
    dtype: the problem's column that names it, or a dtype.  layout: which letter of the problem's layout tells how it
    lies; row-major where it is None.  weight: it stays the same from call to call, so it is bound, and cold in races.
    optional: there when the problem has a bias.  scale_of: the operand that its values are to be multiplied with.
    added: to the product.  result: what the call gives.  index: it says where, not how much.  bent: the result is not
    in proportion to it.  of_sums: what it multiplies are sums of products, and the sign of one near 0 is not clear.
    mixed: its lines in memory touch other lines of the result than their own.
    raw: numbers of 4 bits lie in it two a byte of K, and scales of powers of two as bytes: no number can be read off.
    only: what a scale of X stands for in problems that have it, where others have not.
    """

    name: str
    axes: str
    dtype: str = "dtype"
    layout: int | None = None
    weight: bool = False
    optional: bool = False
    scale_of: str = ""
    added: bool = False
    result: bool = False
    index: bool = False
    bent: bool = False
    of_sums: bool = False
    raw: bool = False
    mixed: bool = False
    only: str = ""

    def is_in(self, problem: Problem) -> bool:
        """Whether the problem has it."""
        if self.scale_of and (problem.wscale if self.weight else problem.scale) == "none":
            return False
        return (problem.bias or not self.optional) and self.only in ("", problem.scale)

    def has_codes(self, t: Tensor) -> bool:
        """Whether t, this operand, is of bytes that are no numbers by themselves."""
        return self.raw and t.dtype == torch.uint8

    def can_be_negated(self, t: Tensor) -> bool:
        """Whether t, this operand, has other values of the same sizes; bytes of powers of two have none in range."""
        return not (self.scale_of and self.has_codes(t))

    def torch_dtype(self, problem: Problem) -> torch.dtype:
        """The operand's dtype in this problem."""
        name = getattr(problem, self.dtype, self.dtype)
        return torch.uint8 if self.raw and name in _IN_BYTES else torch_dtype(name)

    def shape(self, problem: Problem) -> tuple[int, ...]:
        """The operand's sizes in this problem."""
        p = problem
        known = {
            "b": p.batch, "m": p.m, "n": p.n, "k": p.k, "e": p.experts or 1, "t": p.topk or 1, "i": p.inter or 1,
            "h": p.first_width,
        }  # fmt: skip
        sizes = tuple(known[x] for x in self.axes)
        if self.raw and _IN_BYTES.get(getattr(p, self.dtype, self.dtype)) == 2 and not self.scale_of:
            return tuple(size // 2 if axis in _REDUCED else size for axis, size in zip(self.axes, sizes, strict=True))
        if not self.scale_of:
            return sizes
        steps = self.steps(problem)
        if steps == (None, None):
            return ()
        return tuple(1 if step is None else -(-size // step) for size, step in zip(sizes, steps, strict=True))

    def steps(self, problem: Problem) -> tuple[int | None, ...]:
        """How many values along each axis one scale stands for; None is all of them, of one expert."""
        block = SCALED_BLOCKS[problem.wscale if self.weight else problem.scale]
        return tuple(1 if axis == "e" else block[1] if axis in _REDUCED else block[0] for axis in self.axes)

    @property
    def line_axis(self) -> str:
        """The axis along which lines of it decide over lines of the result: m or n, m where it has both.

        Empty for an operand that says where and not how much, and for one whose lines touch all of the result.
        """
        return "" if self.index or self.mixed else next((axis for axis in "mn" if axis in self.axes), "")

    def lines(self, t: Tensor) -> Tensor:
        """A view [..., lines, values] of it: what is in one line touches one line of the result."""
        if t.dim() == 0:
            return t.view(1, 1)
        if t.dim() == 1:
            return t.unsqueeze(-1)
        return t.mT if self.axes.index(self.line_axis) == len(self.axes) - 1 else t

    def per_line(self, marks: Tensor, problem: Problem) -> Tensor:
        """Marks of its lines as marks of the result's along `line_axis`: a scale's line may stand for several."""
        if not self.scale_of or not self.line_axis:
            return marks
        size = {"m": problem.m, "n": problem.n}[self.line_axis]
        step = self.steps(problem)[self.axes.index(self.line_axis)]
        return marks.expand(size) if step is None else marks.repeat_interleave(step)[:size]


@dataclass(frozen=True, slots=True)
class Inputs:
    """One set of operands by name, in the order of the family; buffers are the memory they lie in."""

    operands: tuple[Operand, ...]
    tensors: dict[str, Tensor]
    kind: str
    seed: int
    buffers: tuple[Tensor, ...]

    def __str__(self) -> str:
        return f"{self.kind} seed={self.seed}"

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[tuple[Operand, Tensor]]:
        """Every operand that is there, with its tensor."""
        return ((o, self.tensors[o.name]) for o in self.operands if o.name in self.tensors)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """What `bind` takes."""
        return tuple(self.tensors[o.name] for o in self.operands if o.weight and o.name in self.tensors)

    @property
    def activations(self) -> tuple[Tensor | None, ...]:
        """What `run` takes."""
        return tuple(self.tensors.get(o.name) for o in self.operands if not o.weight and not o.result)

    def having(self, **changed: Tensor) -> Inputs:
        """The same with other tensors in the place of some."""
        return replace(self, tensors={**self.tensors, **changed})

    def run(self, kernel: Kernel) -> Tensor:
        """One call of a kernel, bound anew."""
        return kernel.bind(*self.weights)(*self.activations)


@dataclass(frozen=True, slots=True)
class Sample:
    """The rows and columns of Y that the exact result is computed for."""

    rows: Tensor
    cols: Tensor

    def of(self, y: Tensor) -> Tensor:
        """These rows and columns of y [..., M, N]."""
        return y.index_select(-2, self.rows).index_select(-1, self.cols)


def negate_(t: Tensor) -> Tensor:
    """The tensor, negated in place; twice gives the first bits again. Bytes have every bit flipped: other codes."""
    if t.dtype == torch.uint8:
        return t.bitwise_xor_(0xFF)
    if bits(t) is not t:
        bits(t).bitwise_xor_(0x80)
        return t
    return t.neg_()


def negated(t: Tensor) -> Tensor:
    """A negated copy with the same strides."""
    return negate_(t.clone())


def lay_out(values: Tensor, letter: str, *, pad: int = 0) -> tuple[Tensor, Tensor]:
    """(values with the strides that the layout letter asks for, the buffer they lie in).

    `n` row-major, `t` column-major, `s` every second column of a wider buffer.  pad: how many rows and columns
    of NaN, or of the largest number of int8, are around them.
    """
    if letter == "t":
        turned, buffer = lay_out(values.mT, "n", pad=pad)
        return turned.mT, buffer
    if letter == "n" and not pad:
        values = values.contiguous()
        return values, values
    *batch, rows, cols = values.shape
    step = 2 if letter == "s" else 1
    filler = math.nan if values.is_floating_point() or values.is_complex() else 127 if values.dtype == torch.int8 else 0
    buffer = values.new_full((*batch, rows + 2 * pad, cols * step + 2 * pad), filler)
    view = buffer[..., pad : pad + rows, pad : pad + cols * step : step]
    view.copy_(values)
    return view, buffer


def spread_out(scale: Tensor, operand: Operand, problem: Problem, shape: tuple[int, ...]) -> Tensor:
    """Scales as a tensor that has one for each value of what they scale, or broadcasts to it."""
    for axis, step in enumerate(operand.steps(problem) if scale.dim() else ()):
        if step is not None and step > 1:
            scale = scale.repeat_interleave(step, axis).narrow(axis, 0, shape[axis])
    return scale
