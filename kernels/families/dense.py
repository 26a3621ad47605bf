"""dense: mm, and addmm with a bias vector. dense_add: addmm with a full C."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from gemmtuned.kernels.families.base import Family
from gemmtuned.kernels.families.operand import Operand

_X: Final = Operand("x", "mk", layout=0)
_W: Final = Operand("w", "kn", dtype="wdtype", layout=1, weight=True)
_Y: Final = Operand("y", "mn", dtype="out_dtype", result=True)


def linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """X [M, K] by W [K, N], and a bias [N] or None: what torch calls for it."""
    return torch.mm(x, w) if bias is None else torch.addmm(bias, x, w)


def _wider(x: Tensor, w: Tensor, bias: None) -> Tensor:
    return torch.mm(x, w, out_dtype=torch.float32)


def _add(x: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return torch.addmm(c, x, w)


DENSE: Final = Family(
    "dense",
    operands=(_X, _W, Operand("bias", "n", optional=True, added=True), _Y),
    stock=lambda problem: linear if problem.out_dtype == problem.dtype else _wider,
    weight_states=("plain", "packed"),  # gemmtuned.freeze packs linear layers
    widens=True,
)
DENSE_ADD: Final = Family(
    "dense_add", operands=(_X, _W, Operand("c", "mn", added=True), _Y), stock=lambda problem: _add
)
FAMILIES: Final = (DENSE, DENSE_ADD)
