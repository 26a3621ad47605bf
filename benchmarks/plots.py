"""What the programs that draw results share: the panel of times against the floor, the file, the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def against_floor(axes: Any, floors: Sequence[float], *, what: str, ticks: Sequence[float]) -> None:
    """Both axes in us, logarithmic, with a line where a product takes no longer than reading its weight."""
    from matplotlib import ticker

    span = [min(floors) * 0.9, max(floors) * 1.1]
    axes.plot(span, span, color="grey", linewidth=0.8, label="only reading W")
    axes.set(xscale="log", yscale="log", xlabel="streaming floor of the same run (us)", ylabel=what)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xticks(ticks)


def save(figure: Any, out: Path) -> None:
    """Without its date, so that the same results give the same file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def main(
    doc: str | None, rows: Callable[[list[Path]], tuple[str, Rows]], draw: Callable[[str, Rows, Path], None]
) -> None:
    """Draw what the result files of the command line hold."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    import matplotlib as mpl  # for --help nobody needs it

    mpl.use("svg")
    mpl.rcParams["svg.fonttype"] = "none"
    mpl.rcParams["svg.hashsalt"] = "gemmtuned"  # the same data, the same file
    title, found = rows(args.results)
    draw(title, found, args.out)
    print(f"{args.out}: {len(found)} problems")
