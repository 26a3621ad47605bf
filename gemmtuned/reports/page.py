"""The page that `gemmtuned report` writes: what is collected from the database, and how it becomes HTML.

The page answers, from top to bottom: how much of the traffic is tuned, how that came about, which layers gained, what
serves each problem, what waits and why, what is not seen.  A layer is an (N, K): all problems of one weight's shape,
whatever M they were called with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gemmtuned import __version__
from gemmtuned.configs.human_units import duration, span
from gemmtuned.configs.solution import LIVE_STATES
from gemmtuned.db import queries
from gemmtuned.db.ask import kept_open
from gemmtuned.db.rollup import hours_of
from gemmtuned.db.timeline import timeline
from gemmtuned.reports import charts
from gemmtuned.reports.layers import BEST, answer, by_size, gain_of_all
from gemmtuned.reports.layers import layers as by_layer
from gemmtuned.reports.render import clean, count, factor, percent
from gemmtuned.reports.unraced import unfit_notes, unraced_notes

LAYERS: Final = 15
PROBLEMS: Final = 200
WAITING: Final = 50
POINTS: Final = 120  # on the curve over time
SLOTS: Final = 90  # on the tuning timeline


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
    unraced: Sequence[dict[str, Any]]
    unfit: Sequence[dict[str, Any]]
    publications: Sequence[dict[str, Any]]
    timeline: Mapping[str, Sequence[Mapping[str, int]]]
    sessions: Sequence[dict[str, Any]]


def collect(database: Path, *, since_s: float, now_s: float) -> Data:
    """Ask the database. Raises StoreError when it cannot be read."""
    with kept_open(database):
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
            unraced=queries.unraced(database, since_s=since_s),
            unfit=queries.unfit(database, since_s=since_s),
            publications=queries.publications(database, limit=20),
            timeline=timeline(database, slots=SLOTS, since_s=since_s, now_s=now_s),
            sessions=queries.sessions(database),
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
        "window": span(data.since_s),
        "devices": sorted({row["device"] for row in (*data.served, *data.untuned)}),
        "database": data.database,
        "time_us": time_us,
        "calls": sum(row["calls"] for row in data.served),
        "saved_us": sum(row["saved_us"] or 0.0 for row in data.solutions),
        "speedup": gain_of_all(layers),
        "by_size": by_size(layers),
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
        "floor": _floor(live),
        "untuned": data.untuned[:WAITING],
        "untuned_left": len(data.untuned) > WAITING,
        "compiled": len({row["problem"] for row in data.compiled}),
        "frozen": _by_run(data.frozen),
        "unraced": [*unraced_notes(data.unraced), *unfit_notes(data.unfit)],
        "untunable": (sum(r["untunable_problems"] for r in data.runs), sum(r["untunable_calls"] for r in data.runs)),
        "notes": dict(_notes(data.sessions)),
        "publications": data.publications,
        "timeline": _timeline(data),
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
        long = hours_of(row["hour"], int(data.now_s // 3600))
        over = sorted({(hour - first) // each for hour in range(row["hour"], min(row["hour"] + long, last + 1))})
        for slot in over:  # a day or a block of four weeks lies over several
            point = sums.setdefault(slot, [0.0, 0.0])
            point[0] += row["hit_us"] / len(over)
            point[1] += row["time_us"] / len(over)
    values = [sums[i][0] / sums[i][1] if i in sums and sums[i][1] else None for i in range((last - first) // each + 1)]
    names = [_moment(hour * 3.6e9) for hour in (first, last)]
    return charts.area(values, names, label="Share of GEMM time that ran on a tuned solution, over time")


def _floor(solutions: Sequence[dict[str, Any]]) -> Callable[[Mapping[str, Any]], float]:
    """How many times the floor a solution takes: the time for its bytes and its operations at the device's best rates.

    The best rates are the highest in GB/s and in TFLOPS that any solution of that device and data type has here, so
    the best of them is at the floor, and a device that nothing was well tuned on looks better than it is.
    """
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for row in solutions:
        key = row["device"], row["dtype"]
        gb_s, tflops = best.get(key, (0.0, 0.0))
        best[key] = max(gb_s, row["gb_s"] or 0.0), max(tflops, row["tflops"] or 0.0)

    def times(row: Mapping[str, Any]) -> float:
        gb_s, tflops = best[row["device"], row["dtype"]]
        parts = [own / most for own, most in ((row["gb_s"], gb_s), (row["tflops"], tflops)) if own and most]
        return 1.0 / max(parts) if parts else 1.0

    return times


def _timeline(data: Data) -> str:
    """What was tried on each device, and the verdicts that came of it, over the window."""

    def strips() -> Iterator[charts.Strip]:
        for device, slots in sorted(data.timeline.items()):

            def tried(i: int, slots: Sequence[Mapping[str, int]] = slots) -> str:
                return f"{at(i)}: {count(slots[i]['trials'])} trials of {count(slots[i]['problems'])} problems"

            def found(i: int, slots: Sequence[Mapping[str, int]] = slots) -> str:
                return f"{at(i)}: {slots[i]['faster']} faster, {slots[i]['best']} best on torch"

            trials = [slot["trials"] for slot in slots]
            verdicts = [slot["faster"] + slot["best"] for slot in slots]
            yield charts.Strip(f"{device}: tried", _of_most(trials), tried, "before")
            yield charts.Strip("verdicts", _of_most(verdicts), found, "after")

    def at(i: int) -> str:
        return _moment((data.now_s - data.since_s * (SLOTS - 1 - i) / SLOTS) * 1e6)

    return charts.strips(list(strips()), (at(0), at(SLOTS - 1)), label="What was tuned when, by device")


def _of_most(values: Sequence[int]) -> list[float]:
    """As shares of the largest: each strip has a scale of its own."""
    most = max(values, default=0)
    return [value / most if most else 0.0 for value in values]


def _notes(sessions: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """What programs that run now have to say: why calls of theirs are not seen, or not routed."""
    for row in sessions:
        if row["state"] == "live" and row["note"]:
            yield row["run"], row["note"]


def _by_run(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    problems: dict[str, set[str]] = {}
    for row in rows:
        problems.setdefault(row["run"], set()).add(row["problem"])
    return {run: len(names) for run, names in sorted(problems.items())}


def _moment(us: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(us / 1e6))
