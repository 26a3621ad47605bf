"""Finds two columns of an AITER table whose names were exchanged, by the speed that its rows give.

A tuned row gives the time of a product and its TFLOP/s, so the number of its operations, which is 2 * B * M * N * K.
Where most rows contradict their sizes, and would agree if another column held one of the sizes, the header is wrong:
each row would be read as another problem.  Rows that contradict their sizes are no proof by themselves: there are
tables with times in other units, and rows whose figures were not changed when they were copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.aiter_columns import real
from gemmtuned.configs.numbers import whole

if TYPE_CHECKING:
    from gemmtuned.configs.aiter_csv import Row

LOOKED_AT: Final = 64  # rows at the beginning of a table
_SIZES: Final = ("B", "M", "N", "K")
_FAR: Final = 0.15  # a larger relative difference contradicts; AITER's tables with right figures are within 0.1
_NEAR: Final = 0.05  # a smaller relative difference agrees
_MOST: Final = 0.8  # share of the rows that another column must fit


@dataclass(frozen=True, slots=True)
class Exchanged:
    """A size, the column that holds it, and the first row that shows it."""

    size: str
    column: str
    row: Row

    def __str__(self) -> str:
        size, column, row = self.size, self.column, self.row
        return (
            f"most rows' us and tflops contradict {size}, and fit what stands under {column}: "
            f"the header names the two the wrong way round; correct it. Line {row.line}: {row['us']} us at "
            f"{row['tflops']} tflops fit a {size} of {row[column]}, not of {row[size]}"
        )


def exchanged(rows: Sequence[Row]) -> Exchanged | None:
    """The exchanged columns of a table that begins with these rows; None where its header seems right."""
    measured = [(row, *figures) for row in rows for figures in _figures(row)]
    if not measured or _share(measured, _FAR, {}) > 0.5:
        return None
    if len({row["tflops"] for row, *_ in measured}) < min(2, len(measured)):  # one figure in every row was not measured
        return None
    header = measured[0][0].header
    sizes = [size for size in _SIZES if size in header.at]
    for other in header.columns:
        if other in header.family.key or other in ("us", "tflops"):
            continue
        for size in sizes:
            if _share(measured, _NEAR, {size: other}) >= _MOST:
                shows = (one for one in measured if not _share([one], _FAR, {}) and _share([one], _NEAR, {size: other}))
                return Exchanged(size, other, next(shows)[0])
    return None


_UNITS: Final = {1e3: "milliseconds", 1e-3: "nanoseconds", 1e6: "seconds"}


def other_unit(rows: Sequence[Row]) -> tuple[float, str]:
    """(microseconds per unit of the times of a table that begins with these rows, a line about it), by its TFLOP/s.

    (1, "") where nothing shows that the times are not microseconds.
    """
    measured = [(row, *figures) for row in rows for figures in _figures(row)]
    if len({row["tflops"] for row, *_ in measured}) < 2:
        return 1.0, ""
    for unit, name in _UNITS.items():
        if _share([(row, ops * unit, rounded * unit) for row, ops, rounded in measured], _NEAR, {}) >= _MOST:
            row = measured[0][0]
            shown = f"line {row.line}: {row['us']} at {row['tflops']} tflops"
            return unit, f"most rows' tflops fit times in {name}, as which they are read ({shown})"
    return 1.0, ""


def _figures(row: Row) -> Iterator[tuple[float, float]]:
    """(operations of the row by its own figures, how much rounding may have changed them); nothing without figures."""
    text = row["tflops"]
    speed = real(text) if text else None
    if speed and row.has_time and row.us is not None:
        rounded = 0.5 * 10.0 ** -len(text.partition(".")[2])
        if rounded < 0.2 * speed:  # else it says nothing
            yield speed * row.us * 1e6, rounded * row.us * 1e6


def _share(measured: Sequence[tuple[Row, float, float]], tolerance: float, instead: dict[str, str]) -> float:
    """The share of rows whose sizes agree with their figures. instead: the column to read in place of a size's own."""
    agree = 0
    for row, operations, rounded in measured:
        sizes = [whole(row[instead.get(size, size)]) for size in _SIZES if size in row.header.at]
        if all(size is not None for size in sizes):
            named = 2.0 * math.prod(size for size in sizes if size is not None)
            agree += abs(named - operations) <= tolerance * max(named, operations) + rounded
    return agree / len(measured)
