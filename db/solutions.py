"""Verdicts: installed, published, withdrawn. Every change of the live ones raises the generation by one.

A verdict replaces the live ones with the same problem, device, mode and bucket that its environment would accept.  So
an upgraded backend's solution stays beside that of the old version until the old one is gone.  Rows are never deleted.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Sequence
from typing import Any, Final

from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import CROWDED, LIVE_STATES, Environment, Solution
from gemmtuned.db.leases import Work, current_generation, drop_lease
from gemmtuned.db.row_ids import (
    HOLDS_HERE,
    SOLUTION_SELECT,
    Part,
    look_up_keys,
    plain,
    rows,
    solution_of,
    stamps_here,
    us,
)

CLEARED_US: Final = 86_400_000_000  # for so long after our own run cleared a solution, reports on it are ignored
RIVALS: Final = f"""
SELECT s.id, s.state FROM solution s
WHERE s.problem_id = :problem AND s.device_id = :device AND s.mode = :mode AND s.covers = :covers
    AND s.retired_generation IS NULL AND {HOLDS_HERE}
"""  # noqa: S608
INSERT: Final = """
INSERT INTO solution (problem_id, device_id, environment_id, mode, covers, backend, config, stamp, us, baseline_us,
    gain_low, err, baseline_err, launch, beside, conditions, others, recheck, state, generation, published_us,
    retired_generation, retired_us, reason)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
RETIRE: Final = """
UPDATE solution SET state = ?, retired_generation = ?, retired_us = ?, reason = ?
WHERE id IN (SELECT value FROM json_each(?)) AND retired_generation IS NULL
"""
LIVE: Final = f"""
{SOLUTION_SELECT}
WHERE s.retired_generation IS NULL AND (:only IS NULL OR h.key IN (SELECT value FROM json_each(:only)))
ORDER BY s.id
"""  # noqa: S608
# Every solution, live or not, that serves one of these problems, seen or not: of its size or one of its buckets
SERVES: Final = """
    SELECT x.id FROM json_each(?) k
    JOIN problem b ON b.rest = json_extract(k.value, '$[0]') AND b.m = json_extract(k.value, '$[1]')
    JOIN solution x ON x.problem_id = b.id AND x.covers = json_extract(k.value, '$[2]')
"""
SERVING: Final = f"""
{SOLUTION_SELECT}
WHERE s.retired_generation IS NULL AND s.id IN ({SERVES})
ORDER BY s.id
"""
_SAME: Final = """
q.problem_id = s.problem_id AND q.device = h.key AND q.mode = s.mode AND q.covers = s.covers AND q.backend = s.backend
    AND q.config = s.config AND q.stamp = s.stamp
"""
_WRONG: Final = f"""
{SOLUTION_SELECT}
WHERE s.retired_generation IS NULL
    AND EXISTS (SELECT 1 FROM quarantine q WHERE q.taken_us IS NULL AND q.how = 'wrong' AND {_SAME})
ORDER BY s.id
"""  # noqa: S608
# What a program reported waits for our own run, unless that found nothing a short while ago
_REPORTED: Final = f"""
UPDATE solution AS s SET reported_us = :now
FROM device h, quarantine q
WHERE h.id = s.device_id AND s.retired_generation IS NULL AND s.reported_us IS NULL AND s.state != 'pinned'
    AND q.taken_us IS NULL AND q.how = 'failed' AND coalesce(q.cleared_us, 0) < :now - {CLEARED_US} AND {_SAME}
"""  # noqa: S608
# Somebody has pinned it since: that is the last word, and no run is waited for
_PINNED: Final = "UPDATE solution SET reported_us = NULL WHERE reported_us IS NOT NULL AND state = 'pinned'"
# A run of ours on it has failed since it was reported, at any size that it serves
_FAILED_HERE: Final = f"""
{SOLUTION_SELECT}
WHERE s.retired_generation IS NULL AND s.reported_us IS NOT NULL AND EXISTS (
    SELECT 1 FROM problem q
    JOIN trial t ON t.problem_id = q.id AND t.backend = s.backend AND t.config = s.config
        AND t.stamp = s.stamp
    WHERE q.rest = p.rest AND t.started_us >= s.reported_us AND t.outcome IN ('crash', 'hang', 'wrong', 'refused')
        AND p.m = CASE s.covers WHEN 'exact' THEN q.m WHEN 'fine' THEN q.m_fine ELSE q.m_coarse END)
ORDER BY s.id
"""  # noqa: S608
_CLEAR: Final = f"""
UPDATE quarantine AS q SET cleared_us = ?
FROM solution s, device h WHERE h.id = s.device_id AND s.reported_us IS NOT NULL
    AND s.id IN (SELECT value FROM json_each(?)) AND {_SAME}
"""  # noqa: S608
HOLD: Final = """
INSERT INTO work (problem_id, environment_id, covers, mode, state, owner, attempts, leased_us, lease_until_us, cause,
    reason)
SELECT problem_id, environment_id, covers, mode, 'failed', NULL, 0, ?, ?, ?, ? FROM solution
WHERE id IN (SELECT value FROM json_each(?))
ON CONFLICT DO UPDATE SET state = 'failed', owner = NULL, cause = excluded.cause, reason = excluded.reason
"""


