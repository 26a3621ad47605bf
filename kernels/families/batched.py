"""batched: bmm. batched_add: baddbmm with a full C for each product."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from gemmtuned.kernels.families.base import Family
from gemmtuned.kernels.families.operand import Operand

_X: Final = Operand("x", "bmk", layout=0)
_W: Final = Operand("w", "bkn", dtype="wdtype", layout=1, weight=True)
_Y: Final = Operand("y", "bmn", dtype="out_dtype", result=True)


def _add(x: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return torch.baddbmm(c, x, w)


def _wider(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(x, w, out_dtype=torch.float32)


BATCHED: Final = Family(
    "batched",
    operands=(_X, _W, _Y),
    stock=lambda problem: torch.bmm if problem.out_dtype == problem.dtype else _wider,
    widens=True,
)
BATCHED_ADD: Final = Family(
    "batched_add", operands=(_X, _W, Operand("c", "bmn", added=True), _Y), stock=lambda problem: _add
)
FAMILIES: Final = (BATCHED, BATCHED_ADD)
