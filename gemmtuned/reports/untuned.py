"""What is not tuned yet, worth most first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gemmtuned.configs.human_units import duration
from gemmtuned.reports.render import Column, Report, Row, Table, age, count, more

_STATES: Final = ("queued", "leased", "failed", "stale", "untunable")


def report(rows: Sequence[Row], *, limit: int, now_s: float, recorded: int, unseen: Sequence[str] = ()) -> Report:
    """rows: of the view `untuned`. limit: how many to show, 0 for all. recorded: how many problems were, ever.

    unseen: what is to be said of programs of which nothing was recorded, where nothing is.
    """
    ordered = sorted(rows, key=lambda row: -row["worth"])
    shown = ordered[:limit] if limit else ordered
    columns = (
        Column("problem", "problem", right=False),
        Column("calls", "calls", count),
        Column("est_time_us", "est. time", duration),
        Column("est_saving_us", "may save", duration),
        Column("state", "state", right=False),
        Column("last_seen", "seen", lambda us: age(now_s - us / 1e6)),
        Column("reason", "why", lambda reason: reason or "", right=False),
    )
    states = {state: sum(row["state"] == state for row in rows) for state in _STATES}
    notes = more(shown, ordered)
    if states["queued"]:
        notes.append(
            "gemmtuned daemon tunes them while the machine is idle, gemmtuned tune at once, gemmtuned tune PROBLEM one "
            "of them."
        )
    if states["untunable"]:
        notes.append(f"{count(states['untunable'])} of them cannot be tuned here (why: the last column).")
    if states["stale"]:
        notes.append(
            f"{count(states['stale'])} of them stale: not called for a week, to be tuned only when called again; "
            "gemmtuned retune PROBLEM has them tuned all the same"
        )
    if states["failed"]:
        notes.append(
            f"{count(states['failed'])} of them only after gemmtuned retune PROBLEM: failed, or taken out by hand "
            "(why: the last column)"
        )
    empty = "Everything that was recorded has a verdict." if recorded else "Nothing was recorded yet, so nothing waits."
    return Report(
        "untuned",
        [Table("rows", columns, shown, empty=empty)],
        facts={"total": len(ordered), "states": states, "recorded": recorded},
        lines=[] if recorded else [*unseen],
        notes=notes,
    )
