"""gemmtuned's own operators in torch: each writes into `out` and has no gradient; the hook counts its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

_LIBRARY: Final[Any] = torch.library.Library("gemmtuned", "FRAGMENT")  # type: ignore[no-untyped-call]


def register(schema: str, stock: Callable[..., None]) -> None:
    """Define an operator, `name(Tensor(a!) out, ...) -> ()`. stock: what runs where no solution serves a call."""
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, stock, key)
    torch.library.register_fake(f"gemmtuned::{name}", _nothing, lib=_LIBRARY)


def _nothing(out: Tensor, *operands: Tensor | None) -> None:
    """The form for a compiler, which only learns that the result is written in place."""
