"""Questions about a window of time: what was called in it, how much of it is covered, and which solution serves it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import SettingError
from gemmtuned.db.ask import DAY_S, PROBLEM, ask, of_window
from gemmtuned.db.row_ids import us

WEIGHTS: Final = {"calls": "calls", "flops": "flops", "time": "time_us"}
# by: (columns named, grouped by); the views coverage* say the same for the last 24 h
_GROUPS: Final = {
    "family": ("p.family, h.key AS device", "p.family, h.id"),
    "device": ("h.key AS device", "h.id"),
    "run": ("r.name AS run, h.key AS device", "t.run_id, h.id"),
    "problem": (f"p.text AS problem, {PROBLEM}, h.key AS device", "t.problem_id, h.id"),
}
# One number to group by and few columns, since all rows of the window are sorted. of_window has {sum} and {each_hour}
_COVERAGE: Final = """
WITH by_hour AS (
    SELECT hour, problem_id, environment_id, {run_id} AS run_id, {sum}(calls) AS calls,
        {sum}(calls * (outcome = 'exact')) AS exact_calls,
        {sum}(calls * (outcome = 'padded')) AS padded_calls,
        {sum}(calls * graph) AS graph_calls
    FROM {sightings} WHERE hour >= :hour AND last_seen_us >= :since
        AND (:run IS NULL OR run_id IN (SELECT id FROM run WHERE name = :run))
    {each_hour}
),
recent AS (
    SELECT problem_id, environment_id, run_id, sum(calls) AS calls, sum(exact_calls) AS exact_calls,
        sum(padded_calls) AS padded_calls, sum(calls) - sum(exact_calls) - sum(padded_calls) AS missed_calls,
        sum(graph_calls) AS graph_calls, min(hour) AS first_hour, max(hour) AS last_hour
    FROM by_hour GROUP BY problem_id << 32 | environment_id{and_run}
),
known AS MATERIALIZED (
    SELECT t.*, c.us, c.roofline_us, c.solution_id IS NOT NULL AND NOT c.waits AS tuned,
        CASE WHEN c.solution_id IS NULL THEN 0 WHEN c.waits THEN t.calls - t.missed_calls ELSE t.calls END AS covered,
        c.waits AND t.missed_calls > 0 AS unserved, c.solution_id IS NULL AND NOT d.tunable AS untunable,
        s.state IS NOT NULL AND s.state <> 'default_best' AS faster, coalesce(s.baseline_us / s.us, 1.0) AS gain
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
    LEFT JOIN solution s ON s.id = c.solution_id
    JOIN demand d ON d.environment_id = t.environment_id AND d.problem_id = t.problem_id
)
SELECT {columns},
    count(DISTINCT t.problem_id) AS problems,
    count(DISTINCT CASE WHEN t.tuned THEN t.problem_id END) AS tuned_problems,
    sum(t.calls) AS calls, sum(t.exact_calls) AS exact_calls, sum(t.padded_calls) AS padded_calls,
    sum(t.missed_calls) AS missed_calls,
    sum(t.calls * p.flops) AS flops, sum(t.calls * t.us) AS time_us,
    sum(t.covered) AS covered_calls,
    sum(t.covered * p.flops) AS covered_flops,
    sum(t.covered * t.us) AS covered_time_us,
    sum(t.covered * t.us * t.faster) AS faster_time_us,
    sum((t.calls - t.covered + t.covered / t.gain) * t.us) AS now_time_us,
    sum((t.exact_calls + t.padded_calls) * t.us * (1.0 - 1.0 / t.gain)) AS hit_saved_us,
    count(DISTINCT CASE WHEN t.untunable THEN t.problem_id END) AS untunable_problems,
    sum(t.calls * t.untunable) AS untunable_calls,
    count(DISTINCT CASE WHEN t.unserved THEN t.problem_id END) AS unserved_problems,
    sum(t.missed_calls * t.unserved) AS unserved_calls,
    sum(t.calls * t.us * (t.us = t.roofline_us)) AS estimated_time_us,
    sum(t.graph_calls) AS graph_calls,
    min(t.first_hour) * 3600000000 AS first_hour, max(t.last_hour) * 3600000000 AS last_hour
