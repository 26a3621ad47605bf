"""Products that run stock torch with their number of CPU threads and are tuned for another one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.padding import COVERS, padded_m
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import LIVE_STATES
from gemmtuned.db.ask import DAY_S, ask, of_window
from gemmtuned.db.row_ids import us

# All that decides but m and the number of threads: columns that later steps bring are in it
_BUT_THREADS: Final = "replace(',' || rest || ',', ',threads=' || threads || ',', ',')"
_TUNED: Final = f"""
tuned AS MATERIALIZED (
    SELECT p.m, p.threads, s.covers, s.device_id, {_BUT_THREADS} AS but_threads
    FROM solution s JOIN problem p ON p.id = s.problem_id
    WHERE p.threads > 0 AND s.state IN ({", ".join(f"'{state}'" for state in LIVE_STATES)})
)
"""  # noqa: S608
_MISSED: Final = f"""
missed AS MATERIALIZED (
    SELECT p.id, p.m, p.m_fine, p.m_coarse, p.threads, d.environment_id, e.device_id, {_BUT_THREADS} AS but_threads
    FROM demand d JOIN environment e ON e.id = d.environment_id JOIN problem p ON p.id = d.problem_id
    WHERE d.solution_id IS NULL AND d.last_seen_us >= :since AND p.threads > 0
)
"""  # noqa: S608
_TUNED_BESIDE: Final = """
missed p JOIN tuned b ON b.but_threads = p.but_threads AND b.device_id = p.device_id AND b.threads <> p.threads
    AND b.m = CASE b.covers WHEN 'fine' THEN p.m_fine WHEN 'coarse' THEN p.m_coarse ELSE p.m END
"""
_ANY: Final = f"WITH {_MISSED}, {_TUNED} SELECT 1 FROM {_TUNED_BESIDE} LIMIT 1"  # noqa: S608
_ELSEWHERE: Final = f"""
WITH {_MISSED}, {_TUNED},
called AS MATERIALIZED (
    SELECT DISTINCT problem_id, environment_id, run_id FROM {{sightings}}
    WHERE hour >= :hour AND last_seen_us >= :since AND (:run IS NULL OR run_id = (SELECT id FROM run WHERE name = :run))
)
SELECT p.threads, b.threads AS tuned_threads, count(DISTINCT p.id) AS problems,
    json_group_array(DISTINCT r.name) AS runs
FROM {_TUNED_BESIDE}
JOIN called c ON c.problem_id = p.id AND c.environment_id = p.environment_id JOIN run r ON r.id = c.run_id
GROUP BY p.threads, b.threads ORDER BY problems DESC, p.threads, b.threads
"""  # noqa: S608
_OF_ONE: Final = f"""
WITH seen AS (
    SELECT e.device_id FROM problem p
    JOIN demand d ON d.problem_id = p.id JOIN environment e ON e.id = d.environment_id
    WHERE p.rest = :rest AND p.m = :exact
),
{_TUNED}
SELECT DISTINCT b.threads FROM tuned b
WHERE b.but_threads = :but_threads AND b.threads <> :threads
    AND b.m = CASE b.covers WHEN 'fine' THEN :fine WHEN 'coarse' THEN :coarse ELSE :exact END
    AND (NOT EXISTS (SELECT 1 FROM seen) OR b.device_id IN (SELECT device_id FROM seen))
ORDER BY b.threads
"""  # noqa: S608


def other_threads(
    path: Path, *, since_s: float = DAY_S, now_s: float | None = None, run: str | None = None
) -> list[dict[str, Any]]:
    """Threads, tuned_threads, number of problems and runs of what was called without a solution in the last since_s.

    run: of what programs of this label called, alone.
    """
    since = us((time.time() if now_s is None else now_s) - since_s)
    if not ask(path, _ANY, {"since": since}):  # most often: the sightings, which are many, are not read then
        return []
    found = of_window(path, _ELSEWHERE, since, run=run)
    return [{**row, "runs": sorted(json.loads(row["runs"]))} for row in found]


def tuned_with(path: Path, problem: Problem) -> list[int]:
    """The other numbers of threads with which the same product is tuned, by itself or by its bucket.

    It looks at the devices where this problem was seen, at all when it never was.
    """
    if not problem.threads:
        return []
    values = {covers: padded_m(problem.m, problem.n, covers) for covers in COVERS}
    but_threads = f",{problem.rest},".replace(f",threads={problem.threads},", ",")
    of = {"rest": problem.rest, "but_threads": but_threads, "threads": problem.threads}
    return [row["threads"] for row in ask(path, _OF_ONE, {**values, **of})]
