"""Pictures for the HTML report: inline SVG, drawn here, coloured by the page's own style sheet.

Every function returns markup that is safe to put into the page: all text in it is escaped.  Widths are in a drawing's
own units; the page scales a drawing to the column it stands in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from gemmtuned.reports.render import clean, percent

_WIDTH: Final = 720
_ROW: Final = 26
_LABEL: Final = 190  # room for the name of a bar
_FIGURE: Final = 56  # room for a bar's figure, which stands before it: a narrow screen may not show the bar's end


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a whole: its share (0 to 1), the style class that colours it, its name."""

    share: float
    style: str
    name: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a bar chart: before and after in the same unit, and what is written beside it."""

    name: str
    before: float
    after: float
    text: str


@dataclass(frozen=True, slots=True)
class Strip:
    """One row over time. text: of a stretch, by its number, shown when one points at it."""

    name: str
    values: Sequence[float]
    text: Callable[[int], str]
    style: str = "after"


def shares(parts: Sequence[Part]) -> str:
    """One bar cut into parts, with a legend below it. Parts without a share are left out."""
    x, drawn, legend = 0.0, [], []
    for part in parts:
        if part.share <= 0:
            continue
        width = part.share * _WIDTH
        drawn.append(f'<rect class="{part.style}" x="{x:.2f}" y="0" width="{width:.2f}" height="28"/>')
        legend.append(
            f'<span class="key"><i class="{part.style}"></i>{_text(part.name)} <b>{percent(part.share)}</b></span>'
        )
        x += width
    label = ", ".join(f"{part.name} {percent(part.share)}" for part in parts if part.share > 0)
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} 28" role="img" aria-label="{_text(label)}" '
        f'preserveAspectRatio="none">{"".join(drawn)}</svg><p class="legend">{"".join(legend)}</p>'
    )


def bars(rows: Sequence[Bar], *, label: str) -> str:
    """Two bars a row, before above after, on one scale that begins at zero."""
    if not rows:
        return ""
    most = max(max(row.before, row.after) for row in rows) or 1.0
    left = _LABEL + _FIGURE
    room = _WIDTH - left
    drawn = []
    for i, row in enumerate(rows):
        before, after = max(row.before / most * room, 1), max(row.after / most * room, 1)
        y = i * (_ROW + 6)
        drawn.append(
            f'<text class="name" x="{_LABEL - 8}" y="{y + 17}" text-anchor="end">{_text(_short(row.name))}'
            f"<title>{_text(row.name)}</title></text>"
            f'<text class="figure" x="{_LABEL}" y="{y + 17}">{_text(row.text)}</text>'
            f'<rect class="before" x="{left}" y="{y + 2}" width="{before:.1f}" height="10"/>'
            f'<rect class="after" x="{left}" y="{y + 13}" width="{after:.1f}" height="10"/>'
        )
    height = len(rows) * (_ROW + 6)
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{_text(label)}">'
        f"{''.join(drawn)}</svg>"
    )


def area(values: Sequence[float | None], names: Sequence[str], *, label: str) -> str:
    """Shares (0 to 1) over time as a filled line; None, where nothing was called, is a gap.

    names: of the points in time, of which the first and the last are written.  A single one fills the drawing.
    """
    if not any(value is not None for value in values):
        return ""
    if len(values) == 1:
        values, names = (*values, *values), (names[0], "")
    height, bottom = 150, 126
    step = (_WIDTH - 50) / max(len(values) - 1, 1)
    pieces: list[list[tuple[float, float]]] = [[]]
    for i, value in enumerate(values):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append((44 + i * step, bottom - value * (bottom - 8)))
    drawn = [
        f'<line class="grid" x1="44" x2="{_WIDTH}" y1="{bottom - v * (bottom - 8)}" y2="{bottom - v * (bottom - 8)}"/>'
        f'<text class="name" x="38" y="{bottom - v * (bottom - 8) + 4}" text-anchor="end">{v:.0%}</text>'
        for v in (0, 0.5, 1)
    ]
    for piece in filter(None, pieces):
        if len(piece) == 1:  # a line of one point would not show
            piece = [(piece[0][0] - 2, piece[0][1]), (piece[0][0] + 2, piece[0][1])]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in piece)
        drawn.append(f'<polygon class="fill" points="{piece[0][0]:.1f},{bottom} {line} {piece[-1][0]:.1f},{bottom}"/>')
        drawn.append(f'<polyline class="line" points="{line}"/>')
    drawn.append(f'<text class="name" x="44" y="{height - 6}">{_text(names[0])}</text>')
    drawn.append(f'<text class="name" x="{_WIDTH}" y="{height - 6}" text-anchor="end">{_text(names[-1])}</text>')
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{_text(label)}">'
        f"{''.join(drawn)}</svg>"
    )


def strips(rows: Sequence[Strip], names: Sequence[str], *, label: str) -> str:
    """A strip for each row, one column for each stretch of time, as high as its value beside the largest of all.

    names: of the first and the last stretch.
    """
    most = max((value for row in rows for value in row.values), default=0.0)
    if not most:
        return ""
    room, high = _WIDTH - _LABEL, 34
    drawn = []
    for i, row in enumerate(rows):
        bottom = i * (high + 10) + high
        wide = room / len(row.values)
        drawn.append(f'<line class="grid" x1="{_LABEL}" x2="{_WIDTH}" y1="{bottom}" y2="{bottom}"/>')
        drawn.append(
            f'<text class="name" x="{_LABEL - 8}" y="{bottom - 12}" text-anchor="end">{_text(_short(row.name))}'
            f"<title>{_text(row.name)}</title></text>"
        )
        drawn += [
            f'<rect class="{row.style}" x="{_LABEL + j * wide:.1f}" y="{bottom - tall:.1f}" '
            f'width="{max(wide - 1, 1):.1f}" height="{tall:.1f}"><title>{_text(row.text(j))}</title></rect>'
            for j, value in enumerate(row.values)
            if (tall := max(value / most * high, 2.0) if value else 0.0)
        ]
    bottom = len(rows) * (high + 10) + 8
    drawn.append(f'<text class="name" x="{_LABEL}" y="{bottom}">{_text(names[0])}</text>')
    drawn.append(f'<text class="name" x="{_WIDTH}" y="{bottom}" text-anchor="end">{_text(names[-1])}</text>')
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {bottom + 6}" role="img" aria-label="{_text(label)}">'
        f"{''.join(drawn)}</svg>"
    )


def _short(name: str) -> str:
    return name if len(name) <= 28 else name[:27] + "…"


def _text(text: str) -> str:
    return escape(clean(text))
