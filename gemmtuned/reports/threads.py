"""Why programs of another number of CPU threads are not covered: that number is part of what is looked up."""

from __future__ import annotations

from collections.abc import Sequence

from gemmtuned.reports.render import Row, count


def threads_notes(found: Sequence[Row]) -> list[str]:
    """One line for each number of threads with which programs run stock torch. found: of db.other_threads."""
    notes = []
    for threads in dict.fromkeys(row["threads"] for row in found):
        rows = [row for row in found if row["threads"] == threads]
        most = max(row["problems"] for row in rows)  # one problem may be tuned for several numbers
        others = " and ".join(str(row["tuned_threads"]) for row in sorted(rows, key=lambda row: row["tuned_threads"]))
        notes.append(
            f"With {_spelled(threads)}, stock torch runs for {count(most)} problem{'s' * (most != 1)} whose shape is "
            f"tuned at {others} thread{'s' * (others != '1')}: each number is tuned by itself. Run with that many "
            f"(OMP_NUM_THREADS), or tune for {threads}: gemmtuned tune --threads {threads}"
        )
    return notes


def _spelled(threads: int) -> str:
    return f"{threads} thread{'s' * (threads != 1)}"
