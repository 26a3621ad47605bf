"""Who tunes what: units of tuning are leased, renewed, given back or failed.

A lease lapses by itself, so a daemon that dies holds nothing for ever.  `attempts` rises by one at every lease, and a
holder whose lease lapsed and went to another sees by that number, together with the owner, that it has to stop.  An
attempt that does not count lowers it again when its lease is released, and one that begins anew sets it to 0.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Environment
from gemmtuned.db.abilities import Abilities
from gemmtuned.db.row_ids import COST, PROBLEM_COLUMNS, Part, Rows, plain, problem_of, rows, us

if TYPE_CHECKING:
    from gemmtuned.db.fleet import Gate

MAX_ATTEMPTS: Final = 3
# Times 4^attempt: 4 minutes after the first failure, 16 after the second.  After the third the unit has failed for
# good, or it begins anew after a day if the cause may pass.
BACKOFF_S: Final = 60.0
LOOK_AT: Final = 32  # units that are ranked, and tried in order until one can be leased
TRIES: Final = 2  # rankings, if others have leased all of the first meanwhile
DAY_US: Final = 86_400_000_000
CLOCK_SLACK_US: Final = 60_000_000  # a lease from further in the future is void: the clock was set back

STALE_US: Final = 7 * DAY_US  # a problem not called for so long is not waited for, unless somebody asked

# The free units of one environment without a verdict, worth most first; the view `untuned` shows them to people.
# To leave out units that are held, waiting or failed, it reads only as many rows more as there are such units.
_RANKED: Final = f"""
WITH bucket AS MATERIALIZED (
    SELECT p.rest, p.m_fine, min(p.id) AS first_id FROM demand d JOIN problem p ON p.id = d.problem_id
    WHERE d.environment_id = :environment GROUP BY p.rest, p.m_fine HAVING count(*) > 3
),
waiting AS (
    SELECT min(d.problem_id) AS member, CASE WHEN b.first_id IS NULL THEN p.m ELSE p.m_fine END AS unit_m,
        CASE WHEN b.first_id IS NULL THEN 'exact' ELSE 'fine' END AS covers, sum(d.calls) AS calls,
        max(p.family) AS family, sum(0.3 * {COST} * d.recent / (1 << min(max(:day - d.recent_day, 0), 62))) AS worth
    FROM demand d
    JOIN problem p ON p.id = d.problem_id
    JOIN roofline f ON f.kind = (
        SELECT CASE WHEN h.kind IN ('cuda', 'rocm') THEN h.kind ELSE 'cpu' END
        FROM environment e JOIN device h ON h.id = e.device_id WHERE e.id = :environment)
    LEFT JOIN solution s ON s.id = coalesce(
        (SELECT t.id FROM solution t WHERE t.problem_id = d.problem_id AND t.environment_id = :environment
            ORDER BY t.generation DESC LIMIT 1), d.solution_id)
    LEFT JOIN bucket b ON b.rest = p.rest AND b.m_fine = p.m_fine
    WHERE d.environment_id = :environment AND d.tunable AND (d.solution_id IS NULL OR :again)
        AND (d.asked_us IS NOT NULL OR d.last_seen_us >= :stale)
        AND (:only IS NULL OR d.problem_id IN (SELECT value FROM json_each(:only)))
        AND (:never IS NULL OR d.problem_id NOT IN (SELECT value FROM json_each(:never)))
    GROUP BY coalesce(b.first_id, d.problem_id)
    ORDER BY family = :family_last, worth DESC, calls DESC, member
    LIMIT :look_at + (SELECT count(*) FROM work WHERE environment_id = :environment)
)
SELECT {PROBLEM_COLUMNS}, r.unit_m, r.covers, r.calls, r.worth
FROM waiting r
JOIN problem p ON p.id = r.member
LEFT JOIN problem b ON b.rest = p.rest AND b.m = r.unit_m
LEFT JOIN work w ON w.problem_id = b.id AND w.environment_id = :environment
    AND w.covers = r.covers AND w.mode = :mode
WHERE w.state IS NULL OR (w.state = 'open' AND w.retry_us <= :now
    AND (w.owner IS NULL OR w.lease_until_us <= :now OR w.leased_us > :now + :slack))
