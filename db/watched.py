"""What `gemmtuned top` shows of the database, asked by the daemon on its behalf: small answers, read-only."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from gemmtuned.db import queries
from gemmtuned.db.row_ids import us

_ANSWERED: Final = """
WITH recent AS (
    SELECT problem_id, environment_id, outcome = 'miss' AS missed, sum(calls) AS calls FROM every_sighting
    WHERE hour >= :hour AND last_seen_us >= :since GROUP BY problem_id, environment_id, missed
)
SELECT CASE WHEN s.state IS NULL THEN 'none' WHEN s.state = 'default_best' THEN 'best' ELSE 'faster' END AS answer,
    total(t.calls * c.us) AS time_us
FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
LEFT JOIN solution s ON s.id = c.solution_id AND NOT (c.waits AND t.missed)
GROUP BY answer
"""
_NEWEST: Final = """
SELECT p.text AS problem, h.key AS device, s.covers, s.backend, s.config, s.state, s.baseline_us, s.us,
    s.generation, s.published_us
FROM solution s JOIN problem p ON p.id = s.problem_id JOIN device h ON h.id = s.device_id
WHERE s.retired_generation IS NULL ORDER BY s.generation DESC, s.id DESC LIMIT ?
"""


def answered(path: Path) -> dict[str, float]:
    """GEMM time in us on stock torch in the last 24 h, by what the look-up gives today.

    faster: a kernel that is faster.  best: the verdict that torch's own is best.  none: no verdict,
    or none for calls that it may not serve.
    """
    since = us(time.time() - queries.DAY_S)
    found = queries.ask(path, _ANSWERED, {"since": since, "hour": since // 3_600_000_000})
    return {"faster": 0.0, "best": 0.0, "none": 0.0} | {row["answer"]: row["time_us"] for row in found}


def newest(path: Path, *, limit: int = 20) -> list[dict[str, Any]]:
    """The verdicts in use that came last: problem, device, covers, backend, config, state, times, generation."""
    return queries.ask(path, _NEWEST, (limit,))


def open_problems(path: Path) -> int:
    """How many problems wait to be tuned: without a verdict, tunable, not failed, called in the last week."""
    return sum(row["open_problems"] - row["failed"] - row["stale"] for row in queries.environments(path))
