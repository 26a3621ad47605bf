"""`--by layer` of `untuned` and `gains`: one row for each weight's N and K, all its M together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gemmtuned.configs.human_units import duration
from gemmtuned.reports.layers import BEST, name_of
from gemmtuned.reports.render import Column, Report, Row, Table, count, factor, more


def untuned(rows: Sequence[Row], each: Report, *, limit: int) -> Report:
    """rows: of the view `untuned`; each: the report of them by problem."""
    found = []
    for layer, of_it in _layers(rows):
        sizes = sorted({row["m"] for row in of_it})
        found.append(
            {
                "layer": layer, "device": of_it[0]["device"], "problems": len(of_it), "m": _range(sizes),
                "calls": sum(row["calls"] for row in of_it),
                "est_time_us": sum(row["est_time_us"] for row in of_it),
                "est_saving_us": sum(row["est_saving_us"] for row in of_it),
                "worth": sum(row["worth"] for row in of_it),
                "states": ", ".join(sorted({row["state"] for row in of_it})),
            }
        )  # fmt: skip
    found.sort(key=lambda row: -row["worth"])
    columns = (
        Column("layer", "layer (N x K)", right=False),
        Column("m", "M", right=False),
        Column("problems", "problems", count),
        Column("calls", "calls", count),
        Column("est_time_us", "est. time", duration),
        Column("est_saving_us", "may save", duration),
        Column("states", "state", right=False),
    )
    return _report(each, columns, found, limit)


def gains(rows: Sequence[Row], each: Report, *, limit: int) -> Report:
    """rows: live ones of the view `solutions`; each: the report of them by solution.

    gain: of all calls so far, else of the races where there were none.
    """
    found = []
    for layer, of_it in _layers(rows):
        faster = [row for row in of_it if row["state"] != BEST]
        weighed = [(row["hit_calls"] or 0, row) for row in of_it]
        if not any(weight for weight, _ in weighed):
            weighed = [(1, row) for row in of_it]
        stock_us = sum(weight * row["baseline_us"] for weight, row in weighed)
        now_us = sum(weight * row["us"] for weight, row in weighed)
        found.append(
            {
                "layer": layer, "device": of_it[0]["device"], "faster": len(faster), "best": len(of_it) - len(faster),
                "hit_calls": sum(row["hit_calls"] or 0 for row in of_it), "speedup": stock_us / now_us,
                "saved_us": sum(row["saved_us"] or 0.0 for row in of_it),
            }
        )  # fmt: skip
    found.sort(key=lambda row: (-row["saved_us"], -row["speedup"]))
    columns = (
        Column("layer", "layer (N x K)", right=False),
        Column("device", "device", right=False),
        Column("faster", "faster", count),
        Column("best", "torch is best", count),
        Column("hit_calls", "calls", count),
        Column("speedup", "gain", factor),
        Column("saved_us", "saved", duration),
    )
    return _report(each, columns, found, limit)


def _report(each: Report, columns: tuple[Column, ...], found: Sequence[Row], limit: int) -> Report:
    """What it says around its table is what the report of single rows says."""
    shown = found[:limit] if limit else found
    table = Table("rows", columns, shown, empty=each.tables[0].empty)
    return replace(each, tables=[table], facts={**each.facts, "by": "layer"}, notes=[*more(shown, found), *each.notes])


def _layers(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((name_of(row), row["device"]), []).append(row)
    return [(layer, of_it) for (layer, _), of_it in found.items()]


def _range(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} ({len(sizes)} sizes)"
