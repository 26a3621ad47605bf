"""grouped with scales: _scaled_grouped_mm of fp8, a value for each row of X and one for each row of every group's W.

Y[r] = (X[r] * scale_x[r]) @ (W[g] * scale_w[g]), rounded once to bf16, for the rows r of group g.  It is the family
grouped, whose problems have operands more where they have scales: groups and their sizes are as in grouped.py, numbers,
scales and the kinds of inputs as in scaled.py, shorter sums (use_fast_accum) among them.  torch has it on GPUs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import ZERO_POINTS, Problem
from gemmtuned.configs.tunable import GROUPED_SCALED, is_scaled_grouped
from gemmtuned.kernels.dtypes import bits, torch_dtype, wide
from gemmtuned.kernels.families.base import Family, normal
from gemmtuned.kernels.families.grouped import Grouped, ends_of_groups
from gemmtuned.kernels.families.operand import Inputs, Operand, Sample
from gemmtuned.kernels.families.scaled import SCALED, with_scales


class ScaledGrouped(Grouped):
    """What is different where groups have scales."""

    __slots__ = ()

    def check(self, problem: Problem) -> None:
        """As Family.check."""
        if not is_scaled_grouped(problem):
            raise CandidateFailed(
                f"{problem}: family {self.name} has fp8_e4m3 into bf16 with fp32 scales by rows, layout nt, and no bias"
            )

    def tunable(self, device_kind: str) -> Iterator[str]:
        """As Family.tunable."""
        dtype, out, scale = GROUPED_SCALED
        if device_kind != "cpu":
            yield Problem(family=self.name, m=1, n=1, k=1, dtype=dtype, out_dtype=out, scale=scale).operands

    def kinds(self, problem: Problem) -> tuple[str, ...]:
        """As Family.kinds."""
        return SCALED.kinds(problem)

    def is_exact(self, kind: str) -> bool:
        """As Family.is_exact."""
        return SCALED.is_exact(kind)

    def weights_of(self, kind: str) -> str:
        """As Family.weights_of."""
        return SCALED.weights_of(kind)

    def draw(self, problem: Problem, kind: str, seed: int, device: torch.device, *, weights: bool) -> dict[str, Tensor]:
        """As Family.draw; the weights one group at a time, for in fp32 a mixture's have no room."""
        found = SCALED.draw(problem, kind, seed, device, weights=False)
        found["scale_x"] = found["scale_x"].flatten()
        found["offs"] = ends_of_groups(problem, seed).to(device)
        if weights:
            random = torch.Generator(device=device).manual_seed(2 * seed + 1)
            w, scale_w = (self.named(name) for name in ("w", "scale_w"))
            groups, k, n = w.shape(problem)
            rows = torch.empty(groups, n, k, dtype=w.torch_dtype(problem), device=device)
            scales = torch.empty(scale_w.shape(problem), device=device)
            for g in range(groups):
                values = normal((n, k), torch.float32, random, scale=k**-0.5).mT
                drawn, scale = with_scales(problem, SCALED.named("w"), SCALED.named("scale_w"), values, kind, random)
                bits(rows)[g] = bits(drawn.mT)
                scales[g] = scale.flatten()
            found["w"], found["scale_w"] = rows.mT, scales
        return found

    def widen(self, problem: Problem, inputs: Inputs, sample: Sample) -> Tensor:
        """As Family.widen, dequantised."""
        scale = inputs["scale_w"].index_select(-1, sample.cols).unsqueeze(-2)
        return Family.widen(self, problem, inputs, sample) * wide(scale)

    def x_rows(self, problem: Problem, inputs: Inputs, sample: Sample) -> Tensor:
        """As Family.x_rows, dequantised."""
        scale = inputs["scale_x"].index_select(0, sample.rows).unsqueeze(-1)
        return Family.x_rows(self, problem, inputs, sample) * wide(scale)


def _stock(problem: Problem) -> Callable[..., Tensor]:
    out, fast = torch_dtype(problem.out_dtype), problem.math_mode == "reduced"

    def call(x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, offs: Tensor) -> Tensor:
        return torch._scaled_grouped_mm(x, w, scale_x, scale_w, offs=offs, out_dtype=out, use_fast_accum=fast)

    return call


SCALED_GROUPED: Final = ScaledGrouped(
    "grouped",
    operands=(
        Operand("x", "mk", layout=0),
        Operand("w", "bkn", dtype="wdtype", layout=1, weight=True),
        Operand("scale_x", "m", dtype="scale_dtype", scale_of="x"),
        Operand("scale_w", "bn", dtype="wscale_dtype", scale_of="w", weight=True),
        Operand("offs", "b", dtype="i32"),
        Operand("y", "mn", dtype="out_dtype", result=True),
    ),
    stock=_stock,
    routed=True,
    pad=16,  # torch asks for multiples of 16 bytes
    replaces=lambda p: p.scale not in ("none", *ZERO_POINTS),
)
FAMILIES: Final = (SCALED_GROUPED,)
