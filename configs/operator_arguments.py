"""What an operator can be given in a launch record: operands by name, numbers and lists of them, True, None, texts."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Final

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.launch_sizes import MAX_INTEGERS, MAX_OPERATOR_ARGUMENTS, MAX_TEXT

Argument = str | int | float | bool | tuple[int, ...] | None
TEXT: Final = "="  # what a constant text begins with
_TEXT: Final = rf"{TEXT}[ -~]{{0,{MAX_TEXT}}}"


def read_arguments(given: object, operands: Container[str]) -> tuple[Argument, ...]:
    """What JSON gives. Raises TableError unless `x` is among them, and the native hook has room for all."""

    def is_known(x: object) -> bool:
        if isinstance(x, str):
            return x in operands or re.fullmatch(_TEXT, x) is not None
        return x is None or isinstance(x, int | float) or _are_integers(x)

    if not isinstance(given, list) or not all(map(is_known, given)) or "x" not in given:
        raise TableError(f"launch.arguments is {str(given)[:200]}, expected operands of {operands} and constants")
    if len(given) > MAX_OPERATOR_ARGUMENTS:
        raise TableError(f"launch.arguments has {len(given)}, the native hook takes {MAX_OPERATOR_ARGUMENTS}")
    integers = [i for x in given for i in (x if isinstance(x, list) else (x,)) if isinstance(i, int)]
    for i in (i for i in integers if not -(1 << 63) <= i < 1 << 63):
        raise TableError(f"launch.arguments has an integer of {i.bit_length()} bits, operators take 64 with a sign")
    return tuple(tuple(x) if isinstance(x, list) else x for x in given)


def _are_integers(x: object) -> bool:
    return isinstance(x, list) and len(x) <= MAX_INTEGERS and all(type(i) is int for i in x)
