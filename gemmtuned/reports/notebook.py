"""Reports as Python objects: a table when printed, HTML in a notebook, and a pandas DataFrame when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from gemmtuned.reports.render import Report, Table, clean

if TYPE_CHECKING:
    import pandas as pd


class Answer(Sequence[dict[str, Any]]):
    """The rows of one report, in raw units; `facts` has its sums. What is shown is what the command shows."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._table: Table = next(table for table in report.tables if table.key == "rows")
        self._rows = [dict(row) for row in self._table.rows]
        self.facts = dict(report.facts)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def frame(self) -> pd.DataFrame:
        """Every column of the rows as a pandas DataFrame, of none those that are shown; only this imports pandas."""
        import pandas as pd

        return pd.DataFrame(self._rows or None, columns=None if self._rows else [c.key for c in self._table.columns])

    def __str__(self) -> str:
        heads, *lines = cells = list(self._cells())
        if not lines:
            return "\n".join([*self._report.lines, self._table.empty, *self._report.notes])
        widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
        aligned = [
            "  ".join(
                text.rjust(wide) if column.right else text.ljust(wide)
                for text, wide, column in zip(line, widths, self._table.columns, strict=True)
            ).rstrip()
            for line in cells
        ]
        return "\n".join([*map(clean, self._report.lines), *aligned, *map(clean, self._report.notes)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        heads, *lines = self._cells()
        head = "".join(f"<th>{escape(name)}</th>" for name in heads)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        if not lines:
            table = _paragraphs([self._table.empty])
        return _paragraphs(self._report.lines) + table + _paragraphs(self._report.notes)

    def _cells(self) -> Iterator[tuple[str, ...]]:
        yield tuple(column.head for column in self._table.columns)
        for row in self._rows:
            values = ((column, row.get(column.key)) for column in self._table.columns)
            yield tuple("-" if value is None else clean(column.spell(value)) for column, value in values)


def _paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{escape(clean(line))}</p>" for line in lines if line)
