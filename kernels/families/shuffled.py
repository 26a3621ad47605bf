"""scaled with a weight in AITER's pre-shuffled order: the products of scaled.py, of a W that lies otherwise.

W has the shape of the plain weight, [K, N] as torch takes it, and its bytes in the order of shuffled_order.py.  torch
has no such product: its own is that of a copy in plain order, made at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tunable import is_shuffled
from gemmtuned.kernels.families.operand import Inputs, Sample
from gemmtuned.kernels.families.scaled import SCALED, Scaled
from gemmtuned.kernels.shuffled_order import TILE_K, TILE_ROWS, in_order, plain


class Shuffled(Scaled):
    """What is different where W lies in AITER's order."""

    __slots__ = ()

    def check(self, problem: Problem) -> None:
        """As Family.check."""
        if not is_shuffled(problem):
            raise CandidateFailed(
                f"{problem}: shuffled weights are of int8 or fp8 with scales as plain ones have them, layout nt, N a "
                f"multiple of {TILE_ROWS} and K of {TILE_K}"
            )
        Scaled.check(self, replace(problem, weight_state="plain"))

    def tunable(self, device_kind: str) -> Iterator[str]:
        """As Family.tunable."""
        for text in Scaled.tunable(self, device_kind):
            yield f"{text.removesuffix('plain')}shuffled"

    def draw(self, problem: Problem, kind: str, seed: int, device: torch.device, *, weights: bool) -> dict[str, Tensor]:
        """As Family.draw."""
        found = Scaled.draw(self, problem, kind, seed, device, weights=weights)
        if weights:
            w = found["w"].mT
            found["w"] = in_order(w).view(w.shape).mT
        return found

    def widen(self, problem: Problem, inputs: Inputs, sample: Sample) -> Tensor:
        """As Family.widen."""
        as_usual = {**inputs.tensors, "w": plain(inputs["w"].mT).mT}
        return Scaled.widen(self, problem, replace(inputs, tensors=as_usual), sample)


def _stock(problem: Problem) -> Callable[..., Tensor]:
    usual = SCALED.stock(replace(problem, weight_state="plain"))

    def call(x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, bias: Tensor | None) -> Tensor:
        return usual(x, plain(w.mT).mT, scale_x, scale_w, bias)

    return call


SHUFFLED_SCALED: Final = Shuffled(
    "scaled",
    operands=tuple(replace(o, mixed=True) if o.name == "w" else o for o in SCALED.operands),
    stock=_stock,
    pad=16,
    replaces=lambda p: p.weight_state == "shuffled",
)
FAMILIES: Final = (SHUFFLED_SCALED,)
