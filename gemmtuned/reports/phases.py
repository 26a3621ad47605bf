"""What coverage leaves out: calls of warm-ups and the like, which programs have named as such."""

from __future__ import annotations

from collections.abc import Sequence

from gemmtuned.configs.human_units import span
from gemmtuned.reports.render import Row, count, several


def phase_notes(found: Sequence[Row], since_s: float) -> list[str]:
    """One line for all phases of the window. found: of db.phases."""
    if not found:
        return []
    calls = sum(row["calls"] for row in found)
    parts = ", ".join(f"{row['phase']} {count(row['calls'])}" for row in found)
    return [
        f"{several(calls, 'call')} of the last {span(since_s)} {'is' if calls == 1 else 'are'} left out here and "
        f"in the queue: programs made {'it' if calls == 1 else 'them'} before they served anybody ({parts})."
    ]
