"""scaled with zero points: int8 codes of X of which one stands for 0, one for all of X or one for each row.

Y = ((X @ W.T - zero_x * sums_w) * scale_w) * scale_x + bias, rounded once, where sums_w are the sums of W's rows: the
product of X - zero_x by way of that of X (Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", CVPR 2018, equation 7, with zero points of X alone), in whole numbers of 32 bits.
One zero point for all of X is multiplied into sums_w by the caller, as vLLM's cutlass_scaled_mm_azp takes it.  All else
is as in scaled.py, the kinds of inputs too; the zero points are any of the codes, of `integers` small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import ZERO_POINTS as KINDS_OF_X
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tunable import INT8, ZERO_POINTS
from gemmtuned.configs.tunable import SCALED_OUTPUTS as OUTPUTS
from gemmtuned.kernels.dtypes import torch_dtype, wide
from gemmtuned.kernels.families.operand import Inputs, Operand, Sample
from gemmtuned.kernels.families.scaled import Scaled
from gemmtuned.kernels.integers import scaled_int_product_into

_SMALL: Final = 4  # zero points of `integers`, so that fp32 holds every sum


class ScaledWithZeroPoints(Scaled):
    """What is different where X has zero points."""

    __slots__ = ()

    def check(self, problem: Problem) -> None:
        """As Family.check."""
        if (problem.dtype, problem.wdtype) != INT8 or (problem.scale, problem.wscale) not in ZERO_POINTS:
            known = ", ".join(f"{x} by {w}" for x, w in ZERO_POINTS)
            raise CandidateFailed(f"{problem}: family {self.name} has zero points of int8 by int8 with scales {known}")
        Scaled.check(self, problem)

    def tunable(self, device_kind: str) -> Iterator[str]:
        """As Family.tunable."""
        for out, (scale, wscale) in product(OUTPUTS, ZERO_POINTS):
            yield Problem(
                family=self.name, m=1, n=1, k=1, dtype=INT8[0], out_dtype=out, scale=scale, wscale=wscale
            ).operands

    def draw(self, problem: Problem, kind: str, seed: int, device: torch.device, *, weights: bool) -> dict[str, Tensor]:
        """As Family.draw."""
        found = Scaled.draw(self, problem, kind, seed, device, weights=weights)
        random = torch.Generator(device=device)
        if problem.scale == "row+zero":
            found["zero_x"] = _codes(problem.m, kind, random.manual_seed(2 * seed + 0x2E40))
        if weights:
            found["sums_w"] = found["w"].sum(0, dtype=torch.int32)
            if problem.scale == "tensor+zero":
                found["sums_w"] *= _codes(1, kind, random.manual_seed(2 * seed + 0x2E41))
        return found

    def reference(self, problem: Problem, inputs: Inputs, sample: Sample, w64: Tensor | None = None) -> Tensor:
        """As Family.reference."""
        scale_x, scale_w = wide(inputs["scale_x"]), wide(inputs["scale_w"])
        if scale_x.dim():
            scale_x = scale_x.index_select(0, sample.rows)
        if scale_w.dim():
            scale_w = scale_w.index_select(-1, sample.cols)
        less = wide(inputs["sums_w"]).index_select(0, sample.cols).unsqueeze(0)
        if problem.scale == "row+zero":
            less = less * wide(inputs["zero_x"]).index_select(0, sample.rows).unsqueeze(-1)
        return Scaled.reference(self, problem, inputs, sample, w64) - less * scale_x * scale_w


def _codes(count: int, kind: str, random: torch.Generator) -> Tensor:
    low, high = (-_SMALL, _SMALL) if kind == "integers" else (-128, 127)
    return torch.randint(low, high + 1, (count,), generator=random, device=random.device, dtype=torch.int32)


def _stock(problem: Problem) -> Callable[..., Tensor]:
    out = torch_dtype(problem.out_dtype)

    def exact(
        x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, zero_x: Tensor | None, sums_w: Tensor,
        bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        y = x.new_empty(x.shape[0], w.shape[1], dtype=out)
        return scaled_int_product_into(y, x, w.t(), scale_x, scale_w, bias, sums_w, zero_x)

    return exact


SCALED_WITH_ZERO_POINTS: Final = ScaledWithZeroPoints(
    "scaled",
    operands=(
        Operand("x", "mk", layout=0, bent=True),
        Operand("w", "kn", dtype="wdtype", layout=1, weight=True, bent=True),
        Operand("scale_x", "mk", dtype="scale_dtype", scale_of="x"),
        Operand("scale_w", "kn", dtype="wscale_dtype", scale_of="w", weight=True),
        Operand("zero_x", "m", dtype="i32", bent=True, only="row+zero"),
        Operand("sums_w", "n", dtype="i32", weight=True, bent=True),
        Operand("bias", "n", dtype="out_dtype", optional=True, added=True),
        Operand("y", "mn", dtype="out_dtype", result=True),
    ),
    stock=_stock,
    pad=16,
    replaces=lambda p: p.scale in KINDS_OF_X and p.weight_state == "plain",
)
FAMILIES: Final = (SCALED_WITH_ZERO_POINTS,)