ORDER BY r.family = :family_last, r.worth DESC, r.calls DESC, r.member
LIMIT :look_at
"""  # noqa: S608
# Whether a unit still has a member without a verdict
_IS_OPEN: Final = """
SELECT 1 FROM problem p JOIN demand d ON d.problem_id = p.id AND d.environment_id = :environment
WHERE p.rest = :rest AND :unit_m = CASE :covers WHEN 'exact' THEN p.m ELSE p.m_fine END AND d.solution_id IS NULL
LIMIT 1
"""
CLAIM: Final = """
INSERT INTO work (problem_id, environment_id, covers, mode, owner, attempts, leased_us, lease_until_us)
VALUES (:problem, :environment, :covers, :mode, :owner, 1, :now, :until)
ON CONFLICT DO UPDATE SET owner = excluded.owner, attempts = attempts + 1, leased_us = excluded.leased_us,
    lease_until_us = excluded.lease_until_us
WHERE state = 'open' AND retry_us <= :now AND (owner IS NULL OR lease_until_us <= :now OR leased_us > :now + :slack)
RETURNING attempts
"""
_MEMBERS: Final = f"""
SELECT {PROBLEM_COLUMNS}, d.calls FROM demand d JOIN problem p ON p.id = d.problem_id
WHERE d.environment_id = ? AND p.rest = ? AND p.m_fine = ?
ORDER BY p.m
"""  # noqa: S608
_MINE: Final = "problem_id = ? AND environment_id = ? AND covers = ? AND mode = ? AND owner = ? AND attempts = ?"
_REMAINING: Final = """
SELECT coalesce(sum(state = 'queued'), 0) AS queued, coalesce(sum(state = 'leased'), 0) AS leased,
    coalesce(sum(state = 'waiting'), 0) AS waiting, coalesce(sum(state = 'failed'), 0) AS failed
FROM (
SELECT DISTINCT u.rest, u.unit_m, u.covers,
    CASE WHEN w.state = 'failed' THEN 'failed'
        WHEN w.owner IS NOT NULL AND w.lease_until_us > :now THEN 'leased'
        WHEN w.retry_us > :now THEN 'waiting' ELSE 'queued' END AS state
FROM unit u
LEFT JOIN problem b ON b.rest = u.rest AND b.m = u.unit_m
LEFT JOIN work w ON w.problem_id = b.id AND w.environment_id = u.environment_id
    AND w.covers = u.covers AND w.mode = :mode
WHERE u.environment_id = (SELECT id FROM environment WHERE key = :key) AND u.solution_id IS NULL AND u.tunable
    AND (w.state = 'failed' OR u.asked_us IS NOT NULL OR u.last_seen_us >= :stale))
"""
_UNASK: Final = """
DELETE FROM demand WHERE calls = 0 AND first_seen_us >= ?
    AND problem_id IN (SELECT id FROM problem WHERE text IN (SELECT value FROM json_each(?)))
"""
_UNASK_CALLED: Final = """
UPDATE demand SET asked_us = NULL WHERE asked_us >= ?
    AND problem_id IN (SELECT id FROM problem WHERE text IN (SELECT value FROM json_each(?)))
"""


@dataclass(frozen=True)
class Work:
    """A unit of tuning, held by owner until its lease lapses.

    problem: the key of the verdict; for covers `fine` its m is the padded M, and members are the smallest, the most
    called and the largest exact size seen or asked for in the bucket.  worth: expected saving in microseconds per day.
    """

    problem: Problem
    members: tuple[Problem, ...]
    covers: str
    environment: Environment
    mode: str
    owner: str
    attempt: int
    worth: float
    calls: int


@dataclass(frozen=True)
class Remaining:
    """Numbers of an environment's units without a verdict: free, held, waiting after a failure, failed for good."""

    queued: int
    leased: int
    waiting: int
    failed: int


