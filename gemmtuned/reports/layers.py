"""By layer: a layer is a weight's N and K, so all problems that differ in M alone stand in one row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from gemmtuned.configs.human_units import duration, span
from gemmtuned.reports.coverage import estimated, frozen_notes
from gemmtuned.reports.render import Column, Report, Table, against_stock, count, factor, more, percent, several

BEST: Final = "default_best"  # the state of a verdict that says torch's own kernel is best
_KEY: Final = ("family", "batch", "n", "k", "dtype", "wdtype", "device", "threads")


def layers(served: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each weight's shape and device, the heaviest first.

    served: of db.queries.served.  Columns: those of the key, layer (its name), m (its smallest and largest M, and how
    many), calls, stock_us and now_us (GEMM time on stock torch, and with what serves it), estimated_us (of stock_us,
    what is by size alone), gain; and faster, best, none: the shares of stock_us with a faster kernel, with the verdict
    that torch's own is best, and without a verdict.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    sizes: dict[tuple[Any, ...], set[int]] = {}
    for row in served:
        key = tuple(row[name] for name in _KEY)
        layer = found.setdefault(key, {**dict(zip(_KEY, key, strict=True)), "layer": name_of(row), "calls": 0, **_ZERO})
        sizes.setdefault(key, set()).add(row["m"])
        layer["calls"] += row["calls"]
        layer["stock_us"] += row["time_us"]
        layer["now_us"] += row["time_us"] / (row["gain"] or 1.0)
        layer["estimated_us"] += row.get("estimated_time_us", 0.0)
        layer[answer(row["state"])] += row["time_us"]
    for key, layer in found.items():
        low, high, many = min(sizes[key]), max(sizes[key]), len(sizes[key])
        layer["m"] = str(low) if many == 1 else f"{low} to {high} ({many} sizes)"
        layer["gain"] = layer["stock_us"] / layer["now_us"] if layer["now_us"] else 1.0
        for name in ("faster", "best", "none"):
            layer[name] = layer[name] / layer["stock_us"] if layer["stock_us"] else 0.0
    return sorted(found.values(), key=lambda layer: -layer["stock_us"])


def answer(state: str | None) -> str:
    """What the look-up of a problem gives: `faster`, `best` (torch's own kernel is the best), `none` (no verdict)."""
    return "none" if state is None else "best" if state == BEST else "faster"


def gain_of_all(rows: Sequence[Mapping[str, Any]]) -> float:
    """GEMM time on stock torch over GEMM time now, all layers together."""
    now_us = sum(row["now_us"] for row in rows)
    return float(sum(row["stock_us"] for row in rows) / now_us) if now_us else 1.0


def report(
    served: Sequence[Mapping[str, Any]],
    *,
    since_s: float,
    compiled: Sequence[Mapping[str, Any]] = (),
    frozen: Sequence[Mapping[str, Any]] = (),
    notes: Sequence[str] = (),
    limit: int | None = None,
) -> Report:
    """`gemmtuned coverage --by layer`; compiled, frozen and limit as for the other forms of coverage."""
    rows = layers(served)
    total = sum(row["stock_us"] for row in rows)
    for row in rows:
        row["share"] = row["stock_us"] / total if total else 0.0
    columns = (
        Column("layer", "layer (N x K)", right=False),
        Column("device", "device", right=False),
        Column("m", "M", right=False),
        Column("calls", "calls", count),
        Column("stock_us", "on stock torch", duration),
        Column("now_us", "now", duration),
        Column("gain", "gain", factor),
        Column("share", "of all GEMM time", percent),
        Column("faster", "runs faster", percent),
        Column("best", "torch is best", percent),
        Column("none", "no verdict", percent),
    )
    window = span(since_s)
    lines = [f"GEMM time of the last {window}: {against_stock(gain_of_all(rows))}"] if rows else []
    lines += by_size(rows)
    shown = rows[:limit]
    table = Table("rows", columns, shown, empty=f"No GEMM was recorded in the last {window}.")
    facts = {
        "by": "layer",
        "weight": "time",
        "since_s": since_s,
        "total": {
            "covered_share": _covered(rows),
            "stock_us": total,
            "now_us": sum(row["now_us"] for row in rows),
            "gain": gain_of_all(rows),
            "estimated_share": sum(row["estimated_us"] for row in rows) / total if total else None,
        },
        "compiled_problems": len({row["problem"] for row in compiled}),
        "frozen_problems": len({row["problem"] for row in frozen}),
    }
    return Report(
        "coverage", [table], facts=facts, lines=lines, notes=[*more(shown, rows), *notes, *frozen_notes(frozen)]
    )


def by_size(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The line that says which part of these layers' time nobody has timed; none where all of it was."""
    total = sum(row["stock_us"] for row in rows)
    return estimated(sum(row["estimated_us"] for row in rows) / total) if total else []


def _covered(rows: Sequence[Mapping[str, Any]]) -> float | None:
    total = sum(row["stock_us"] for row in rows)
    return sum(row["stock_us"] * (1 - row["none"]) for row in rows) / total if total else None


def name_of(row: Mapping[str, Any]) -> str:
    """The name of a row's layer; row: with the columns of a problem."""
    family = "" if row["family"] == "dense" else f"{row['family']} "
    batch = "" if row["batch"] == 1 else f"{row['batch']}x"
    types = row["dtype"] if row["wdtype"] == row["dtype"] else f"{row['dtype']}/{row['wdtype']}"
    threads = f", {several(row['threads'], 'thread')}" if row["threads"] else ""
    return f"{family}{batch}{row['n']}x{row['k']} {types}{threads}"


_ZERO: Final = {"stock_us": 0.0, "now_us": 0.0, "estimated_us": 0.0, "faster": 0.0, "best": 0.0, "none": 0.0}
