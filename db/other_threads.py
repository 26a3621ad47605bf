"""Products that run stock torch with their number of CPU threads and are tuned for another one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.solution import LIVE_STATES
from gemmtuned.db.queries import DAY_S, ask
from gemmtuned.db.rows import us

_SAME: Final = " AND ".join(
    f'b."{name}" IS p."{name}"'
    for name in (
        "family", "batch", "n", "k", "bias", "dtype", "wdtype", "out_dtype", "scale", "layout", "weight_state",
        "math_mode", "deterministic", "experts", "topk", "inter", "act", "batch_invariant",
    )
)  # fmt: skip
_TUNED_ELSEWHERE: Final = f"""
WITH missed AS MATERIALIZED (
    SELECT DISTINCT d.problem_id, e.device_id
    FROM demand d JOIN environment e ON e.id = d.environment_id
    WHERE d.solution_id IS NULL AND d.last_seen_us >= ?
),
tuned AS MATERIALIZED (
    SELECT p.*, s.covers, s.device_id FROM solution s JOIN problem p ON p.id = s.problem_id
    WHERE p.threads > 0 AND s.state IN ({", ".join(f"'{state}'" for state in LIVE_STATES)})
)
SELECT p.threads, b.threads AS tuned_threads, count(DISTINCT p.id) AS problems
FROM missed d JOIN problem p ON p.id = d.problem_id JOIN tuned b ON b.device_id = d.device_id AND {_SAME}
WHERE p.threads > 0 AND b.threads <> p.threads
    AND b.m = CASE b.covers WHEN 'fine' THEN p.m_fine WHEN 'coarse' THEN p.m_coarse ELSE p.m END
GROUP BY p.threads, b.threads ORDER BY problems DESC, p.threads, b.threads
"""  # noqa: S608


def other_threads(path: Path, *, since_s: float = DAY_S, now_s: float | None = None) -> list[dict[str, Any]]:
    """Of problems called in the last since_s seconds that no solution serves: threads, tuned_threads, problems (n)."""
    since = us((time.time() if now_s is None else now_s) - since_s)
    return ask(path, _TUNED_ELSEWHERE, (since,))