class Leases(Part):
    """The part of the store by which daemons share the work."""

    def __init__(self, shared: Rows) -> None:
        super().__init__(shared)
        self._abilities = Abilities(shared)

    def lease_next(
        self,
        owner: str,
        environment: Environment,
        *,
        now_s: float,
        hold_s: float,
        problems: Sequence[Problem] | None = None,
        again: bool = False,
        family_last: str = "",
        gate: Gate | None = None,
    ) -> Work | None:
        """Lease to owner the free unit worth most that was seen in this environment; None if there is none.

        problems: only units that hold one of these, which count as seen from now on.  hold_s: the lease lapses after
        this time unless renewed.  again: also units that have a verdict.  family_last: a family whose units are leased
        only where no other family has any.  gate: the units that a fleet leaves to us; it does not apply to `problems`.
        """
        only, never = (None, None) if gate is None else (gate.only, gate.never)
        self._abilities.settle(environment, us(now_s))
        if problems is not None:
            only, never = json.dumps(self.ask_for(problems, environment, now_s=now_s)), None
        now_us = us(now_s)
        facts: dict[str, Any] = {
            "now": now_us, "day": now_us // DAY_US, "until": us(now_s + hold_s), "slack": CLOCK_SLACK_US,
            "stale": now_us - STALE_US, "owner": owner, "mode": "eager", "only": only, "never": never,
            "again": again, "family_last": family_last, "look_at": LOOK_AT,
        }  # fmt: skip
        for _ in range(TRIES):
            # Ranked on a snapshot, without the lock, for which programs would wait; `_claim` checks what has changed.
            ranked = self._db.read(lambda conn: rank(conn, environment, facts))
            if not ranked:
                return None
            claimed = self._claim(ranked, environment, facts)
            if claimed is not None:
                return claimed
        return None

    def renew(self, work: Work, *, now_s: float, hold_s: float) -> bool:
        """Renew the lease. False: it went to another, or the unit is finished, so stop working on it."""
        values = (us(now_s), us(now_s + hold_s))
        return self._touch(work, "UPDATE work SET leased_us = ?, lease_until_us = ?", values)

    def release(self, work: Work, *, now_s: float, counted: bool = True, put_off: str = "") -> None:
        """Give the lease back. counted=False: the attempt does not count, because it was not the problem's fault.

        put_off: why no times could be taken, for people to read; "" keeps the reason that is there.
        """
        back = "UPDATE work SET owner = NULL, lease_until_us = ?, attempts = attempts - ?"
        values: tuple[Any, ...] = (us(now_s), 0 if counted else 1)
        if put_off:
            back, values = f"{back}, cause = 'put_off', reason = ?", (*values, plain(f"put off: {put_off}", 4096))
        self._touch(work, back, values)

    def fail(self, work: Work, reason: str, *, now_s: float, passing: bool = False) -> float | None:
        """The attempt failed. Returns for how many seconds the unit waits; None: it has failed for good here.

        passing: for want of something that may be there again: it does not fail for good, but begins anew after a day.
        """
        is_last = work.attempt >= MAX_ATTEMPTS
        anew = is_last and passing
        state = "failed" if is_last and not anew else "open"
        wait_s = DAY_US / 1e6 if anew else BACKOFF_S * 4**work.attempt
        gone = "UPDATE work SET owner = NULL, lease_until_us = ?, retry_us = ?, state = ?, cause = 'failed', reason = ?"
        values = us(now_s), us(now_s + wait_s), state, plain(reason, 4096)
        self._touch(work, f"{gone}, attempts = 0" if anew else gone, values)
        return None if state == "failed" else wait_s

    def remaining(self, environment: Environment, *, now_s: float) -> Remaining:
        """What is left to do here. If all but `failed` are 0, every captured problem has a verdict or has failed."""
        values = {"key": environment.key, "mode": "eager", "now": us(now_s), "stale": us(now_s) - STALE_US}
        return Remaining(**self._db.read(lambda conn: rows(conn, _REMAINING, values))[0])

    def ask_for(self, problems: Iterable[Problem], environment: Environment, *, now_s: float) -> list[int]:
        """Have these problems tuned here, after all that programs were seen to call. Returns their row ids."""
        asked, now_us = list(dict.fromkeys(problems)), us(now_s)

        def work(conn: sqlite3.Connection) -> list[int]:
            environment_id = self._rows.environment_id(conn, environment, now_us)
            ids = self._rows.problem_ids(conn, asked)
            conn.executemany(
                "INSERT INTO demand (problem_id, environment_id, calls, sampled_calls, sampled_us, first_seen_us, "
                "last_seen_us, asked_us) VALUES (?, ?, 0, 0, 0.0, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET asked_us = coalesce(asked_us, excluded.asked_us)",
                [(i, environment_id, now_us, now_us, now_us) for i in ids],
            )
            return ids

        return self._rows.write(work)

    def unask(self, problems: Sequence[Problem], *, since_s: float) -> int:
        """Forget requests for these since then that nobody waits for; called problems stay. Returns how many went."""
        values = us(since_s), json.dumps([str(p) for p in problems])

        def work(conn: sqlite3.Connection) -> int:
            gone = conn.execute(_UNASK, values).rowcount
            conn.execute(_UNASK_CALLED, values)
            return gone

        return self._rows.write(work)

    def _claim(self, ranked: list[dict[str, Any]], environment: Environment, facts: dict[str, Any]) -> Work | None:
        """Lease the first of these that is still free and without a verdict; None: none is left, so rank again."""

        def work(conn: sqlite3.Connection) -> Work | None:
            for unit in ranked:
                if not facts["again"] and conn.execute(_IS_OPEN, unit).fetchone() is None:
                    continue
                problem = problem_of(unit).with_m(unit["unit_m"])
                key = {
                    "problem": self._rows.problem_id(conn, problem), "environment": unit["environment"],
                    "covers": unit["covers"],
                }  # fmt: skip
                claimed = conn.execute(CLAIM, {**facts, **key}).fetchall()
                if not claimed:
                    continue
                attempt = int(claimed[0][0])
                lapsed = f"its lease lapsed or was given back {MAX_ATTEMPTS} times"
                if attempt > MAX_ATTEMPTS:  # all its holders died without giving it back, so it kills daemons
                    conn.execute(
                        "UPDATE work SET state = 'failed', owner = NULL, attempts = ?, cause = 'lapsed', reason = ? "
                        "WHERE problem_id = ? "
                        "AND environment_id = ? AND covers = ? AND mode = ?",
                        (MAX_ATTEMPTS, lapsed, *key.values(), facts["mode"]),
                    )
                    continue
                members = (problem,) if unit["covers"] == "exact" else bucket_members(conn, unit)
                return Work(
                    problem=problem, members=members, covers=unit["covers"], environment=environment,
                    mode=facts["mode"], owner=facts["owner"], attempt=attempt, worth=unit["worth"], calls=unit["calls"],
                )  # fmt: skip
            return None

        return self._rows.write(work)

    def _touch(self, work: Work, update: str, values: tuple[Any, ...]) -> bool:
        """Update the row of this lease if we still hold it."""

        def change(conn: sqlite3.Connection) -> bool:
            mine = lease_key(conn, work)
            return mine is not None and conn.execute(f"{update} WHERE {_MINE}", (*values, *mine)).rowcount > 0

        return self._rows.write(change)


