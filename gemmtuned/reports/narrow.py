"""How a table that is wider than the terminal is drawn there: cut between words, never through a problem's name.

In order, as far as needed: columns without a value go, headings and prose take several lines, columns of text that say
the same in every row are said once above, the first column takes a line of its own above the rest of its row.  A single
row becomes one line a column.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

PROSE: Final = 20  # a column of text, where it is longer, is at least this wide
WORD: Final = 30  # and at most this wide for a word that is longer, a path say
NONE: Final = ("", "-")  # a cell without a value
INDENT: Final = 2  # columns, for what stands below it


@dataclass(frozen=True, slots=True)
class Grid:
    """A table as text: headings, which columns are figures (aligned right, never broken), and the cells of each row.

    below: for each row what has a line of its own below it, or "".
    """

    heads: Sequence[str]
    right: Sequence[bool]
    cells: Sequence[Sequence[str]]
    below: Sequence[str]


@dataclass(frozen=True, slots=True)
class Fitted:
    """Which columns stand in the table and how wide each is; which are said once above; spaces between columns.

    own_line: whether the first column, which is none of them then, has a line of its own.
    """

    columns: tuple[int, ...]
    widths: tuple[int, ...]
    alike: tuple[int, ...]
    gap: int
    own_line: bool = False


def natural(grid: Grid) -> list[int]:
    """How wide each column is with nothing broken."""
    return [max(map(cell_len, (head, *(row[i] for row in grid.cells)))) for i, head in enumerate(grid.heads)]


def fit(grid: Grid, room: int) -> Fitted | None:
    """The first way of the module's docstring that fits into `room` columns; None where none does."""
    wide = natural(grid)
    least = [_least(grid, i, wide[i]) for i in range(len(wide))]
    filled = [i for i in range(len(wide)) if i == 0 or any(row[i] not in NONE for row in grid.cells)]
    alike = [i for i in filled[1:] if not grid.right[i] and len({row[i] for row in grid.cells}) == 1]
    fewer = [i for i in filled if i not in alike]
    ways: list[tuple[list[int], list[int], int, bool]] = [(filled, [], 2, False)]
    if len(grid.cells) > 1:
        ways.append((fewer, alike, 2, False))
        ways += [(fewer[1:], alike, gap, True) for gap in (2, 1) if len(fewer) > 1]
    for columns, above, gap, own_line in ways:
        space = room - gap * (len(columns) - 1) - INDENT * own_line
        if sum(least[i] for i in columns) <= space:
            widths = _grown([least[i] for i in columns], [wide[i] for i in columns], space)
            return Fitted(tuple(columns), tuple(widths), tuple(above), gap, own_line)
    return None


def draw(console: Console, grid: Grid, room: int) -> None:
    """Print it, fitted into `room` columns."""
    fitted = fit(grid, room)
    if fitted is None:
        _cards(console, grid)
        return
    if fitted.alike:
        say(console, "every row: " + ", ".join(f"{grid.heads[i]} {grid.cells[0][i]}" for i in fitted.alike))
    if fitted.own_line:
        say(console, grid.heads[0], style="bold")
    _row(console, grid, fitted, grid.heads, style="bold")
    rule = sum(fitted.widths) + fitted.gap * (len(fitted.widths) - 1) + INDENT * fitted.own_line
    say(console, "─" * rule)
    for row, below in zip(grid.cells, grid.below, strict=True):
        if fitted.own_line:
            say(console, row[0])
        _row(console, grid, fitted, row)
        if below and fitted.own_line:
            say(console, below, indent=INDENT)
        elif below:
            _row(console, grid, fitted, [*("" for _ in row[1:]), below])


def say(console: Console, line: str, *, style: str = "", indent: int = 0) -> None:
    """Print a line of prose: where it is longer than the terminal is wide, it goes on between two words.

    A word that is longer than that, a path say, is left to the terminal, so that it can be copied whole.
    """
    lead = " " * (indent + len(line) - len(line.lstrip()))
    parts = [" " * indent + line]
    if cell_len(parts[0]) > console.width:
        parts = textwrap.wrap(
            line.strip(), max(console.width, len(lead) + 1), initial_indent=lead, subsequent_indent=lead,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    for part in parts:
        console.print(Text(part, style=style), soft_wrap=True)


def _cards(console: Console, grid: Grid) -> None:
    """Each row as lines of a heading and its value: for a single row, and for a terminal too narrow for any table."""
    wide = max(map(cell_len, grid.heads))
    for number, (row, below) in enumerate(zip(grid.cells, grid.below, strict=True)):
        if number:
            say(console, "")
        for head, value in zip(grid.heads, row, strict=True):
            if value not in NONE:
                name = Text(head + " " * (wide - cell_len(head) + 2), style="bold")
                room = max(console.width - len(name), 2)  # room for one wide letter
                lines = Text(value).wrap(console, room, overflow="fold")
                for at, line in enumerate(lines):
                    console.print(
                        Text.assemble(name if at == 0 else " " * len(name), str(line).strip()), soft_wrap=True
                    )
        if below:
            say(console, below, indent=INDENT)


def _least(grid: Grid, column: int, wide: int) -> int:
    """How narrow a column may be: figures and names whole, headings and other text by their longest word."""
    cells = [row[column] for row in grid.cells]
    head = _longest(grid.heads[column])
    if grid.right[column] or column == 0:
        return max(head, *map(cell_len, cells))
    return max(head, min(wide, PROSE), min(max(map(_longest, cells)), WORD))


def _longest(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


def _grown(widths: list[int], most: Sequence[int], space: int) -> list[int]:
    """The widths, after the columns that need it most were given the space that is left."""
    for _ in range(space - sum(widths)):
        short = [i for i, width in enumerate(widths) if width < most[i]]
        if not short:
            break
        widths[max(short, key=lambda i: most[i] / max(widths[i], 1))] += 1
    return widths


def _row(console: Console, grid: Grid, fitted: Fitted, row: Sequence[str], *, style: str = "") -> None:
    """One row, of as many lines as its tallest cell has; headings stand at the bottom."""
    cells = [
        [str(line) for line in Text(row[i]).wrap(console, max(width, 1), overflow="fold")] or [""]
        for i, width in zip(fitted.columns, fitted.widths, strict=True)
    ]
    tallest = max(map(len, cells))
    if style:
        cells = [[""] * (tallest - len(lines)) + lines for lines in cells]
    for number in range(tallest):
        line = " " * (INDENT * fitted.own_line)
        for at, (lines, width, i) in enumerate(zip(cells, fitted.widths, fitted.columns, strict=True)):
            text = lines[number].strip() if number < len(lines) else ""
            fill = " " * (width - cell_len(text))
            line += (" " * fitted.gap if at else "") + (fill + text if grid.right[i] else text + fill)
        console.print(Text(line.rstrip(), style=style), soft_wrap=True)
