"""What an operator can be given in a launch record: operands by name, numbers, truth values, None, and texts."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Final

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.launch_sizes import MAX_OPERATOR_ARGUMENTS, MAX_TEXT

Argument = str | int | float | bool | None
TEXT: Final = "="  # what a constant text begins with
_TEXT: Final = rf"{TEXT}[ -~]{{0,{MAX_TEXT}}}"


def check_arguments(given: object, operands: Container[str]) -> None:
    """Raise TableError unless it is a list of arguments, `x` among them, that the native hook has room for."""

    def is_known(x: object) -> bool:
        if isinstance(x, str):
            return x in operands or re.fullmatch(_TEXT, x) is not None
        return x is None or isinstance(x, int | float)

    if not isinstance(given, list) or not all(map(is_known, given)) or "x" not in given:
        raise TableError(f"launch.arguments is {str(given)[:200]}, expected operands of {operands} and constants")
    if len(given) > MAX_OPERATOR_ARGUMENTS:
        raise TableError(f"launch.arguments has {len(given)}, the native hook takes {MAX_OPERATOR_ARGUMENTS}")
    for x in (x for x in given if isinstance(x, int) and not -(1 << 63) <= x < 1 << 63):
        raise TableError(f"launch.arguments has an integer of {x.bit_length()} bits, operators take 64 with a sign")
