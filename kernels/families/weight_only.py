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
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tunable import WEIGHT_ONLY as KNOWN
from gemmtuned.kernels.families.base import Family, normal, shape_activations
from gemmtuned.kernels.families.operand import Inputs, Operand, Sample, bits
from gemmtuned.kernels.mixture import dequantised

QUANTS: Final = {"i4": "int4", "fp4_e2m1": "mxfp4"}  # as mixture.dequantised calls them; others by their scales
_OWN_WEIGHTS: Final = ("apart", "integers")
_RMS: Final = {"i4": 4.2, "fp4_e2m1": 2.926}  # of the values of all codes


class WeightOnly(Family):
    """What is different where W alone is quantised."""

    __slots__ = ()

    def check(self, problem: Problem) -> None:
        """As Family.check."""
        p = problem
        if (p.wscale, p.wscale_dtype) not in KNOWN.get((p.dtype, p.wdtype), ()) or p.out_dtype != p.dtype:
            raise CandidateFailed(f"{p}: family {self.name} has X of 16 bits and W of 8 or 4 with their scales")
        if p.scale != "none" or p.batch != 1 or p.weight_state != "plain" or p.wscale_layout != "row":
            raise CandidateFailed(f"{p}: family {self.name} has plain weights with scales in rows, and no batches")
        if p.layout[1] != "t" or (p.wdtype in QUANTS and p.k % group_of(p)):
            raise CandidateFailed(f"{p}: family {self.name} has W by rows, and K that is whole groups")

    def tunable(self, device_kind: str) -> Iterator[str]:
        """As Family.tunable."""
        for (dtype, wdtype), scales in KNOWN.items():
            for wscale in dict.fromkeys(kind for kind, _ in scales):
                yield f"{self.name} {dtype}/{wdtype}>{dtype} none/{wscale} plain"

    def kinds(self, problem: Problem) -> tuple[str, ...]:
        """As Family.kinds."""
        return ("randn", "tail", "outliers", "apart", "integers")

    def is_exact(self, kind: str) -> bool:
        """As Family.is_exact."""
        return kind == "integers"

    def weights_of(self, kind: str) -> str:
        """As Family.weights_of."""
        return kind if kind in _OWN_WEIGHTS else "randn"

    def lay(self, problem: Problem, operand: Operand, values: Tensor, *, pad: int = 0) -> tuple[Tensor, Tensor]:
        """As Family.lay. Scales lie by rows of W without gaps."""
        if not operand.scale_of:
            return Family.lay(self, problem, operand, values, pad=pad)
        rows = values.mT if values.dim() == 2 else values
        filler = math.nan if values.is_floating_point() else 0
        buffer = values.new_full((rows.numel() + 2 * pad,), filler)
        view = buffer[pad : pad + rows.numel()].view(rows.shape)
        view.copy_(rows)
        return (view.mT if values.dim() == 2 else view), buffer

    def draw(self, problem: Problem, kind: str, seed: int, device: torch.device, *, weights: bool) -> dict[str, Tensor]:
        """As Family.draw."""
        found = {}
        x, bias = self.named("x"), self.named("bias")
        random = torch.Generator(device=device).manual_seed(2 * seed)
        values = normal(x.shape(problem), torch.float32, random)
        shape_activations(values, kind, random)
        found["x"] = (values.round_().clamp_(-2, 2) if kind == "integers" else values).to(x.torch_dtype(problem))
        if weights:
            random.manual_seed(2 * seed + 1)
            found["w"], found["scale_w"] = self._weights(problem, kind, random)
        if problem.bias:
            random.manual_seed(2 * seed + 0x5EED)
            drawn = normal(bias.shape(problem), torch.float32, random)
            found["bias"] = (drawn.round_() if kind == "integers" else drawn).to(bias.torch_dtype(problem))
        return found

    def _weights(self, problem: Problem, kind: str, random: torch.Generator) -> tuple[Tensor, Tensor]:
        p = problem
        of: Any = {"generator": random, "device": random.device}
        w, scale = self.named("w"), self.named("scale_w")
        most = {"apart": 4, "integers": 2}.get(kind, 1 if p.wdtype in QUANTS else 0)
        powers = torch.randint(-most, most + 1, scale.shape(p), **of).float()
        usual = 1.0 if kind == "integers" else p.k**-0.5
        if p.wdtype in QUANTS:
            codes = torch.randint(0, 256, w.shape(p)[::-1], dtype=torch.uint8, **of)
            if p.wdtype == "i4":  # -8 has no counterpart: as often as others it would keep sums from being around 0
                rare = torch.randint(0, 64, codes.shape, dtype=torch.uint8, **of) == 0
                codes = torch.where((codes & 0x0F == 0) & ~rare, codes | 0x08, codes)
                codes = torch.where((codes & 0xF0 == 0) & ~rare, codes | 0x80, codes)
            codes = codes.mT
            exponent = math.floor(math.log2(usual / _RMS[p.wdtype])) if kind != "integers" else 0
            if p.wscale_dtype == "e8m0":
                return codes, (powers + exponent + 127).to(torch.uint8)
            factor = 1.0 if kind == "integers" else usual / _RMS[p.wdtype]
            return codes, (torch.exp2(powers) * factor).to(scale.torch_dtype(p))
        dtype = w.torch_dtype(p)
        if kind == "integers":
            whole = torch.randint(-2, 3, w.shape(p)[::-1], **of).mT.float()
            return whole.to(dtype), torch.exp2(powers)
        drawn = normal(w.shape(p)[::-1], torch.float32, random).mT * 32  # far from the ends of both types
        rounded = drawn.to(dtype) if dtype.is_floating_point else drawn.round_().clamp_(-127, 127).to(dtype)
        return rounded, torch.exp2(powers) * (usual / 32)

    def widen(self, problem: Problem, inputs: Inputs, sample: Sample) -> Tensor:
        """As Family.widen, dequantised."""
        w, scale = inputs["w"].mT, inputs["scale_w"]
        rows = bits(w).index_select(0, sample.cols).view(w.dtype)
        if problem.wscale == "128x128":
            blocks = scale.mT.index_select(0, sample.cols // 128).double()
            return (rows.double() * blocks.repeat_interleave(128, 1)[:, : problem.k]).mT
        of_rows = scale.mT.index_select(0, sample.cols) if scale.dim() == 2 else scale
        return dequantised(rows, of_rows, quant_of(problem), torch.float64).mT


def quant_of(problem: Problem) -> str:
    """What mixture.dequantised calls this weight."""
    return QUANTS.get(problem.wdtype, problem.wscale)


def group_of(problem: Problem) -> int:
    """Values of K with one scale, of 4 bits."""
    return int(problem.wscale.partition("x")[2])


def stock_linear(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None, quant: str) -> Tensor:
    """X [.., K] by W [N, K or K / 2] dequantised into X's type; scale [N, groups], [N, 1], blocks, or one number."""
    return F.linear(x, dequantised(w, scale, quant, x.dtype), bias)


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
