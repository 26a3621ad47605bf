"""weight_only: X of 16 bits by W of 8 or 4 bits with scales, as gemmtuned.ops.gemm_a16w8 and gemm_a16w4 call it.

Y = X @ (W * scale_w).T + bias, rounded once.  The stock call dequantises W into X's type at every call and multiplies
by F.linear; the exact result knows no rounding of W.  Of 4 bits two numbers lie in a byte, the lower first, and e8m0
scales are bytes: such weights are drawn as codes, nearly all of them alike, with scales of many sizes.

A scale counts as bent: far from 1 the numbers that the stock call makes with it are beyond what fp16 holds well.

Kinds of inputs beside those of base.py:
    apart      every scale is another power of two, 2^-4 to 2^4: a neighbour's scale cannot pass for the right one
    integers   small whole numbers and scales 2^-2 to 2^2: no sum is rounded in any order, so Y has one right value
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tunable import WEIGHT_ONLY, is_weight_only
from gemmtuned.kernels.dequantise import dequantised
from gemmtuned.kernels.dtypes import bits
from gemmtuned.kernels.families import quantised
from gemmtuned.kernels.families.base import Family, normal, shape_activations
from gemmtuned.kernels.families.operand import Inputs, Operand, Sample
from gemmtuned.kernels.families.quantised import APART, INTEGERS, quant_of


class WeightOnly(Family):
    """What is different where W alone is quantised."""

    __slots__ = ()

    def check(self, problem: Problem) -> None:
        """As Family.check."""
        p = problem
        if not is_weight_only(p):
            raise CandidateFailed(f"{p}: family {self.name} has X of 16 bits and W of 8 or 4 with their whole scales")
        if p.batch != 1 or p.weight_state != "plain" or p.layout[1] != "t":
            raise CandidateFailed(f"{p}: family {self.name} has plain weights by rows, and no batches")

    def tunable(self, device_kind: str) -> Iterator[str]:
        """As Family.tunable."""
        for (dtype, wdtype), scales in WEIGHT_ONLY.items():
            for wscale in dict.fromkeys(kind for kind, _ in scales):
                yield f"{self.name} {dtype}/{wdtype}>{dtype} none/{wscale} plain"

    def kinds(self, problem: Problem) -> tuple[str, ...]:
        """As Family.kinds."""
        return ("randn", "tail", "outliers", APART, INTEGERS)

    def is_exact(self, kind: str) -> bool:
        """As Family.is_exact."""
        return kind == INTEGERS

    def weights_of(self, kind: str) -> str:
        """As Family.weights_of."""
        return kind if kind in (APART, INTEGERS) else "randn"

    def lay(self, problem: Problem, operand: Operand, values: Tensor, *, pad: int = 0) -> tuple[Tensor, Tensor]:
        """As Family.lay. Scales lie by rows of what they scale, without gaps."""
        if not operand.scale_of:
            return Family.lay(self, problem, operand, values, pad=pad)
        turned = operand.weight and values.dim() == 2
        rows = values.mT if turned else values
        filler = math.nan if values.is_floating_point() else 0
        buffer = values.new_full((rows.numel() + 2 * pad,), filler)
        view = buffer[pad : pad + rows.numel()].view(rows.shape)
        view.copy_(rows)
        return (view.mT if turned else view), buffer

    def draw(self, problem: Problem, kind: str, seed: int, device: torch.device, *, weights: bool) -> dict[str, Tensor]:
        """As Family.draw."""
        found, x = {}, self.named("x")
        random = torch.Generator(device=device).manual_seed(2 * seed)
        values = normal(x.shape(problem), torch.float32, random)
        shape_activations(values, kind, random)
        found["x"] = (values.round_().clamp_(-2, 2) if kind == INTEGERS else values).to(x.torch_dtype(problem))
        if weights:
            random.manual_seed(2 * seed + 1)
            found["w"], found["scale_w"] = self._weights(problem, kind, random)
        return found | self.bias(problem, kind, random.manual_seed(2 * seed + 0x5EED))

    def bias(self, problem: Problem, kind: str, random: torch.Generator) -> dict[str, Tensor]:
        """The bias by its name, where the problem has one."""
        bias = self.named("bias")
        if not bias.is_in(problem):
            return {}
        drawn = normal(bias.shape(problem), torch.float32, random)
        return {"bias": (drawn.round_() if kind == INTEGERS else drawn).to(bias.torch_dtype(problem))}

    def _weights(self, problem: Problem, kind: str, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """(w, scale_w)."""
        w, scale = self.named("w"), self.named("scale_w")
        rows = quantised.drawn(problem, w.shape(problem)[::-1], w.torch_dtype(problem), kind, random)
        usual = 1.0 if kind == quantised.INTEGERS else problem.k**-0.5
        shape, dtype = scale.shape(problem), scale.torch_dtype(problem)
        return rows.mT, quantised.scales(problem, shape, dtype, kind, usual, random)

    def widen(self, problem: Problem, inputs: Inputs, sample: Sample) -> Tensor:
        """As Family.widen, dequantised."""
        w, scale = inputs["w"].mT, inputs["scale_w"]
        rows = bits(w).index_select(0, sample.cols).view(w.dtype)
        if problem.wscale == "128x128":
            blocks = scale.mT.index_select(0, sample.cols // 128).double()
            return (rows.double() * blocks.repeat_interleave(128, 1)[:, : problem.k]).mT
        of_rows = scale.mT.index_select(0, sample.cols) if scale.dim() == 2 else scale
        return dequantised(rows, of_rows, quant_of(problem), torch.float64).mT


def stock_linear(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, quant: str) -> Tensor:
    """X [.., K] by W [N, K or K / 2] dequantised into X's type; scale [N, groups], [N, 1], blocks, or one number."""
    return F.linear(x, dequantised(w, scale, quant, x.dtype, in_one_pass=True), bias)


def _stock(problem: Problem) -> Callable[..., Tensor]:
    quant = quant_of(problem)
    return lambda x, w, bias, scale: stock_linear(x, w.mT, scale.mT if scale.dim() == 2 else scale, bias, quant)


FAMILY: Final = WeightOnly(
    "weight_only",
    operands=(
        Operand("x", "mk", layout=0),
        Operand("w", "kn", dtype="wdtype", layout=1, weight=True, raw=True),
        Operand("bias", "n", dtype="out_dtype", optional=True, added=True),
        Operand("scale_w", "kn", dtype="wscale_dtype", scale_of="w", weight=True, raw=True, bent=True, of_sums=True),
        Operand("y", "mn", dtype="out_dtype", result=True),
    ),
    stock=_stock,
    pad=16,  # so that padded operands of 8 bits lie as ours are taken
)
FAMILIES: Final = (FAMILY,)
