"""dense of int8 into int32: torch's `_int_mm`.

Integers are not rounded, and a sum that 32 bits do not hold wraps, as torch's does.  So there is one right result, in
whatever order products are added, and a rival has to give it bit for bit.  Where torch's own result is another one, as
on CPUs whose instructions add pairs of products in 16 bits, nothing is tuned.

Kinds of inputs:
    randn      all of -128 to 127 alike often
    largest    in each row of X and each column of W -128 alone, 127 with some 126, or -128 and 127 mixed: sums as large
               as they can be, of which 16 bits do not hold two products, fp32 not the last digit, and 32 bits not all
               from K = 131072 on
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tunable import INT_PRODUCT, is_int_product
from gemmtuned.kernels.families.base import Family
from gemmtuned.kernels.families.operand import Inputs, Operand, Sample

LARGEST: Final = "largest"
_LEAST, _MOST = -128, 127
_WRAPS: Final = 2.0**32


class IntProducts(Family):
    """What is different where nothing is rounded."""

    __slots__ = ()

    def check(self, problem: Problem) -> None:
        """As Family.check."""
        if not is_int_product(problem):
            raise CandidateFailed(f"{problem}: products of int8 into int32 are X @ W.T of plain operands alone")

    def tunable(self, device_kind: str) -> Iterator[str]:
        """As Family.tunable."""
        yield Problem(family=self.name, m=1, n=1, k=1, dtype="i8", out_dtype="i32").operands

    def kinds(self, problem: Problem) -> tuple[str, ...]:
        """As Family.kinds."""
        return ("randn", LARGEST)

    def weights_of(self, kind: str) -> str:
        """As Family.weights_of."""
        return LARGEST if kind == LARGEST else "randn"

    def is_exact(self, kind: str) -> bool:
        """As Family.is_exact."""
        return True

    def draw(self, problem: Problem, kind: str, seed: int, device: torch.device, *, weights: bool) -> dict[str, Tensor]:
        """As Family.draw."""
        random = torch.Generator(device=device).manual_seed(2 * seed)
        found = {"x": _drawn((problem.m, problem.k), kind, random)}
        if weights:
            random.manual_seed(2 * seed + 1)
            found["w"] = _drawn((problem.n, problem.k), kind, random).mT
        return found

    def reference(self, problem: Problem, inputs: Inputs, sample: Sample, w64: Tensor | None = None) -> Tensor:
        """As Family.reference, within the numbers that 32 bits hold: fp64 has every sum exactly."""
        y = super().reference(problem, inputs, sample, w64)
        return torch.remainder(y + _WRAPS / 2, _WRAPS) - _WRAPS / 2


def _drawn(shape: tuple[int, int], kind: str, random: torch.Generator) -> Tensor:
    def whole(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high + 1, size, dtype=torch.int8, generator=random, device=random.device)

    if kind != LARGEST:
        return whole(_LEAST, _MOST, *shape)
    line, coin = whole(0, 2, shape[0], 1), whole(0, 1, *shape)
    mixed = torch.where(coin == 0, _LEAST, _MOST)
    return torch.where(line == 0, _LEAST, torch.where(line == 1, _MOST - coin, mixed)).to(torch.int8)


def _int_mm(x: Tensor, w: Tensor) -> Tensor:
    return torch._int_mm(x, w)


INT_PRODUCTS: Final = IntProducts(
    "dense",
    operands=(
        Operand("x", "mk", layout=0),
        Operand("w", "kn", dtype="wdtype", layout=1, weight=True),
        Operand("y", "mn", dtype="out_dtype", result=True),
    ),
    stock=lambda problem: _int_mm,
    pad=16,  # torch asks for multiples of 8 on GPUs
    replaces=lambda p: p.scale == "none" and (p.dtype, p.wdtype, p.out_dtype) == INT_PRODUCT,
)
FAMILIES: Final = (INT_PRODUCTS,)
