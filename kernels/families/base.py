"""A family: the inputs a GEMM of its kind is tried with, and the exact result.

Operands are those of aten's call: a is [M, K], b is [K, N] (for a linear layer the view W.t()), with a batch
axis in front in batched families.  They lie in memory as the problem's layout says.

The kinds of inputs (each was seen to catch what the others hide):
    randn      what a layer sees
    tail       the last 64 and one random block of 64 columns of X are x64: a dropped K tail cannot hide
    outliers   1 % of X is x100, as activations of language models are
    padded     randn, but every operand is a slice of a larger buffer of NaN, at an odd offset: reading beside it shows
Zero rows, magnitudes, NaN and Inf are written into such inputs where they lie: see edits.py.
Inputs are never all positive: on positive numbers a lost K tail is smaller than rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.dtypes import UNIT_ROUNDOFF, torch_dtype, wide

KINDS: Final = ("randn", "tail", "outliers")  # those that errors are measured on
PADDED: Final = "padded"
SAMPLED_ROWS: Final = 64
SAMPLED_WEIGHTS: Final = 1 << 25  # elements of W widened to fp64 at once (256 MiB); beyond it columns are sampled
_BLOCK: Final = 64  # columns of X made large by `tail`: the usual K tile


@dataclass(frozen=True, slots=True)
class Inputs:
    """One set of operands. bias is [N], or a full C in the `_add` families; buffers are the memory they lie in."""

    a: Tensor
    b: Tensor
    bias: Tensor | None
    kind: str
    seed: int
    buffers: tuple[Tensor, ...]

    def __str__(self) -> str:
        return f"{self.kind} seed={self.seed}"


@dataclass(frozen=True, slots=True)
class Sample:
    """The rows and columns of Y that the exact result is computed for."""

    rows: Tensor
    cols: Tensor

    def of(self, y: Tensor) -> Tensor:
        """These rows and columns of y [..., M, N]."""
        return y.index_select(-2, self.rows).index_select(-1, self.cols)


@dataclass(frozen=True, slots=True)
class Family:
    """Y = X @ W.T (+ bias), with or without a batch axis.

    adds: the third operand is a full C [M, N], as in addmm and baddbmm, and not a bias [N].
    """

    name: str
    batched: bool = False
    adds: bool = False

    def check(self, problem: Problem) -> None:
        """Raises CandidateFailed for a problem whose inputs this family cannot make."""
        if problem.family != self.name:
            raise CandidateFailed(f"{problem} is of family {problem.family}, not {self.name}")
        if problem.wdtype != problem.dtype or problem.out_dtype != problem.dtype or problem.scale != "none":
            raise CandidateFailed(f"{problem}: mixed dtypes and scales are not supported by family {self.name}")
        torch_dtype(problem.dtype)

    def tunable(self) -> Iterator[str]:
        """The kinds of operands that can be tuned, as Problem.operands says them: how exact they must be is known."""
        states = ("plain", "packed") if self.name == "dense" else ("plain",)  # gemmtuned.freeze packs linear layers
        for dtype in UNIT_ROUNDOFF:
            for state in states:
                yield Problem(family=self.name, m=1, n=1, k=1, dtype=dtype, weight_state=state).operands

    def make(
        self, problem: Problem, *, kind: str, seed: int, device: torch.device, weight: Tensor | None = None
    ) -> Inputs:
        """Operands of this kind, the same ones for the same seed.

        weight: use the values of this b, laid out as asked, instead of new ones; the tensor itself where it can be.
        Raises CandidateFailed when the family does not know the problem.
        """
        self.check(problem)
        padded = kind == PADDED
        batch = (problem.batch,) if self.batched else ()
        dtype = torch_dtype(problem.dtype)
        # One stream of numbers for X, one for W: X does not change with the weight handed in
        random = torch.Generator(device=device).manual_seed(2 * seed)
        x = _draw((*batch, problem.m, problem.k), dtype, random)
        _shape_activations(x, kind, random)
        a, a_buffer = lay_out(x.to(dtype), problem.layout[0], padded=padded)
        if weight is None:
            random.manual_seed(2 * seed + 1)
            # Y is then about N(0, 1), as after a layer's initialisation, and fp16 cannot overflow
            w = _draw((*batch, problem.n, problem.k), dtype, random, scale=problem.k**-0.5)
            b, b_buffer = lay_out(w.to(dtype).mT, problem.layout[1], padded=padded)
        elif padded:
            b, b_buffer = lay_out(weight.clone(), problem.layout[1], padded=padded)
        else:
            b = b_buffer = weight
        bias, bias_buffer = self._third(problem, device, seed, padded=padded)
        return Inputs(a, b, bias, kind, seed, (a_buffer, b_buffer, bias_buffer))

    def weight_copies(self, problem: Problem, *, count: int, device: torch.device) -> list[Tensor]:
        """`count` operands b with the same values, each in memory of its own."""
        first = self.make(problem.with_m(1), kind="randn", seed=0, device=device).b
        return [first, *(lay_out(first.clone(), problem.layout[1])[0] for _ in range(count - 1))]

    def sample(self, problem: Problem, *, seed: int, device: torch.device) -> Sample:
        """All rows up to 64 of them, all columns up to SAMPLED_WEIGHTS; beyond that first, last and random ones."""
        random = torch.Generator().manual_seed(seed)
        width = max(SAMPLED_WEIGHTS // (problem.k * problem.batch), 16)
        rows = _some(problem.m, SAMPLED_ROWS, random)
        return Sample(rows.to(device), _some(problem.n, width, random).to(device))

    def widen(self, inputs: Inputs, sample: Sample) -> Tensor:
        """The sampled columns of b in fp64: the costly part of the reference, shared by inputs that share b."""
        return wide(inputs.b.mT.index_select(-2, sample.cols)).mT  # by rows of W: ten times faster for layout nt

    def reference(self, inputs: Inputs, sample: Sample, b64: Tensor | None = None) -> Tensor:
        """The exact result in fp64 on the sampled rows and columns; b64 is what widen() gave for the same b."""
        b64 = self.widen(inputs, sample) if b64 is None else b64
        y = wide(inputs.a.index_select(-2, sample.rows)) @ b64
        if inputs.bias is None:
            return y
        if self.adds:
            return y + wide(sample.of(inputs.bias))
        return y + wide(inputs.bias.index_select(0, sample.cols))

    def _third(
        self, problem: Problem, device: torch.device, seed: int, *, padded: bool
    ) -> tuple[Tensor | None, Tensor]:
        dtype = torch_dtype(problem.dtype)
        random = torch.Generator(device=device).manual_seed(2 * seed + 0x5EED)
        if self.adds:
            shape = (problem.batch, problem.m, problem.n) if self.batched else (problem.m, problem.n)
            return lay_out(_draw(shape, dtype, random).to(dtype), "n", padded=padded)
        if not problem.bias:
            return None, torch.empty(0, device=device)
        bias, buffer = lay_out(_draw((1, problem.n), dtype, random).to(dtype), "n", padded=padded)
        return bias[0], buffer


def lay_out(values: Tensor, letter: str, *, padded: bool = False) -> tuple[Tensor, Tensor]:
    """(values with the strides that the layout letter asks for, the buffer they lie in).

    `n` row-major, `t` column-major, `s` every second column of a wider buffer.  padded: with three rows and
    columns of NaN around them, so that the leading dimension and the offset are odd.
    """
    if letter == "t":
        turned, buffer = lay_out(values.mT, "n", padded=padded)
        return turned.mT, buffer
    if letter == "n" and not padded:
        values = values.contiguous()
        return values, values
    *batch, rows, cols = values.shape
    pad, step = (3 if padded else 0), (2 if letter == "s" else 1)
    filler = math.nan if values.is_floating_point() or values.is_complex() else 0
    buffer = values.new_full((*batch, rows + 2 * pad, cols * step + 2 * pad), filler)
    view = buffer[..., pad : pad + rows, pad : pad + cols * step : step]
    view.copy_(values)
    return view, buffer


def _draw(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator, *, scale: float = 1.0) -> Tensor:
    """Normal numbers in the widest type that matters; small integers for integer dtypes."""
    if not dtype.is_floating_point and not dtype.is_complex:
        low = 0 if dtype == torch.uint8 else -3
        return torch.randint(low, 4, shape, generator=random, device=random.device)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return torch.empty(shape, dtype=wide, device=random.device).normal_(generator=random).mul_(scale)


def _shape_activations(x: Tensor, kind: str, random: torch.Generator) -> None:
    k = x.shape[-1]
    if kind == "tail":
        x[..., -_BLOCK:] *= 64
        start = int(torch.randint(0, -(-k // _BLOCK), (), generator=random, device=random.device)) * _BLOCK
        x[..., start : start + _BLOCK] *= 64
    elif kind == "outliers":
        x[torch.rand(x.shape, generator=random, device=random.device) < 0.01] *= 100


def _some(size: int, limit: int, random: torch.Generator) -> Tensor:
    """Sorted indices: all, or `limit` of them with the first and last eighth of the limit among them."""
    if size <= limit:
        return torch.arange(size)
    edge = limit // 8
    inner = edge + torch.randperm(size - 2 * edge, generator=random)[: limit - 2 * edge]
    return torch.cat([torch.arange(edge), inner.sort().values, torch.arange(size - edge, size)])
