"""Why programs of another number of CPU threads are not covered: that number is part of what is looked up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from gemmtuned.reports.render import Row, clean, several

_NAMED: Final = 3  # programs


def threads_notes(found: Sequence[Row]) -> list[str]:
    """One line for each number of threads with which programs run stock torch. found: of db.other_threads."""
    notes = []
    for threads in dict.fromkeys(row["threads"] for row in found):
        rows = [row for row in found if row["threads"] == threads]
        most = max(row["problems"] for row in rows)  # one problem may be tuned for several numbers of threads
        tuned = sorted(row["tuned_threads"] for row in rows)
        others = " or ".join(map(str, tuned))
        them = f"OMP_NUM_THREADS={tuned[0]}" if len(tuned) == 1 else "OMP_NUM_THREADS"
        notes.append(
            f"{_named({run for row in rows for run in row['runs']})} with {_spelled(threads)}: stock torch runs for "
            f"{several(most, 'problem')} whose shape is tuned at {others} thread{'s' * (others != '1')}. Each number "
            f"of threads has a fastest kernel of its own. Tune for {threads}: gemmtuned tune --threads {threads}. "
            f"Or run it with {others}: {them}"
        )
    return notes


def _named(runs: Collection[str]) -> str:
    """`serve, train and 2 more`."""
    shown = sorted(runs)[:_NAMED]
    rest = len(runs) - len(shown)
    return ", ".join(map(clean, shown)) + (f" and {rest} more" if rest else "")


def _spelled(threads: int) -> str:
    return f"{threads} thread{'s' * (threads != 1)}"
