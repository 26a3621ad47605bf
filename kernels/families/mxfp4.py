"""scaled of MXFP4 by MXFP4: X and W both hold 4 bits, as gemmtuned.ops.gemm_a4w4 takes them.

Y = (X * scale_x) @ (W * scale_w).T + bias, rounded once.  Codes are e2m1, two a byte along K with the lower first, and
a scale is a byte b for each 32 of K of a row, which stands for 2^(b - 127); 255 is NaN (OCP Microscaling Formats
Specification 1.0, sections 5.3.3 and 5.4.1).  torch's own form makes numbers of 16 bits of both at every call.

Kinds of inputs: as in weight_only.py, and X is drawn as W is, since neither has numbers of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tunable import MXFP4, WIDENED, is_mxfp4
from gemmtuned.kernels.dequantise import dequantised
from gemmtuned.kernels.dtypes import torch_dtype
from gemmtuned.kernels.families import quantised
from gemmtuned.kernels.families.operand import Inputs, Operand, Sample
from gemmtuned.kernels.families.quantised import INTEGERS
from gemmtuned.kernels.families.weight_only import WeightOnly

_KIND: Final = "1x32"
_TAIL: Final = 6  # powers of two by which the last scales of `tail` are larger
_OUTLIERS: Final = 0.01  # share of X's scales
_TYPE: Final = "mxfp4"  # as `dequantised` calls it


class Mxfp4(WeightOnly):
    """What is different where both operands hold 4 bits."""

    __slots__ = ()

    def check(self, problem: Problem) -> None:
        """As Family.check."""
        if not is_mxfp4(problem):
            raise CandidateFailed(
                f"{problem}: products of fp4_e2m1 have plain operands of layout nt with e8m0 scales of 1x32 in rows, "
                f"K a multiple of 32, into {' or '.join(WIDENED)}, and no batches"
            )

    def tunable(self, device_kind: str) -> Iterator[str]:
        """As Family.tunable."""
        for out in WIDENED:
            yield Problem(
                family=self.name, m=1, n=1, k=32, dtype=MXFP4[0], wdtype=MXFP4[1], out_dtype=out, scale=_KIND
            ).operands

    def draw(self, problem: Problem, kind: str, seed: int, device: torch.device, *, weights: bool) -> dict[str, Tensor]:
        """As Family.draw."""
        random = torch.Generator(device=device).manual_seed(2 * seed)
        found = {}
        found["x"], found["scale_x"] = self._codes(problem, kind, random, ("x", "scale_x"), 1.0)
        if kind == "tail":  # whole blocks of K, so that a dropped one is noticed
            found["scale_x"][:, -2:] += _TAIL
        elif kind == "outliers":
            rare = torch.rand(found["scale_x"].shape, generator=random, device=random.device) < _OUTLIERS
            found["scale_x"] += rare.to(torch.uint8) * _TAIL
        if weights:
            random.manual_seed(2 * seed + 1)
            size = 1.0 if kind == INTEGERS else problem.k**-0.5
            w, scale = self._codes(problem, kind, random, ("w", "scale_w"), size)
            found["w"], found["scale_w"] = w.mT, scale.mT
        return found | self.bias(problem, kind, random.manual_seed(2 * seed + 0x5EED))

    def _codes(
        self, problem: Problem, kind: str, random: torch.Generator, names: tuple[str, str], size: float
    ) -> tuple[Tensor, Tensor]:
        """(codes, scales) by rows of X, or of W."""
        of, of_scale = (self.named(name) for name in names)
        shape, many = of.shape(problem), of_scale.shape(problem)
        if of.weight:
            shape, many = shape[::-1], many[::-1]
        codes = quantised.drawn(problem, shape, torch.uint8, kind, random)
        return codes, quantised.scales(problem, many, torch.uint8, kind, size, random, wide=1)

    def widen(self, problem: Problem, inputs: Inputs, sample: Sample) -> Tensor:
        """As Family.widen, dequantised."""
        return _numbers(inputs["w"].mT, inputs["scale_w"].mT, sample.cols).mT

    def x_rows(self, problem: Problem, inputs: Inputs, sample: Sample) -> Tensor:
        """As Family.x_rows, dequantised."""
        return _numbers(inputs["x"], inputs["scale_x"], sample.rows)


def _numbers(codes: Tensor, scales: Tensor, some: Tensor) -> Tensor:
    return dequantised(codes.index_select(0, some), scales.index_select(0, some), _TYPE, torch.float64)


def stock_product(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [M, K / 2] by w [N, K / 2] as numbers of `dtype`; scales [M, K / 32] and [N, K / 32], bias [N] of it."""
    return F.linear(dequantised(x, of_x, _TYPE, dtype), dequantised(w, of_w, _TYPE, dtype), bias)


def _stock(problem: Problem) -> Callable[..., Tensor]:
    out = torch_dtype(problem.out_dtype)
    return lambda x, w, scale_x, scale_w, bias: stock_product(x, w.mT, scale_x, scale_w.mT, bias, out)


SCALED_MXFP4: Final = Mxfp4(
    "scaled",
    operands=(
        Operand("x", "mk", layout=0, raw=True),
        Operand("w", "kn", dtype="wdtype", layout=1, weight=True, raw=True),
        Operand("scale_x", "mk", dtype="scale_dtype", scale_of="x", raw=True, bent=True),
        Operand("scale_w", "kn", dtype="wscale_dtype", scale_of="w", weight=True, raw=True, bent=True),
        Operand("bias", "n", dtype="out_dtype", optional=True, added=True),
        Operand("y", "mn", dtype="out_dtype", result=True),
    ),
    stock=_stock,
    pad=16,
    replaces=lambda p: (p.dtype, p.wdtype) == MXFP4,
)
FAMILIES: Final = (SCALED_MXFP4,)
