"""Solutions that are raced again: a failure in a program, another driver, somebody's wish, or old age.

So is what a run in the foreground measured beside a busy program: it waits as drift does, and brings a daemon to work.

The solution stays in use meanwhile; the verdict of the new race replaces it, so one that no longer wins is out.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from gemmtuned.configs.few_cpus import most_threads
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import CROWDED, Environment
from gemmtuned.db.leases import CLAIM, CLOCK_SLACK_US, DAY_US, Work, bucket_members
from gemmtuned.db.row_ids import HOLDS_HERE, PROBLEM_COLUMNS, Part, look_up_keys, problem_of, rows, stamps_here, us
from gemmtuned.db.solutions import SERVES

REPORTED: Final = "reported"  # a kind beside those of the column recheck: it failed in a program
HERE: Final = f"""
s.retired_generation IS NULL AND s.state != 'pinned'
    AND s.device_id = (SELECT device_id FROM environment WHERE id = :environment)
    AND {HOLDS_HERE}
"""  # noqa: S608
_NEXT: Final = f"""
SELECT {PROBLEM_COLUMNS}, s.problem_id, s.covers, max(s.us * coalesce(d.calls, 0)) AS worth,
    max(coalesce(d.calls, 0)) AS calls
FROM solution s
JOIN problem p ON p.id = s.problem_id
LEFT JOIN demand d ON d.problem_id = s.problem_id AND d.environment_id = :environment
LEFT JOIN work w ON w.problem_id = s.problem_id AND w.environment_id = :environment AND w.covers = s.covers
    AND w.mode = :mode
WHERE (s.recheck IN (SELECT value FROM json_each(:kinds))
        OR (s.reported_us IS NOT NULL AND '{REPORTED}' IN (SELECT value FROM json_each(:kinds)))) AND {HERE}
    AND (:most_threads = 0 OR p.threads <= :most_threads)
    AND (w.state IS NULL OR (w.state = 'open' AND w.retry_us <= :now
        AND (w.owner IS NULL OR w.lease_until_us <= :now OR w.leased_us > :now + :slack)))
GROUP BY s.problem_id, s.covers ORDER BY worth DESC, s.problem_id LIMIT 8
"""  # noqa: S608
_MARK: Final = f"""
UPDATE solution AS s SET recheck = 'conditions'
WHERE s.conditions != '' AND s.conditions != :conditions AND s.recheck IS NULL AND {HERE}
"""  # noqa: S608
_ANY: Final = f"""
SELECT 1 FROM solution s WHERE s.retired_generation IS NULL AND s.state != 'pinned'
    AND (s.recheck IN ('conditions', 'asked') OR s.reported_us IS NOT NULL
        OR (s.recheck = 'drift' AND s.others > {CROWDED} AND NOT EXISTS (
            SELECT 1 FROM work w WHERE w.problem_id = s.problem_id AND w.environment_id = s.environment_id
                AND w.covers = s.covers AND w.state = 'failed'))
        OR (:conditions != '' AND s.conditions NOT IN ('', :conditions))) LIMIT 1
"""  # noqa: S608
ASKED: Final = f"""
SELECT count(DISTINCT s.problem_id || s.covers) AS n FROM solution s
JOIN device h ON h.id = s.device_id
WHERE s.recheck = 'asked' AND s.retired_generation IS NULL AND s.state != 'pinned'
    AND (:device IS NULL OR h.key = :device)
    AND (:environment IS NULL OR {HOLDS_HERE})
    AND NOT EXISTS (
        SELECT 1 FROM work w JOIN environment e ON e.id = w.environment_id
        WHERE w.problem_id = s.problem_id AND w.covers = s.covers AND w.state = 'failed'
            AND (e.key = :environment OR (:environment IS NULL AND e.id = s.environment_id)))
"""  # noqa: S608
# t: a trial that could not be made, and none of this candidate's after it could
_LACKING: Final = """
t.outcome IN ('oom', 'hindered')
    AND (t.stamp = '' OR (t.backend || ' ' || t.stamp) IN (SELECT value FROM json_each(:stamps)))
    AND NOT EXISTS (
        SELECT 1 FROM trial l WHERE l.problem_id = t.problem_id AND l.environment_id = t.environment_id
            AND l.mode = t.mode AND l.backend = t.backend AND l.config = t.config
            AND l.started_us > t.started_us AND l.outcome NOT IN ('oom', 'hindered'))
"""
_SAMPLE: Final = f"""
UPDATE solution SET recheck = 'drift' WHERE id IN (
    SELECT s.id FROM solution s
    WHERE s.recheck IS NULL AND {HERE} AND (s.state = 'published' AND s.published_us < :before
        OR s.state = 'default_best' AND s.published_us < :day AND EXISTS (
            SELECT 1 FROM trial t JOIN problem q ON q.id = t.problem_id JOIN problem p ON p.id = s.problem_id
            WHERE q.rest = p.rest AND p.m = CASE s.covers WHEN 'exact' THEN q.m ELSE q.m_fine END
                AND t.environment_id = s.environment_id AND {_LACKING}))
    ORDER BY (:now - s.published_us) * 1.0 / (:now - CASE s.state WHEN 'published' THEN :before ELSE :day END) DESC,
        s.published_us LIMIT 1)