def lease_key(conn: sqlite3.Connection, work: Work) -> tuple[Any, ...] | None:
    """SQL parameters that identify the row in `work` of this lease."""
    ids = known_ids(conn, work.problem, work.environment)
    return (ids["problem"], ids["environment"], work.covers, work.mode, work.owner, work.attempt) if ids else None


def drop_lease(conn: sqlite3.Connection, work: Work) -> None:
    """Within a transaction: end the lease of a unit that has its verdict."""
    mine = lease_key(conn, work)
    if mine is not None:
        conn.execute(f"DELETE FROM work WHERE {_MINE}", mine)  # noqa: S608


def known_ids(conn: sqlite3.Connection, problem: Problem, environment: Environment) -> dict[str, int] | None:
    """The row ids of a problem and an environment, by column name; None if either has no row."""
    found = conn.execute(
        "SELECT p.id, e.id FROM problem p, environment e WHERE p.rest = ? AND p.m = ? AND e.key = ?",
        (problem.rest, problem.m, environment.key),
    ).fetchone()
    return {"problem": int(found[0]), "environment": int(found[1])} if found else None


def rank(conn: sqlite3.Connection, environment: Environment, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that wait in this environment, worth most first. facts: the parameters of _RANKED, with the time."""
    found = conn.execute("SELECT id FROM environment WHERE key = ?", (environment.key,)).fetchone()
    if found is None:
        return []
    here = {"environment": int(found[0])}
    return [{**row, **here} for row in rows(conn, _RANKED, {**facts, **here}) if _valid(row)]


def _valid(row: dict[str, Any]) -> bool:
    """False for a problem that this version cannot read, written by a newer version or by hand; it must not stop us."""
    try:
        problem_of(row)
    except ProblemError:
        return False
    return True


def bucket_members(conn: sqlite3.Connection, unit: dict[str, Any]) -> tuple[Problem, ...]:
    """The smallest, the most called and the largest size seen or asked for in a bucket; () without any."""
    found = rows(conn, _MEMBERS, (unit["environment"], unit["rest"], unit["unit_m"]))
    seen = [row for row in found if _valid(row)]
    if not seen:
        return ()
    most = max(row["calls"] for row in seen)
    most_called = [row for row in seen if row["calls"] == most]
    chosen = (seen[0], most_called[len(most_called) // 2], seen[-1])
    return tuple(dict.fromkeys(problem_of(row) for row in chosen))


def current_generation(conn: sqlite3.Connection) -> int:
    """The newest publication; 0 before the first. Within a transaction."""
    return int(conn.execute("SELECT coalesce(max(generation), 0) FROM publication").fetchone()[0])
