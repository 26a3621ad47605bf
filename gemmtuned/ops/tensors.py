"""What the ops take as an operand: a tensor whose elements lie by strides, or a message that names the operand."""

from __future__ import annotations

import reprlib
from typing import Any, Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import GemmtunedError

_SHORT: Final = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist = 1, 3


def some_tensor(what: str, given: Any) -> Tensor:
    """What was given, where it is a tensor of any layout. Raises GemmtunedError, naming it."""
    if not isinstance(given, Tensor):
        raise GemmtunedError(f"{what} is {_SHORT.repr(given)}, expected a tensor")
    return given


def tensor(what: str, given: Any) -> Tensor:
    """What was given, where it is a tensor that lies by strides, or a jagged one. Raises GemmtunedError, naming it."""
    found = some_tensor(what, given)
    if found.layout is not torch.strided or found.is_nested or found.is_quantized:
        _refuse_others(what, found)
    return found


def _refuse_others(what: str, given: Tensor) -> None:
    if given.layout is torch.jagged:  # it has sizes, and torch's own product of it
        return
    if given.is_nested:
        raise GemmtunedError(f"{what} is a nested tensor without sizes, expected a plain one: pad it")
    if given.is_quantized:
        raise GemmtunedError(f"{what} is of torch's quantized type {given.dtype}: hand its int_repr(), and its scales")
    raise GemmtunedError(f"{what} is of layout {given.layout}, expected a plain tensor: hand its to_dense()")
