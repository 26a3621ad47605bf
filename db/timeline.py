"""When tuning happened: what was tried and found, by device and time, for the report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from gemmtuned.db import queries
from gemmtuned.db.row_ids import us

_TRIED: Final = """
SELECT h.key AS device, t.started_us / :each AS slot, count(*) AS trials, count(DISTINCT t.problem_id) AS problems
FROM trial t JOIN environment e ON e.id = t.environment_id JOIN device h ON h.id = e.device_id
WHERE t.started_us >= :since GROUP BY device, slot ORDER BY device, slot
"""
_FOUND: Final = """
SELECT h.key AS device, s.published_us / :each AS slot, sum(s.state <> 'default_best') AS faster,
    sum(s.state = 'default_best') AS best
FROM solution s JOIN device h ON h.id = s.device_id
WHERE s.published_us >= :since GROUP BY device, slot ORDER BY device, slot
"""


def timeline(path: Path, *, slots: int, since_s: float, now_s: float | None = None) -> dict[str, list[dict[str, int]]]:
    """Trials, problems, faster and best by device, in each of `slots` equal stretches of the last since_s seconds.

    trials: of candidates, the newest of each alone is kept, so that of long ago there may be fewer than there were.
    faster, best: verdicts that were published then.
    """
    now_us = us(time.time() if now_s is None else now_s)
    each = max(us(since_s) // slots, 1)
    first = now_us // each - slots + 1
    values = {"each": each, "since": first * each}
    found: dict[str, list[dict[str, int]]] = {}
    for sql in (_TRIED, _FOUND):
        for row in queries.ask(path, sql, values):
            slot = row.pop("slot") - first
            device = found.setdefault(row.pop("device"), [dict(_NOTHING) for _ in range(slots)])
            if 0 <= slot < slots:
                device[slot] |= row
    return found


_NOTHING: Final[dict[str, Any]] = {"trials": 0, "problems": 0, "faster": 0, "best": 0}