FROM known t
JOIN problem p ON p.id = t.problem_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id
LEFT JOIN run r ON r.id = t.run_id
GROUP BY {group}
ORDER BY {weight} DESC
"""
_COVERED_TIME: Final = """
WITH by_hour AS (
    SELECT hour, problem_id, environment_id, {sum}(calls) AS calls, {sum}(calls * (outcome <> 'miss')) AS hits
    FROM {sightings} WHERE hour >= :hour AND last_seen_us >= :since {each_hour}
),
recent AS (
    SELECT problem_id, environment_id, sum(calls) AS calls, sum(hits) AS hits
    FROM by_hour GROUP BY problem_id << 32 | environment_id
)
SELECT total(t.calls * c.us) AS time_us, total(c.us * CASE WHEN c.solution_id IS NULL THEN 0
    WHEN c.waits THEN t.hits ELSE t.calls END) AS covered_us
FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
"""
_FROZEN: Final = """
SELECT p.text AS problem, {problem}, h.key AS device, r.name AS run, sum(g.calls) AS calls, s.generation,
    max(g.last_seen_us) AS last_seen
FROM {sightings} g
JOIN demand d ON d.problem_id = g.problem_id AND d.environment_id = g.environment_id
JOIN solution s ON s.id = d.solution_id
JOIN problem p ON p.id = g.problem_id
JOIN run r ON r.id = g.run_id
JOIN environment e ON e.id = g.environment_id
JOIN device h ON h.id = e.device_id
WHERE g.hour >= :hour AND g.last_seen_us >= :since AND g.graph = 1 AND g.outcome = 'miss'
    AND s.state <> 'default_best' AND g.last_seen_us > s.published_us + 10000000
    AND NOT (d.wanted NOT IN ('', 'operands') AND d.wanted_of = d.solution_id)
GROUP BY g.problem_id, g.environment_id, g.run_id ORDER BY calls DESC
"""
_SERVED: Final = f"""
WITH recent AS (
    SELECT problem_id, environment_id, outcome = 'miss' AS missed, sum(calls) AS calls
    FROM every_sighting WHERE hour >= :hour AND last_seen_us >= :since
        AND (:run IS NULL OR run_id IN (SELECT id FROM run WHERE name = :run))
    GROUP BY problem_id, environment_id, missed
),
known AS MATERIALIZED (
    SELECT t.*, c.us, c.roofline_us, CASE WHEN NOT (c.waits AND t.missed) THEN c.solution_id END AS solution_id
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
)
SELECT p.text AS problem, {PROBLEM}, h.key AS device, sum(t.calls) AS calls, sum(t.calls * t.us) AS time_us,
    sum(t.calls * t.us * (t.us = t.roofline_us)) AS estimated_time_us,
    s.backend, s.config, s.covers, s.state, s.baseline_us / s.us AS gain
