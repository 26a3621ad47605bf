"""Calls that programs made under a phase, such as a warm-up: counted, and no traffic."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from gemmtuned.db.ask import DAY_S, ask
from gemmtuned.db.row_ids import us

_PHASES: Final = """
SELECT phase, count(DISTINCT problem_id) AS problems, sum(calls) AS calls FROM phase_call
WHERE hour >= ? AND last_seen_us >= ? GROUP BY phase ORDER BY calls DESC, phase
"""


def phases(path: Path, *, since_s: float = DAY_S) -> list[dict[str, Any]]:
    """Phase, problems and calls of the last since_s seconds, most calls first. Hours count whole, as in `coverage`."""
    since = us(time.time() - since_s)
    return ask(path, _PHASES, (since // 3_600_000_000, since))
