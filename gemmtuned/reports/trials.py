"""What was tried, newest first: each candidate's time and error, or why it was given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gemmtuned.configs.human_units import duration
from gemmtuned.configs.solution import Candidate
from gemmtuned.reports.render import Column, Report, Row, Table, age, small


def report(rows: Sequence[Row], *, problem: str | None, limit: int, now_s: float) -> Report:
    """rows: of the view `trials`, newest first; one more than `limit` when there are more. problem: whose they are."""
    shown: list[dict[str, Any]] = [
        {**row, "candidate": str(Candidate(row["backend"], row["config"]))} for row in (rows[:limit] if limit else rows)
    ]
    columns = (
        Column("problem", "problem", right=False),
        Column("candidate", "candidate", right=False),
        Column("phase", "phase", right=False),
        Column("us", "time", duration),
        Column("err", "error", small),
        Column("outcome", "outcome", right=False),
        Column("started", "when", lambda us: age(now_s - us / 1e6)),
        Column("note", "note", lambda note: note or "", right=False),
    )
    notes = ["There are more: --limit 0 shows all."] if len(shown) < len(rows) else []
    empty = f"No candidate of {problem} was tried yet." if problem else "No candidate was tried yet."
    return Report(
        "trials",
        [Table("rows", columns, shown, empty=empty)],
        facts={"problem": problem},
        notes=notes,
    )
