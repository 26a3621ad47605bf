"""What code asks torch's compiler about itself; the answers become constants of what it compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., object])


def asked_once(function: _Function) -> _Function:
    """As torch.compiler.assume_constant_result, without its import of torch._dynamo, which takes a second or more."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@asked_once
def is_exporting() -> bool:
    """Whether torch.export traces this.

    torch.compiler.is_exporting() itself is True in all that torch 2.11 compiles.
    """
    return torch.compiler.is_exporting()
