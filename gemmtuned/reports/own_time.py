"""What share of a program's own time its GEMMs are, and what tuning makes of the whole: never more than there is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gemmtuned.configs.human_units import duration
from gemmtuned.configs.solution import CROWDED
from gemmtuned.reports.render import Column, Row, factor, percent

COLUMNS = (
    Column("wall_us", "ran for", duration),
    Column("gemm_share", "of it GEMM", percent),
    Column("program_gain", "program's gain", factor),
    Column("program_limit", "if all were free", factor),
)


def with_own_time(rows: Iterable[Row], own: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `coverage --by run` with wall_us, waited_us, gemm_share, program_gain and program_limit.

    own: of db.of_runs.own_time; what is not known is None.  waited_us: the part of wall_us by which others on its CPUs
    made it longer.  The shares are of the rest, since GEMM time is that of a quiet machine.
    gemm_share: s, the GEMMs' share of the time that the program would take on stock torch, with what hits have saved.
    program_gain: 1 / (1 - s + s / g) with the gain g of its GEMMs.
    program_limit: 1 / (1 - s), what a GEMM that took no time would give.
    Times of calls are means of some, so their sum can be more than the program ran: s is then 1 at most, and `bounded`
    is set.  A run on several devices has its time in the row of the device with most GEMM time.
    """
    found: list[dict[str, Any]] = []
    named: set[str] = set()
    for row in sorted(rows, key=lambda row: -row["time_us"]):
        of_it = own.get(row["run"], {}) if row["run"] not in named else {}
        wall_us, waited_us = float(of_it.get("wall_us", 0.0)), float(of_it.get("waited_us", 0.0))
        named.add(row["run"])
        found.append({**row, **_shares(row, wall_us, waited_us)})
    return found


def crowded_notes(rows: Iterable[Row]) -> list[str]:
    """For each program that waited for others on its CPUs for much of its time, what was left out of its shares."""
    return [
        f"{row['run']}: {percent(row['waited_us'] / row['wall_us'])} of the time that it ran its threads waited for "
        "CPUs that others used: the shares are of the rest"
        for row in rows
        if row.get("wall_us") and row["waited_us"] > CROWDED * row["wall_us"]
    ]


def _shares(row: Row, wall_us: float, waited_us: float) -> dict[str, Any]:
    stock_us, now_us = row["time_us"], row["now_time_us"]
    if wall_us <= 0 or stock_us <= 0:
        names = ("wall_us", "waited_us", "gemm_share", "program_gain", "program_limit")
        return dict.fromkeys(names) | {"bounded": False}
    gain = stock_us / now_us if now_us else 1.0
    ran_us = stock_us - row["hit_saved_us"]  # calls made before anything was tuned ran on stock torch
    own_us = max(wall_us - waited_us, 0.0)
    within_us = min(ran_us, own_us)
    on_stock_us = within_us * stock_us / ran_us if ran_us > 0 else stock_us
    whole_us = own_us - within_us + on_stock_us
    share = min(on_stock_us / whole_us, 1.0) if whole_us else 1.0
    rest = 1.0 - share
    return {
        "wall_us": wall_us,
        "waited_us": waited_us,
        "gemm_share": share,
        "program_gain": 1.0 / (rest + share / gain),
        "program_limit": 1.0 / rest if rest > 1e-3 else None,
        "bounded": ran_us > own_us,
    }
