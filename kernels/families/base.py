"""A family of problems: its operands, torch's own call, the inputs for tests of a kernel, and the exact result.

The kinds of inputs (each has found faults that the others do not):
    randn      what a layer sees
    tail       the last 64 columns of X and one random block of 64 are x64, so that a dropped K tail is noticed
    outliers   1 % of X is x100, as in activations of language models
    padded     randn, but every operand is a slice of a larger buffer of NaN, at an odd offset, so that a read beside
               it is noticed
edits.py writes zero rows, large and small magnitudes, NaN and Inf into such inputs, in place.
Inputs are never all positive: the effect of a lost K tail on positive numbers is smaller than rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tunable import WIDENED, widens
from gemmtuned.kernels.dtypes import UNIT_ROUNDOFF, bits, torch_dtype, wide
from gemmtuned.kernels.families.operand import Inputs, Operand, Sample, lay_out
from gemmtuned.kernels.kernel import StatelessKernel

KINDS: Final = ("randn", "tail", "outliers")  # the kinds on which errors are measured
PADDED: Final = "padded"
SAMPLED_ROWS: Final = 64
SAMPLED_WEIGHTS: Final = 1 << 25  # the most elements of W in fp64 (256 MiB); of a larger W columns are sampled
_BLOCK: Final = 64  # columns of X made large by `tail`: the usual K tile


@dataclass(frozen=True, slots=True)
class Family:
    """Y = X @ W.T (plus a bias or C), with or without a batch axis; subclasses say what differs.

    operands: in the order of the slots by which kernels are launched.  stock: torch's call, with all operands but the
    result in their order, which is the default of every race.  pad: rows and columns of NaN around padded operands.
    replaces: problems of its name that it is for, if there is another family of that name for all others.
    """

    name: str
    operands: tuple[Operand, ...]
    stock: Callable[[Problem], Callable[..., Tensor]]
    weight_states: tuple[str, ...] = ("plain",)
    pad: int = 3  # makes leading dimensions and offsets odd
    routed: bool = False  # rows are dealt out to weights at random, with the activations, which decides a call's time
    replaces: Callable[[Problem], bool] | None = None
    widens: bool = False  # 16-bit operands may have a result in fp32, as from torch.mm(..., out_dtype=) on GPUs

    def check(self, problem: Problem) -> None:
        """Raises CandidateFailed for a problem whose inputs this family cannot make."""
        widened = self.widens and not problem.bias and not problem.threads and widens(problem)
        alike = problem.wdtype == problem.dtype and (problem.out_dtype == problem.dtype or widened)
        if not alike or problem.scale != "none":
            raise CandidateFailed(f"{problem}: mixed dtypes and scales are not supported by family {self.name}")
        if torch_dtype(problem.dtype).is_floating_point and torch_dtype(problem.dtype).itemsize == 1:
            raise CandidateFailed(f"{problem}: dtype {problem.dtype} has scales, which family {self.name} has not")

    def tunable(self, device_kind: str) -> Iterator[str]:
        """The kinds of operands that can be tuned, as texts of Problem.operands: those whose allowed error is known."""
        for dtype in (name for name, rounding in UNIT_ROUNDOFF.items() if rounding):
            for state in self.weight_states if device_kind == "cpu" else ("plain",):
                yield Problem(family=self.name, m=1, n=1, k=1, dtype=dtype, weight_state=state).operands
        for dtype in WIDENED if self.widens and device_kind != "cpu" else ():
            yield Problem(family=self.name, m=1, n=1, k=1, dtype=dtype, out_dtype="fp32").operands

    def default(self, problem: Problem) -> StatelessKernel:
        """Torch's own call as a kernel."""
        return StatelessKernel(self.stock(problem))

    def kinds(self, problem: Problem) -> tuple[str, ...]:
        """The kinds of inputs on which errors are measured, randn first."""
        return KINDS

    def weights_of(self, kind: str) -> str:
        """Kinds with the same value here have the same weights for a seed."""
        return "randn"

    def is_exact(self, kind: str) -> bool:
        """Whether only one result is right on this kind of inputs; bits are compared if torch's result is that one."""
        return False

    def named(self, name: str) -> Operand:
        """The operand of this name."""
        return next(o for o in self.operands if o.name == name)

    def make(
        self, problem: Problem, *, kind: str, seed: int, device: torch.device, weights: Sequence[Tensor] = ()
    ) -> Inputs:
        """Operands of this kind, the same ones for the same seed.

        weights: use the values of these instead of new ones, in the family's order, laid out as the problem asks; the
        tensors themselves if possible.  Raises CandidateFailed when the family does not know the problem.
        """
        self.check(problem)
        pad = self.pad if kind == PADDED else 0
        values = self.draw(problem, kind, seed, device, weights=not weights)
        given = iter(weights)
        tensors: dict[str, Tensor] = {}
        buffers = []
        for o in self.operands:
            if o.result or not o.is_in(problem):
                continue
            t = next(given) if o.weight and weights else values[o.name]
            if not (o.weight and weights) or pad:
                t, buffer = self.lay(problem, o, t.clone() if o.weight and weights else t, pad=pad)
            else:
                buffer = t
            tensors[o.name] = t
            buffers.append(buffer)
        return Inputs(self.operands, tensors, kind, seed, tuple(buffers))

    def lay(self, problem: Problem, operand: Operand, values: Tensor, *, pad: int = 0) -> tuple[Tensor, Tensor]:
        """(the values with the layout of this operand in the problem, their whole buffer); pad: as for lay_out."""
        letter = "n" if operand.layout is None else problem.layout[operand.layout]
        if values.dim() < 2:
            row, buffer = lay_out(values.reshape(1, -1), letter, pad=pad)
            return row[0].view(values.shape), buffer
        return lay_out(values, letter, pad=pad)

    def draw(self, problem: Problem, kind: str, seed: int, device: torch.device, *, weights: bool) -> dict[str, Tensor]:
        """The values of every operand in its dtype, by name; weights only if they are asked for."""
        # one random stream for X and one for W, so that X does not depend on whether weights are given
        random = torch.Generator(device=device).manual_seed(2 * seed)
        found = {}
        for o in self.operands:
            dtype = o.torch_dtype(problem)
            if o.name == "x":
                x = normal(o.shape(problem), dtype, random)
                shape_activations(x, kind, random)
                found["x"] = x.to(dtype)
            elif o.name == "w" and weights:
                random.manual_seed(2 * seed + 1)
                # Y is then about N(0, 1), as for a layer after its initialisation, and does not overflow in fp16
                *batch, k, n = o.shape(problem)
                found["w"] = normal((*batch, n, k), dtype, random, scale=k**-0.5).to(dtype).mT
            elif o.added and o.is_in(problem):
                random = torch.Generator(device=device).manual_seed(2 * seed + 0x5EED)
                found[o.name] = normal(o.shape(problem), dtype, random).to(dtype)
        return found

    def weight_copies(self, problem: Problem, *, count: int, device: torch.device) -> list[tuple[Tensor, ...]]:
        """`count` times all weights with the same values, each in memory of its own."""
        first = self.make(problem.with_m(1), kind="randn", seed=0, device=device)
        kinds = [(o, t) for o, t in first if o.weight]
        return [
            first.weights,
            *(tuple(self.lay(problem, o, t.clone())[0] for o, t in kinds) for _ in range(count - 1)),
        ]

    def weight_bytes(self, problem: Problem) -> int:
        """Bytes of all weights together."""
        weights = (o for o in self.operands if o.weight and o.is_in(problem))
        return sum(torch.Size(o.shape(problem)).numel() * o.torch_dtype(problem).itemsize for o in weights)

    def rows(self, problem: Problem, inputs: Inputs, index: Tensor) -> tuple[Tensor | None, ...]:
        """The activations of only these rows of X, each in memory of its own, with the problem's layout.

        problem: its m is the number of rows of the inputs.
        """
        tensors = dict(inputs.tensors)
        for o, t in inputs:
            axis = o.axes.find("m")
            if axis >= 0 and not o.weight and t.dim() and t.shape[axis] > 1:
                tensors[o.name] = self.lay(problem, o, t.index_select(axis, index))[0]
        return inputs.having(**tensors).activations

    def sample(self, problem: Problem, *, seed: int, device: torch.device) -> Sample:
        """Which rows and columns to check: all if there are few (64 rows, SAMPLED_WEIGHTS), else some."""
        random = torch.Generator().manual_seed(seed)
        width = max(SAMPLED_WEIGHTS // (problem.k * problem.batch), 16)
        rows = _some(problem.m, SAMPLED_ROWS, random)
        return Sample(rows.to(device), _some(problem.n, width, random).to(device))

    def widen(self, problem: Problem, inputs: Inputs, sample: Sample) -> Tensor:
        """The sampled columns of W in fp64: the costly part of the reference, shared by inputs of the same weights."""
        rows = bits(inputs["w"].mT).index_select(-2, sample.cols)  # by rows of W: ten times faster for layout nt
        return wide(rows.view(inputs["w"].dtype)).mT

    def x_rows(self, problem: Problem, inputs: Inputs, sample: Sample) -> Tensor:
        """The sampled rows of X in fp64."""
        rows = bits(inputs["x"]).index_select(-2, sample.rows)
        return wide(rows.view(inputs["x"].dtype))

    def reference(self, problem: Problem, inputs: Inputs, sample: Sample, w64: Tensor | None = None) -> Tensor:
        """The exact result in fp64 on the sampled rows and columns; w64: the result of widen() for the same weights."""
        w64 = self.widen(problem, inputs, sample) if w64 is None else w64
        y = self.x_rows(problem, inputs, sample) @ w64
        for o, t in inputs:
            if o.added:
                y = y + wide(sample.of(t) if "m" in o.axes else t.index_select(0, sample.cols))
        return y


def normal(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator, *, scale: float = 1.0) -> Tensor:
    """Normal numbers in fp32, or fp64 for an fp64 dtype; small integers for integer dtypes."""
    if not dtype.is_floating_point and not dtype.is_complex:
        low = 0 if dtype == torch.uint8 else -3
        return torch.randint(low, 4, shape, generator=random, device=random.device)
    drawn = torch.float32 if dtype.itemsize <= 2 else dtype
    return torch.empty(shape, dtype=drawn, device=random.device).normal_(generator=random).mul_(scale)


def shape_activations(x: Tensor, kind: str, random: torch.Generator) -> None:
    """Turn normal activations into those of this kind."""
    k = x.shape[-1]
    if kind == "tail":
        x[..., -_BLOCK:] *= 64
        start = int(torch.randint(0, -(-k // _BLOCK), (), generator=random, device=random.device)) * _BLOCK
        x[..., start : start + _BLOCK] *= 64
    elif kind == "outliers":
        x[torch.rand(x.shape, generator=random, device=random.device) < 0.01] *= 100


def _some(size: int, limit: int, random: torch.Generator) -> Tensor:
    """Sorted indices: all, or `limit` of them, with an eighth from each end and the middle, which may be huge."""
    if size <= limit:
        return torch.arange(size)
    edge = limit // 8
    inner = edge + torch.randperm(size - 2 * edge, generator=random)[: limit - 2 * edge]
    if not bool((inner == size // 2).any()):
        inner[0] = size // 2
    return torch.cat([torch.arange(edge), inner.sort().values, torch.arange(size - edge, size)])