FROM known t
JOIN problem p ON p.id = t.problem_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id
LEFT JOIN solution s ON s.id = t.solution_id
GROUP BY t.problem_id, h.id, s.id
ORDER BY time_us DESC
"""  # noqa: S608
_TRAFFIC: Final = """
WITH cost AS MATERIALIZED (SELECT problem_id, environment_id, us FROM problem_cost)
SELECT s.hour, sum(s.calls * c.us) AS time_us, sum(s.calls * c.us * (s.outcome <> 'miss')) AS hit_us
FROM every_sighting s JOIN cost c ON c.problem_id = s.problem_id AND c.environment_id = s.environment_id
WHERE s.hour >= :hour GROUP BY s.hour ORDER BY s.hour
"""


def coverage(
    path: Path,
    *,
    by: str = "family",
    since_s: float = DAY_S,
    weight: str = "time",
    run: str | None = None,
    now_s: float | None = None,
) -> list[dict[str, Any]]:
    """Coverage by family, device, run or problem over the last since_s seconds, heaviest first; run: only this one.

    Columns as in the views coverage*, with graph calls and hour range always, and estimated_time_us: of problems
    neither tuned nor timed, whose time is by their size alone; faster_time_us: of those that a kernel other than
    torch's own serves; now_time_us: with what serves them today; hit_saved_us: what that saves of the calls that hit.
    Of a problem with calls that its solution may not serve (`unraced`, `unfit`) only the calls that hit are covered.
    Hours are counted whole: an hour is in when the window touches it and something was seen in it since.
    """
    if by not in _GROUPS:
        raise SettingError(f"coverage by {by!r}: expected one of {', '.join(_GROUPS)}")
    if weight not in WEIGHTS:
        raise SettingError(f"weight {weight!r}: expected one of {', '.join(WEIGHTS)}")
    columns, group = _GROUPS[by]
    since = us((time.time() if now_s is None else now_s) - since_s)
    texts = {"columns": columns, "group": group, "weight": WEIGHTS[weight]}
    if by == "run":
        texts |= {"run_id": "run_id", "and_run": ", run_id", "sum": "", "each_hour": ""}
    else:
        texts |= {"run_id": "NULL", "and_run": ""}
    return of_window(path, _COVERAGE, since, texts, run=run)


def covered_time(path: Path) -> tuple[float, float]:
    """(GEMM time covered now, all of it) of the last 24 h, in microseconds, as `coverage` has it."""
    found = of_window(path, _COVERED_TIME, us(time.time() - DAY_S))
    return (found[0]["covered_us"], found[0]["time_us"]) if found else (0.0, 0.0)


def served(
    path: Path, *, since_s: float = DAY_S, run: str | None = None, now_s: float | None = None
) -> list[dict[str, Any]]:
    """Every problem called in the last since_s seconds, and what serves it, by device; the heaviest first.

    run: by programs of this label alone.

    Columns: the problem's, device, calls, time_us (on stock torch); then of the solution that the look-up finds, for
    this M or for its bucket, and None where there is none: backend, config, covers, state, gain (over stock torch).
    One with calls that its solution may not serve has a row for the calls that hit, and one for the others.
    """
    since = us((time.time() if now_s is None else now_s) - since_s)
    return ask(path, _SERVED, {"since": since, "hour": since // 3_600_000_000, "run": run})


def traffic(path: Path, *, since_s: float = DAY_S, now_s: float | None = None) -> list[dict[str, Any]]:
    """GEMM time by hour: hour (since 1970), time_us (on stock torch), hit_us (of calls that a solution served)."""
    since = us((time.time() if now_s is None else now_s) - since_s)
    return ask(path, _TRAFFIC, {"hour": since // 3_600_000_000})


def unraced(path: Path, *, since_s: float = DAY_S) -> list[dict[str, Any]]:
    """Problems that programs call by an engine's operator, and that have a solution not raced beside its kernel.

    Like the view of that name, for the last since_s seconds; the most missed first.
    """
    sql = "SELECT * FROM unraced WHERE last_seen >= ? ORDER BY missed DESC, problem"
    return ask(path, sql, (us(time.time() - since_s),))


def unfit(path: Path, *, since_s: float = DAY_S) -> list[dict[str, Any]]:
    """Problems with a solution that programs call with operands which its kernel does not take.

    Like the view of that name, for the last since_s seconds; the most missed first.
    """
    sql = "SELECT * FROM unfit WHERE last_seen >= ? ORDER BY missed DESC, problem"
    return ask(path, sql, (us(time.time() - since_s),))


def frozen(path: Path, *, since_s: float = DAY_S) -> list[dict[str, Any]]:
    """Tuned problems that programs still run with old kernels, in graphs captured before the publication.

    Like the view of that name, for the last since_s seconds; the most called first.
    """
    return of_window(path, _FROZEN, us(time.time() - since_s), {"problem": PROBLEM})
