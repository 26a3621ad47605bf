"""What share of a program's own time its GEMMs are, and what tuning makes of the whole: never more than there is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gemmtuned.configs.moment import duration
from gemmtuned.reports.render import Column, Row, factor, percent

COLUMNS = (
    Column("wall_us", "ran for", duration),
    Column("gemm_share", "of it GEMM", percent),
    Column("program_gain", "program's gain", factor),
    Column("program_limit", "if all were free", factor),
)


def with_own_time(rows: Iterable[Row], own: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `coverage --by run` with wall_us, gemm_share, program_gain, program_limit; None where not known.

    own: of db.of_runs.own_time.  gemm_share: s, of the time that the program would run on stock torch.  program_gain:
    1 / (1 - s + s / g) with the gain g of its GEMMs.  program_limit: 1 / (1 - s), what a GEMM that took no time would
    give.  Times of calls are means of some, so their sum can be more than the program ran: s is then 1 at most, and
    `bounded` is set.  A run on several devices has its time in the row of the device with most GEMM time.
    """
    found: list[dict[str, Any]] = []
    told: set[str] = set()
    for row in sorted(rows, key=lambda row: -row["time_us"]):
        wall_us = float(own[row["run"]]["wall_us"]) if row["run"] in own and row["run"] not in told else 0.0
        told.add(row["run"])
        found.append({**row, **_shares(wall_us, row["time_us"], row["now_time_us"])})
    return found


def _shares(wall_us: float, stock_us: float, now_us: float) -> dict[str, Any]:
    if wall_us <= 0 or stock_us <= 0:
        return dict.fromkeys(("wall_us", "gemm_share", "program_gain", "program_limit")) | {"bounded": False}
    gain = stock_us / now_us if now_us else 1.0
    within_us = min(now_us, wall_us)
    whole_us = wall_us - within_us + within_us * gain
    share = min(within_us * gain / whole_us, 1.0)
    rest = 1.0 - share
    return {
        "wall_us": wall_us,
        "gemm_share": share,
        "program_gain": 1.0 / (rest + share / gain),
        "program_limit": 1.0 / rest if rest > 1e-3 else None,
        "bounded": now_us > wall_us,
    }