class Solutions(Part):
    """The part of the store that holds verdicts."""

    def install(
        self,
        work: Work | None,
        solutions: Sequence[Solution],
        *,
        environment: Environment,
        now_s: float,
        conditions: str = "",
        others: float | None = None,
        again: bool = False,
    ) -> int:
        """Make these verdicts live and end the lease, in one transaction that survives a power cut.

        Returns the generation that holds them (their own `generation` is ignored).  A lease lost meanwhile does not
        void the verdict, which was measured all the same.  conditions: soft facts it was measured under.  others: the
        mean share of the device that others used meanwhile, 0 to 1, None when not known; above CROWDED, and with
        `again`, the verdict waits to be raced again.  Raises StoreError for a solution of another device or one that is
        not live.
        """
        for s in solutions:
            if s.device != environment.device.key:
                raise StoreError(
                    f"{s.problem}: a solution for {s.device} cannot be installed for {environment.device.key}"
                )
            if s.state not in LIVE_STATES:
                raise StoreError(f"{s.problem}: a solution that is {s.state} cannot be installed")
        now_us = us(now_s)
        crowded = others is not None and others > CROWDED
        measured = (plain(conditions, 512), others, "drift" if crowded and again else None)

        def once(conn: sqlite3.Connection) -> int:
            environment_id = self._rows.environment_id(conn, environment, now_us)
            device_id = conn.execute("SELECT device_id FROM environment WHERE id = ?", (environment_id,)).fetchone()[0]
            where = (environment_id, device_id, stamps_here(environment))
            generation = raise_generation(conn, now_us, installed=len(solutions), note="installed")
            retired = 0
            for s in solutions:
                retired += self._put(conn, s, where, generation, now_us, measured)
            conn.execute("UPDATE publication SET retired = ? WHERE generation = ?", (retired, generation))
            if work is not None:
                drop_lease(conn, work)
            return generation

        return self._rows.write(once, durable=True)

    def launches(self) -> list[str]:
        """The launch records, as JSON, of all solutions there ever were that have a compiled kernel."""
        sql = "SELECT DISTINCT launch FROM solution WHERE launch LIKE '%binary%'"
        return self._db.read(lambda conn: [str(row[0]) for row in conn.execute(sql)])

    def published(self, device_keys: Collection[str] | None = None) -> tuple[int, list[Solution]]:
        """(generation, live solutions) of one moment; None: of all devices."""
        return self._db.read(lambda conn: live_solutions(conn, device_keys))

    def count_live(self) -> int:
        """How many solutions are in use."""
        sql = "SELECT count(*) FROM solution WHERE retired_generation IS NULL"
        return self._db.read(lambda conn: int(conn.execute(sql).fetchone()[0]))

    def generation(self) -> int:
        """The newest publication; 0 before the first."""
        return self._db.read(current_generation)

    def publication_us(self, generation: int) -> int:
        """When the store came to this generation; 0 when it never did."""
        sql = "SELECT published_us FROM publication WHERE generation = ?"
        return int((self._db.read(lambda conn: conn.execute(sql, (generation,)).fetchone()) or (0,))[0])

    def skip_to(self, generation: int, *, after: int, now_s: float) -> bool:
        """Give the newest publication, which is `after`, this number instead; its content stays.

        Programs have seen this number, or are about to.  False, and no change, when `after` is no longer the newest.
        """

        def once(conn: sqlite3.Connection) -> bool:
            if current_generation(conn) != after:
                return False
            raise_generation(conn, us(now_s), at_least=generation, note="written anew")
            return True

        return self._rows.write(once, durable=True)

    def withdraw(
        self, problems: Sequence[Problem], *, reason: str, now_s: float, dry_run: bool = False, hold: bool = True
    ) -> list[Solution]:
        """Withdraw every live solution that serves one of these problems, those of buckets included; returns them.

        hold: do not tune the problem again until somebody asks for it, since the daemon would find the same again.
        """

        def once(conn: sqlite3.Connection) -> list[Solution]:
            found = rows(conn, SERVING, (look_up_keys(problems),))
            if not dry_run:
                _retire(conn, found, us(now_s), reason)
                if hold:
                    which = json.dumps([row["id"] for row in found])
                    conn.execute(HOLD, (us(now_s), us(now_s), "withdrawn", plain(f"withdrawn: {reason}", 4096), which))
            return solutions_of(found)

        return self._rows.write(once, durable=not dry_run)

    def take_quarantined(self, *, now_s: float) -> list[Solution]:
        """Act on failures in programs; returns the solutions that are withdrawn.

        A solution whose result differed from torch's is withdrawn at once.  One that raised is marked for a run of our
        own, which comes before all other work, and withdrawn if that fails, too; the program that reported it does not
        use it any more.
        """
        pending = "SELECT 1 FROM quarantine WHERE taken_us IS NULL UNION ALL SELECT 1 FROM solution "
        pending += "WHERE reported_us IS NOT NULL AND retired_generation IS NULL LIMIT 1"
        if not self._db.read(lambda c: c.execute(pending).fetchone()):
            return []

        def once(conn: sqlite3.Connection) -> list[Solution]:
            wrong = rows(conn, _WRONG)
            _retire(conn, wrong, us(now_s), "another result than torch's in a program")
            conn.execute(_REPORTED, {"now": us(now_s)})
            conn.execute("UPDATE quarantine SET taken_us = ? WHERE taken_us IS NULL", (us(now_s),))
            conn.execute(_PINNED)
            failed = rows(conn, _FAILED_HERE)
            _retire(conn, failed, us(now_s), "failed inside a program, and in a run of our own")
            return solutions_of([*wrong, *failed])

        return self._rows.write(once, durable=True)

    def _put(
        self, conn: sqlite3.Connection, s: Solution, where: tuple[int, int, str], generation: int, now_us: int,
        measured: tuple[str, float | None, str | None],
    ) -> int:  # fmt: skip
        """Insert one verdict, retire its rivals; returns how many. A pinned rival stays and makes the new one stale.

        where: environment_id, device_id, and the stamps that hold there (stamps_here).  measured: the columns
        conditions, others and recheck.
        """
        environment_id, device_id, stamps = where
        problem_id = self._rows.problem_id(conn, s.problem)
        key: dict[str, Any] = {
            "problem": problem_id, "device": device_id, "mode": s.mode, "covers": s.covers, "stamps": stamps,
        }  # fmt: skip
        rivals = rows(conn, RIVALS, key)
        pinned = s.state != "pinned" and any(r["state"] == "pinned" for r in rivals)
        end: tuple[Any, ...] = (None, None, "")
        if pinned:
            end = (generation, now_us, "a pinned solution stays")
        else:
            ids = json.dumps([r["id"] for r in rivals])
            conn.execute(_CLEAR, (now_us, ids))  # the solution has been run again without a failure
            conn.execute(RETIRE, ("stale", generation, now_us, f"superseded by generation {generation}", ids))
        what = (
            s.mode, s.covers, s.backend, s.config, s.stamp,
            s.us, s.baseline_us, s.gain_low, s.err, s.baseline_err, s.launch, s.beside, *measured,
        )  # fmt: skip
        state = "stale" if pinned else s.state
        conn.execute(INSERT, (problem_id, device_id, environment_id, *what, state, generation, now_us, *end))
        return 0 if pinned else len(rivals)


