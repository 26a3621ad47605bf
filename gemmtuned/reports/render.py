"""How a report reaches the reader: tables on a terminal, plain columns in a pipe, or a JSON envelope.

A report is built once, as data, and shown in either form, so that both always say the same.  JSON is
`{"schema": "gemmtuned.<command>/1", <facts>, "<table>": [rows], "notes": [...]}`: rows hold every column a query
gave, in raw units; the text shows a choice of them.  The number after the slash rises only when a key is renamed or
taken away.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from gemmtuned.configs.human_units import duration, three
from gemmtuned.configs.settings import no_color

if TYPE_CHECKING:
    from rich.console import Console

    from gemmtuned.reports.narrow import Grid

Row = Mapping[str, Any]

_ESCAPES: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # OSC: titles, links
    r"|\x1b[ -/]*[0-~]"
    r"|[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # what is left of them, and text direction
)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the text form: the row's key, its heading, how a value is spelled (None shows as "-")."""

    key: str
    head: str
    spell: Callable[[Any], str] = str
    right: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under one key of the JSON form (tables of one key are joined there).

    title: the line above; empty: the line shown instead of a table without rows; instead: of one whose rows, too many
    and alike, are for the JSON form only; below: a column that has a line of its own, where a row has it.
    """

    key: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""
    empty: str = ""
    instead: str = ""
    below: Column | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """One answer of one command. facts: single values for JSON; lines: what the text says before the tables."""

    command: str
    tables: Sequence[Table] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[str] = ()
    notes: Sequence[str] = ()


def clean(text: str) -> str:
    """Text without terminal escapes and control characters: names in the database come from other programs."""
    return _ESCAPES.sub(" ", text) if _ESCAPES.search(text) else text


def count(value: float) -> str:
    """12345 as 12,345."""
    return f"{value:,.0f}"


def several(number: int, one: str, many: str = "") -> str:
    """`1 problem`, `2,345 problems`; many: the plural where it is not one with an s."""
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def more(shown: Sequence[Any], found: Sequence[Any]) -> list[str]:
    """The note below a table that shows but the first of what was found; none where it shows all."""
    return [f"{count(len(found) - len(shown))} more: --limit 0 shows all"] if len(shown) < len(found) else []


def percent(share: float) -> str:
    """0.947 as 94.7 %; never rounded up to 100 or down to 0."""
    shown = min(99.9, share * 100) if share < 1 else share * 100
    return f"{max(0.1, shown) if share > 0 else 0.0:.1f} %"


def factor(value: float) -> str:
    """1.634 as 1.63x."""
    return f"{value:.2f}x"


def against_stock(gain: float) -> str:
    """`1.63x faster than on stock torch`, or that no difference can be seen in two digits."""
    return "as on stock torch" if factor(gain) == "1.00x" else f"{factor(gain)} faster than on stock torch"


def small(value: float) -> str:
    """An error figure: 3.1e-07."""
    return f"{value:.1e}"


def flops(value: float) -> str:
    """Floating-point operations with an SI prefix: 4.30 TFLOP."""
    for scale, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if value >= scale:
            return f"{three(value / scale)} {unit}"
    return f"{value:.0f} FLOP"


def size(value: float) -> str:
    """Bytes with a binary prefix."""
    for scale, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= scale:
            return f"{three(value / scale)} {unit}"
    return f"{value:.0f} B"


def age(seconds: float) -> str:
    """How long ago: 5 s, 3 min, 2 h, 4 d."""
    for limit, scale, unit in ((60, 1, "s"), (3600, 60, "min"), (86400, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) // scale:.0f} {unit} ago"
    return f"{seconds // 86400:.0f} d ago"


TIMES: Final = (  # what torch's own takes, what a problem takes now, and how many times faster that is
    Column("baseline_us", "torch", duration),
    Column("us", "now", duration),
    Column("speedup", "gain", factor),
)


def show(report: Report, *, as_json: bool) -> None:
    """Write the report to stdout."""
    if as_json:
        print(to_json(report))
        return
    console = terminal()
    with console.capture() as drawn:  # rich ends the process with 1 when a pipe closes; print raises, as it should
        for line in report.lines:
            _say(console, line)
        for table in report.tables:
            if table.instead:
                _say(console, table.instead)
            elif table.rows:
                _say(console, table.title)
                _draw(console, table)
            elif table.empty:
                _say(console, table.empty)
        for note in report.notes:
            _say(console, note)
    print("\n".join(line.rstrip() for line in drawn.get().splitlines()))


def to_json(report: Report) -> str:
    """The versioned envelope, one line, ASCII; a figure that is not finite becomes null."""
    envelope: dict[str, Any] = {"schema": f"gemmtuned.{report.command}/1", **report.facts}
    for table in report.tables:
        envelope.setdefault(table.key, []).extend(table.rows)
    envelope["notes"] = list(report.notes)
    return json.dumps(_finite(envelope), allow_nan=False)


def terminal(*, stderr: bool = False) -> Console:
    """A console that colours only on a terminal and never under NO_COLOR; in a pipe nothing is cut to a width."""
    from rich.console import Console

    file = sys.stderr if stderr else sys.stdout
    return Console(
        file=file,
        color_system=None if no_color() else "auto",
        highlight=False,
        width=None if file.isatty() else 10_000,
        emoji=False,
        markup=False,
    )


def complain(message: str) -> None:
    """One line to stderr, as every error of ours looks; on a terminal it goes on between two words."""
    line = f"gemmtuned: {clean(' '.join(message.split()))}"
    sys.stderr.write("\n".join(_broken(line)) + "\n")


def _broken(line: str) -> list[str]:
    """As narrow.say does, without rich: an error must not wait for it."""
    try:
        room = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError, AttributeError):  # a file, a pipe, a test's
        return [line]
    return textwrap.wrap(line, max(room, 20), break_long_words=False, break_on_hyphens=False)


def _say(console: Console, text: str) -> None:
    """Print each of these lines; on a terminal a long one goes on between two words."""
    from gemmtuned.reports.narrow import say

    for line in text.splitlines():
        say(console, clean(line))


def _draw(console: Console, table: Table) -> None:
    from rich import box
    from rich.table import Table as RichTable

    from gemmtuned.reports import narrow

    grid = _grid(table)
    room = console.width
    if console.is_terminal and sum(narrow.natural(grid)) + 3 * len(grid.heads) - 1 > room:
        narrow.draw(console, grid, room)
        return
    # a pipe gets columns parted by spaces alone, so that awk and diff can read them
    drawn = RichTable(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, header_style="bold")
    for head, right in zip(grid.heads, grid.right, strict=True):
        drawn.add_column(head, justify="right" if right else "left", overflow="fold")
    for row, below in zip(grid.cells, grid.below, strict=True):
        drawn.add_row(*map(_text, row))
        if below:
            drawn.add_row(*("" for _ in row[:-1]), _text(below))
    console.print(drawn)


def _grid(table: Table) -> Grid:
    """The table as text."""
    from gemmtuned.reports.narrow import Grid

    cells, below = [], []
    for row in table.rows:
        values = [(column, row.get(column.key)) for column in table.columns]
        cells.append([clean("-" if value is None else column.spell(value)) for column, value in values])
        said = table.below and row.get(table.below.key)
        below.append(clean(f"{table.below.head}: {table.below.spell(said)}") if table.below and said else "")
    return Grid([column.head for column in table.columns], [column.right for column in table.columns], cells, below)


def _text(line: str) -> Any:
    from rich.text import Text  # text as it is: a run named "[red]" is a name, not a style

    return Text(clean(line))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
