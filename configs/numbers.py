"""The one reader of numbers that people and other programs write: int() and float() take more than is meant.

They take digits of any script (`٣` is 3), `1_000`, `nan` and `inf`, and raise for superscripts and 5,000 digits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

_DIGITS: Final = 18  # all of such a length fit SQLite's integers
_OF_A_DECIMAL: Final = frozenset("0123456789.eE+-")


def whole(text: str) -> int | None:
    """The whole number that these 1 to 18 ASCII digits spell; None for any other text, a sign among it."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


def signed(text: str) -> int | None:
    """As `whole`, after one minus sign if there is one."""
    number = whole(text.removeprefix("-"))
    return -number if number is not None and text.startswith("-") else number


def decimal(text: str) -> float | None:
    """The finite number that text spells in decimal (`-1`, `2.5`, `1e-3`); None for any other text."""
    if not _OF_A_DECIMAL.issuperset(text) or len(text) > 400:
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def rows_are(number: int) -> str:
    """`1 row is`, `2 rows are`: how a line about rows begins."""
    return "1 row is" if number == 1 else f"{number} rows are"


def odd_count(values: Mapping[str, object], least: Mapping[str, int]) -> str:
    """What is wrong with the first of these parameters that is no whole number of at least so much; "" for none.

    One that is missing, or None, is left to whoever has a usual value for it.
    """
    for name, smallest in least.items():
        value = values.get(name)
        if value is not None and (type(value) is not int or value < smallest):
            return f"{name} is {value!r:.40}, expected a whole number of at least {smallest}"
    return ""