def raise_generation(
    conn: sqlite3.Connection, now_us: int, *, installed: int = 0, retired: int = 0, at_least: int = 0, note: str
) -> int:
    """Within a transaction that changes live solutions: the number of the publication that will show the change."""
    generation = max(current_generation(conn) + 1, at_least)
    conn.execute(
        "INSERT INTO publication VALUES (?, ?, ?, ?, ?)", (generation, now_us, installed, retired, plain(note, 4096))
    )
    return generation


def _retire(conn: sqlite3.Connection, found: list[dict[str, Any]], now_us: int, reason: str) -> None:
    if found:
        generation = raise_generation(conn, now_us, retired=len(found), note=f"withdrawn: {reason}")
        ids = json.dumps([row["id"] for row in found])
        conn.execute(RETIRE, ("withdrawn", generation, now_us, plain(reason, 4096), ids))


def live_solutions(conn: sqlite3.Connection, device_keys: Collection[str] | None) -> tuple[int, list[Solution]]:
    """Within a transaction: (generation, live solutions); None: of all devices."""
    only = None if device_keys is None else json.dumps(sorted(device_keys))
    return current_generation(conn), solutions_of(rows(conn, LIVE, {"only": only}))


def solutions_of(found: list[dict[str, Any]]) -> list[Solution]:
    """The solutions in rows of SOLUTION_SELECT, without those whose problem is not valid."""
    return [s for s in map(solution_of, found) if s is not None]
