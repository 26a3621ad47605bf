"""Leases nobody holds any more, and what the queue looks like to those who wait for it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Environment
from gemmtuned.db.abilities import reason
from gemmtuned.db.leases import STALE_US
from gemmtuned.db.row_ids import PROBLEM_COLUMNS, Part, problem_of, rows, us

_WAITING: Final = """
SELECT e.key AS environment, h.key AS device, count(DISTINCT u.unit_id) AS units,
    count(*) AS problems, sum(u.calls) AS calls, max(u.last_seen_us) AS last_seen_us
FROM unit u
JOIN environment e ON e.id = u.environment_id
JOIN device h ON h.id = e.device_id
LEFT JOIN problem b ON b.rest = u.rest AND b.m = u.unit_m
LEFT JOIN work w ON w.problem_id = b.id AND w.environment_id = u.environment_id
    AND w.covers = u.covers AND w.mode = 'eager'
WHERE u.solution_id IS NULL AND u.tunable AND coalesce(w.state, 'open') = 'open'
    AND (u.asked_us IS NOT NULL OR u.last_seen_us >= :stale)
GROUP BY e.id ORDER BY calls DESC
"""
_STATES: Final = f"""
SELECT {PROBLEM_COLUMNS}, coalesce(w.owner, '') AS owner,
    coalesce(w.reason, '') AS reason,
    CASE WHEN u.solution_id IS NOT NULL THEN 'solved' WHEN NOT u.tunable THEN 'untunable'
        WHEN w.state = 'failed' THEN 'failed'
        WHEN w.owner IS NOT NULL AND w.lease_until_us > :now THEN 'leased' WHEN w.retry_us > :now THEN 'waiting'
        ELSE 'queued' END AS state
FROM unit u
JOIN problem p ON p.id = u.problem_id
JOIN environment e ON e.id = u.environment_id AND e.key = :environment
LEFT JOIN problem b ON b.rest = u.rest AND b.m = u.unit_m
LEFT JOIN work w ON w.problem_id = b.id AND w.environment_id = u.environment_id
    AND w.covers = u.covers AND w.mode = 'eager'
WHERE p.text IN (SELECT value FROM json_each(:texts))
"""  # noqa: S608
_DEAREST: Final = f"""
SELECT {PROBLEM_COLUMNS} FROM unit u
JOIN problem p ON p.id = u.problem_id
JOIN problem_cost c ON c.environment_id = u.environment_id AND c.problem_id = u.problem_id
JOIN environment e ON e.id = u.environment_id
JOIN device h ON h.id = e.device_id AND h.key = :device
LEFT JOIN problem b ON b.rest = u.rest AND b.m = u.unit_m
LEFT JOIN work w ON w.problem_id = b.id AND w.environment_id = u.environment_id
    AND w.covers = u.covers AND w.mode = 'eager'
WHERE u.solution_id IS NULL AND u.tunable AND coalesce(w.state, 'open') = 'open'
    AND (u.asked_us IS NOT NULL OR u.last_seen_us >= :stale)
ORDER BY c.us * u.calls DESC LIMIT :limit
"""  # noqa: S608
_RETRY: Final = """
DELETE FROM work WHERE owner IS NULL AND (state != 'open' OR attempts > 0) AND problem_id IN (
    SELECT b.id FROM problem p JOIN problem b ON b.rest = p.rest AND b.m IN (p.m, p.m_fine, p.m_coarse)
    WHERE p.text IN (SELECT value FROM json_each(?)))
"""
_ASK_FOR_SEEN: Final = """
UPDATE demand SET asked_us = ? WHERE solution_id IS NULL
    AND problem_id IN (SELECT id FROM problem WHERE text IN (SELECT value FROM json_each(?)))
"""


@dataclass(frozen=True)
class State:
    """Where one problem is: queued, leased (by owner), waiting (after a failure), failed (for good), solved, untunable.

    untunable: the daemon's worker (its version, its CPUs) cannot tune such a problem.
    """

    state: str
    reason: str
    owner: str


class Resume(Part):
    """The part of the store for those who come after somebody, or wait for something."""

    def release_dead(self, is_dead: Callable[[str], bool], *, counts: Callable[[str], bool], now_s: float) -> int:
        """Free the leases of owners that are no more; returns how many.

        counts: whether the attempt of this owner counts. It does not when somebody merely killed the daemon, it does
        when the whole machine went down with it.
        """

        def work(conn: sqlite3.Connection) -> int:
            freed = 0
            for (owner,) in conn.execute("SELECT DISTINCT owner FROM work WHERE owner IS NOT NULL").fetchall():
                if is_dead(owner):
                    freed += conn.execute(
                        "UPDATE work SET owner = NULL, lease_until_us = ?, attempts = attempts - ? WHERE owner = ?",
                        (us(now_s), 0 if counts(owner) else 1, owner),
                    ).rowcount
            return freed

        return self._rows.write(work)

    def waiting(self, *, now_s: float) -> list[dict[str, Any]]:
        """For each environment with problems that wait to be tuned: how many.

        Those without a verdict that have not failed for good and are not stale: called in the last seven days, or asked
        for.  Columns: environment, device, units, problems, calls, last_seen_us.
        """
        return self._db.read(lambda conn: rows(conn, _WAITING, {"stale": us(now_s) - STALE_US}))

    def dearest(self, device_key: str, *, now_s: float, limit: int) -> list[Problem]:
        """Problems that wait to be tuned on such a device, most expensive first, whatever their environment."""
        values = {"device": device_key, "stale": us(now_s) - STALE_US, "limit": limit}
        found = self._db.read(lambda conn: rows(conn, _DEAREST, values))
        return list(dict.fromkeys(problem_of(row) for row in found))

    def states(self, problems: Sequence[Problem], environment: Environment, *, now_s: float) -> dict[Problem, State]:
        """Where each of these problems is in this environment; those it was never asked for are left out."""
        texts = json.dumps([str(p) for p in problems])
        values = {"environment": environment.key, "now": us(now_s), "texts": texts}
        found = self._db.read(lambda conn: rows(conn, _STATES, values))
        known = {problem_of(row): State(row["state"], row["reason"], row["owner"]) for row in found}
        return {p: replace(s, reason=reason(p)) if s.state == "untunable" else s for p, s in known.items()}

    def retry_now(self, problems: Sequence[Problem], *, dry_run: bool = False) -> int:
        """Forget that these failed or were withdrawn by hand: somebody asks for them now. Returns how many had."""
        texts = json.dumps([str(p) for p in problems])
        do = self._rows.would if dry_run else self._rows.write
        return do(lambda conn: conn.execute(_RETRY, (texts,)).rowcount)

    def ask_for_seen(self, problems: Sequence[Problem], *, now_s: float, dry_run: bool = False) -> int:
        """Have those of these tuned that were seen and have no verdict, wherever, stale or not; how many there are."""
        values = us(now_s), json.dumps([str(p) for p in problems])
        do = self._rows.would if dry_run else self._rows.write
        return do(lambda conn: conn.execute(_ASK_FOR_SEEN, values).rowcount)
