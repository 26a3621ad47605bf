"""What belongs to one run label: how long its programs ran, and which problems they called."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import SettingError
from gemmtuned.configs.padding import COVERS
from gemmtuned.configs.problem import known_problems
from gemmtuned.db.ask import DAY_S, ask
from gemmtuned.db.labels import NOT_GOING
from gemmtuned.db.row_ids import us

_OWN_TIME: Final = """
SELECT run, count(*) AS processes,
    sum(ran_us) AS wall_us, sum(min(1.0 * waited_us * ran_us / max(all_us, 1), ran_us)) AS waited_us
FROM (
    SELECT run, waited_us, max(coalesce(ended_us, beat_us) - max(started_us, :since), 0) AS ran_us,
        coalesce(ended_us, beat_us) - started_us AS all_us
    FROM session WHERE coalesce(ended_us, beat_us) >= :since AND calls + dropped > 0
) GROUP BY run
"""
_CALLED: Final = """
SELECT p.text AS problem FROM problem p WHERE p.id IN (
    SELECT problem_id FROM every_sighting WHERE run_id IN (SELECT id FROM run WHERE name = ?)
)
"""


def own_time(path: Path, *, since_s: float = DAY_S, now_s: float | None = None) -> dict[str, dict[str, Any]]:
    """For each run: processes, wall_us and waited_us of the last since_s seconds.

    wall_us: the time that its processes ran, added up.  waited_us: the part of it by which they ran longer because
    others used the CPUs.  Only processes that made a call count: the time of a parent that waits for its workers cannot
    become shorter.
    """
    since = us((time.time() if now_s is None else now_s) - since_s)
    return {row.pop("run"): row for row in ask(path, _OWN_TIME, {"since": since})}


def labels(path: Path) -> list[str]:
    """The labels of the programs that were counted."""
    return [row["name"] for row in ask(path, f"SELECT name FROM run WHERE {NOT_GOING} ORDER BY name")]  # noqa: S608


def called_by(path: Path, run: str) -> set[str]:
    """Problems that programs of this label called. Raises SettingError when there is no such label."""
    runs = labels(path)
    if run not in runs:
        known = ", ".join(runs[:20]) or "none yet"
        raise SettingError(f"no program called {run!r} was counted; there are: {known}")
    return {row["problem"] for row in ask(path, _CALLED, (run,))}


def filed_for(problems: set[str]) -> set[tuple[str, str]]:
    """(problem, covers) under which solutions for these problems are filed: as themselves, and as their buckets."""
    return {
        (str(one.filed(covers)), covers)
        for one in known_problems({"problem": text} for text in problems)
        for covers in COVERS
    }