"""  # noqa: S608
_SERVED: Final = """
SELECT 1 FROM solution s JOIN problem p ON p.id = s.problem_id JOIN device h ON h.id = s.device_id
WHERE p.rest = :rest AND p.m = :m AND s.covers = :covers AND h.key = :key AND s.state = 'published'
    AND s.retired_generation IS NULL LIMIT 1
"""
_ASK: Final = f"""
UPDATE solution SET recheck = 'asked' WHERE retired_generation IS NULL AND id IN ({SERVES})
"""  # noqa: S608


class Recheck(Part):
    """The part of the store that has solutions raced again."""

    def mark_changed(self, environment: Environment, conditions: str, *, now_s: float) -> int:
        """Have all raced again that were measured here under other conditions (a driver's version); how many."""

        def work(conn: sqlite3.Connection) -> int:
            here = self._rows.environment_id(conn, environment, us(now_s))
            values = {"environment": here, "conditions": conditions, "stamps": stamps_here(environment)}
            return conn.execute(_MARK, values).rowcount

        return self._rows.write(work) if conditions else 0

    def has_recheck(self, conditions: str) -> bool:
        """Whether any live solution waits for it, or was measured under other conditions, whatever its environment."""

        def ask(conn: sqlite3.Connection) -> bool:
            return conn.execute(_ANY, {"conditions": conditions}).fetchone() is not None

        return self._db.read(ask)

    def count_asked(self, device_key: str, environment: Environment | None = None) -> int:
        """How many wait on such a device because somebody asked, and have not failed for good.

        environment: only those that a worker of it can race; None: of whatever versions.
        """
        here = None if environment is None else environment.key
        stamps = "[]" if environment is None else stamps_here(environment)
        values = {"device": device_key, "environment": here, "stamps": stamps}
        return self._db.read(lambda conn: int(conn.execute(ASKED, values).fetchone()[0]))

    def mark_sample(self, environment: Environment, *, before_s: float, now_s: float) -> int:
        """Have the oldest solution raced again that was published before then; 0 when there is none.

        So is a verdict for torch, a day old, for which candidates could not be tried.  What is most overdue is first,
        as a share of the age from which it is: many of either kind keep none of the other waiting for ever.
        """

        def work(conn: sqlite3.Connection) -> int:
            here = self._rows.environment_id(conn, environment, us(now_s))
            values = {
                "environment": here,
                "before": us(before_s),
                "day": us(now_s) - DAY_US,
                "now": us(now_s),
                "stamps": stamps_here(environment),
            }
            return conn.execute(_SAMPLE, values).rowcount

        return self._rows.write(work)

    def ask_again(self, problems: Sequence[Problem], *, dry_run: bool = False) -> int:
        """Have the solutions that serve these raced again, before all else; how many there are."""

        def work(conn: sqlite3.Connection) -> int:
            return conn.execute(_ASK, (look_up_keys(problems),)).rowcount

        return self._rows.would(work) if dry_run else self._rows.write(work)

    def is_served(self, work: Work) -> bool:
        """Whether another kernel than torch's own is in use for this unit."""
        values = {
            "rest": work.problem.rest,
            "m": work.problem.m,
            "covers": work.covers,
            "key": work.environment.device.key,
        }
        return self._db.read(lambda conn: conn.execute(_SERVED, values).fetchone() is not None)

    def lease_recheck(
        self, owner: str, environment: Environment, kinds: Sequence[str], *, now_s: float, hold_s: float
    ) -> Work | None:
        """Hold the most expensive solution that waits to be raced again for one of these reasons, or return None."""
        facts: dict[str, Any] = {
            "now": us(now_s), "until": us(now_s + hold_s), "slack": CLOCK_SLACK_US, "owner": owner, "mode": "eager",
            "kinds": json.dumps(kinds), "stamps": stamps_here(environment), "most_threads": most_threads(),
        }  # fmt: skip

        def ask(conn: sqlite3.Connection) -> list[dict[str, Any]]:
            found = conn.execute("SELECT id FROM environment WHERE key = ?", (environment.key,)).fetchone()
            if found is None:
                return []
            facts["environment"] = int(found[0])
            return rows(conn, _NEXT, facts)

        waiting = self._db.read(ask)
        if not waiting:
            return None

        def claim(conn: sqlite3.Connection) -> Work | None:
            for row in waiting:
                claimed = conn.execute(
                    CLAIM, {**facts, "problem": row["problem_id"], "covers": row["covers"]}
                ).fetchall()
                if not claimed:
                    continue
                problem = problem_of(row)
                members: tuple[Problem, ...] = (problem,)
                if row["covers"] != "exact":
                    unit = {"environment": facts["environment"], "rest": problem.rest, "unit_m": problem.m}
                    members = bucket_members(conn, unit) or members
                return Work(
                    problem=problem, members=members, covers=row["covers"], environment=environment, mode="eager",
                    owner=owner, attempt=int(claimed[0][0]), worth=row["worth"], calls=row["calls"],
                )  # fmt: skip
            return None

        return self._rows.write(claim)
