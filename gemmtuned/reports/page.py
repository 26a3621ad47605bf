"""The page that `gemmtuned report` writes: what is collected from the database, and how it becomes HTML.

The page answers, from top to bottom: how much of the traffic is tuned, how that came about, which layers gained, what
serves each problem, what waits and why, what is not seen.  A layer is an (N, K): all problems of one weight's shape,
whatever M they were called with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gemmtuned import __version__
from gemmtuned.configs.solution import LIVE_STATES
from gemmtuned.db import queries
from gemmtuned.reports import charts
from gemmtuned.reports.layers import BEST, answer, gain_of_all
from gemmtuned.reports.layers import layers as by_layer
from gemmtuned.reports.render import clean, count, duration, factor, percent

LAYERS: Final = 15
PROBLEMS: Final = 200
WAITING: Final = 50
POINTS: Final = 120  # of the curve over time


@dataclass(frozen=True, slots=True)
class Data:
    """Everything on the page, as the questions of db.queries answered it at `now_s` for the last `since_s`."""

    now_s: float
    since_s: float
    database: str
    served: Sequence[dict[str, Any]]
    runs: Sequence[dict[str, Any]]
    hours: Sequence[dict[str, Any]]
    solutions: Sequence[dict[str, Any]]
    untuned: Sequence[dict[str, Any]]
    compiled: Sequence[dict[str, Any]]
    frozen: Sequence[dict[str, Any]]
    publications: Sequence[dict[str, Any]]


def collect(database: Path, *, since_s: float, now_s: float) -> Data:
    """Ask the database. Raises StoreError when it cannot be read."""
    return Data(
        now_s=now_s,
        since_s=since_s,
        database=str(database),
        served=queries.served(database, since_s=since_s, now_s=now_s),
        runs=queries.coverage(database, by="run", since_s=since_s, now_s=now_s),
        hours=queries.traffic(database, since_s=since_s, now_s=now_s),
        solutions=queries.solutions(database, live=False),
        untuned=queries.untuned(database, limit=WAITING + 1),
        compiled=queries.compiled(database, since_s=since_s),
        frozen=queries.frozen(database, since_s=since_s),
        publications=queries.publications(database, limit=20),
    )


def render(data: Data) -> str:
    """The page as one HTML text without links to anything outside it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = Environment(
        loader=PackageLoader("gemmtuned", "reports"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    pages.filters |= {
        "clean": clean,
        "count": count,
        "duration": duration,
        "factor": factor,
        "percent": percent,
        "moment": _moment,
    }
    return pages.get_template("page.html.j2").render(_figures(data))


def _figures(data: Data) -> dict[str, Any]:
    live = [row for row in data.solutions if row["state"] in LIVE_STATES]
    faster = [row for row in live if row["state"] != BEST]
    time_us = sum(row["time_us"] for row in data.served)
    layers = by_layer(data.served)
    return {
        "version": __version__,
        "made": _moment(data.now_s * 1e6),
        "days": f"{data.since_s / 86400:g}",
        "database": data.database,
        "time_us": time_us,
        "calls": sum(row["calls"] for row in data.served),
        "saved_us": sum(row["saved_us"] or 0.0 for row in data.solutions),
        "speedup": gain_of_all(layers),
        "parts": _parts(data.served, time_us),
        "curve": _curve(data),
        "layers": layers[:LAYERS],
        "layers_left": max(len(layers) - LAYERS, 0),
        "layer_bars": charts.bars(
            [charts.Bar(row["layer"], row["stock_us"], row["now_us"], factor(row["gain"])) for row in layers[:LAYERS]],
            label="GEMM time by layer: on stock torch, and as it runs now",
        ),
        "runs": sorted(data.runs, key=lambda row: -row["time_us"]),
        "solutions": sorted(faster, key=lambda row: -(row["saved_us"] or 0))[:PROBLEMS],
        "solutions_left": max(len(faster) - PROBLEMS, 0),
        "best_gb_s": _best_rate(live),
        "untuned": data.untuned[:WAITING],
        "untuned_left": len(data.untuned) > WAITING,
        "compiled": len({row["problem"] for row in data.compiled}),
        "frozen": _by_run(data.frozen),
        "publications": data.publications,
    }


def _parts(served: Sequence[dict[str, Any]], time_us: float) -> str:
    """GEMM time of the window by what its problems' verdicts are."""
    if not time_us:
        return ""
    parts = {"faster": 0.0, "best": 0.0, "none": 0.0}
    for row in served:
        parts[answer(row["state"])] += row["time_us"]
    return charts.shares(
        [
            charts.Part(parts["faster"] / time_us, "after", "runs faster now"),
            charts.Part(parts["best"] / time_us, "best", "torch's own kernel is best"),
            charts.Part(parts["none"] / time_us, "none", "no verdict yet"),
        ]
    )


def _curve(data: Data) -> str:
    """The share of GEMM time that was served by a solution when it was called, over the window."""
    if not data.hours:
        return ""
    first, last = data.hours[0]["hour"], data.hours[-1]["hour"]
    each = max(math.ceil((last - first + 1) / POINTS), 1)
    sums: dict[int, list[float]] = {}
    for row in data.hours:
        point = sums.setdefault((row["hour"] - first) // each, [0.0, 0.0])
        point[0] += row["hit_us"]
        point[1] += row["time_us"]
    values = [sums[i][0] / sums[i][1] if i in sums and sums[i][1] else None for i in range((last - first) // each + 1)]
    names = [_moment(hour * 3.6e9) for hour in (first, last)]
    return charts.area(values, names, label="Share of GEMM time that ran on a tuned solution, over time")


def _best_rate(solutions: Sequence[dict[str, Any]]) -> dict[str, float]:
    """By device the highest rate in GB/s at which any solution moves its operands, as a mark for the others."""
    best: dict[str, float] = {}
    for row in solutions:
        best[row["device"]] = max(best.get(row["device"], 0.0), row["gb_s"] or 0.0)
    return best


def _by_run(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    problems: dict[str, set[str]] = {}
    for row in rows:
        problems.setdefault(row["run"], set()).add(row["problem"])
    return {run: len(names) for run, names in sorted(problems.items())}


def _moment(us: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(us / 1e6))
