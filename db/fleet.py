"""What this host knows of the others of its fleet: claims, results that wait for a check here, what is shared already.

A sync (gemmtuned/fleet) writes here what it read elsewhere; the daemon only ever asks this file and never the network.
While a sync was there lately the daemon leases what this host has claimed, or has somebody's result for.  When the
others cannot be reached for some minutes it goes on alone, and leaves out what others had claimed by then.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict, dataclass
from typing import Final

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Environment, Solution
from gemmtuned.db.leases import Work, known_ids
from gemmtuned.db.row_ids import Part, rows, us

ALONE_US: Final = 3_600_000_000  # a fleet nobody has synced with for so long holds nothing back
LOW: Final = 3  # units claimed and not begun: with fewer the next sync is asked to claim more
_MEMBERS: Final = """
SELECT d.problem_id FROM {table} f
JOIN problem b ON b.id = f.problem_id
JOIN problem p ON p.rest = b.rest AND b.m = CASE f.covers WHEN 'exact' THEN p.m ELSE p.m_fine END
JOIN demand d ON d.problem_id = p.id AND d.environment_id = f.environment_id
WHERE f.environment_id = :environment AND {where}
"""
_OURS: Final = _MEMBERS.format(table="fleet_claim", where="f.ours = 1 AND f.until_us > :now AND d.solution_id IS NULL")
_THEIRS: Final = _MEMBERS.format(table="fleet_claim", where="f.ours = 0 AND f.until_us > :now")
_WAITING: Final = _MEMBERS.format(table="fleet_result", where="f.state = 'waiting'")
_ASK: Final = """
INSERT INTO fleet_position (environment_id, after, full_us, asked_us) VALUES (:environment, '', 0, :now)
ON CONFLICT DO UPDATE SET asked_us = :now WHERE asked_us IS NULL
"""


@dataclass(frozen=True)
class Gate:
    """What a daemon may lease while hosts share their work, as JSON of problem numbers.

    only: members of units that this host has claimed or has a result for; None: of all.  never: of those that another
    host has claimed.
    """

    only: str | None
    never: str | None


@dataclass(frozen=True)
class Unit:
    """What is tuned together: the problem it is filed under, and whether for this size or its bucket."""

    problem: Problem
    covers: str
    worth: float = 0.0


@dataclass(frozen=True)
class ForeignResult:
    """What was read under one name. unit: None where it could not be read, and reason says why.

    seeds: the fastest that its host tried beside torch's own.
    """

    path: str
    host: str = ""
    unit: Unit | None = None
    solutions: tuple[Solution, ...] = ()
    seeds: tuple[Candidate, ...] = ()
    reason: str = ""

    def text(self) -> str:
        """Solutions and seeds as the store keeps them."""
        rows = [solution.to_row() for solution in self.solutions]
        return json.dumps({"solutions": rows, "seeds": [asdict(seed) for seed in self.seeds]})

    @classmethod
    def of_text(cls, path: str, host: str, unit: Unit, text: str) -> ForeignResult:
        """What text() wrote; without solutions where this version cannot read it."""
        try:
            kept = json.loads(text)
            solutions = tuple(Solution.from_row(row) for row in kept["solutions"])
            return cls(path, host, unit, solutions, tuple(Candidate(**one) for one in kept["seeds"]))
        except (ValueError, TypeError, KeyError, RecursionError, GemmtunedError):
            return cls(path, host, unit)


class Fleet(Part):
    """The part of the store that the daemon reads of all this (fleet_sync.py: what a sync writes)."""

    def gate(self, environment: Environment, *, now_s: float) -> Gate | None:
        """What may be leased now; None while nothing is shared, or nobody synced for an hour."""

        def ask(conn: sqlite3.Connection) -> Gate | None:
            found = conn.execute("SELECT live_until_us FROM fleet WHERE live_until_us > 0").fetchone()
            if found is None or found[0] + ALONE_US < us(now_s) or found[0] > us(now_s) + ALONE_US:
                return None
            environment_row = conn.execute("SELECT id FROM environment WHERE key = ?", (environment.key,)).fetchone()
            if environment_row is None:
                return None
            facts = {"environment": environment_row[0], "now": us(now_s)}
            if found[0] <= us(now_s):
                return Gate(None, _numbers(conn, _THEIRS, facts))
            return Gate(_numbers(conn, f"{_OURS} UNION {_WAITING}", facts), None)

        return self._db.read(ask)

    def ask(self, environment: Environment, *, now_s: float) -> None:
        """Have the next sync claim more for this environment, when few of the units that we claimed are left."""

        def few(conn: sqlite3.Connection) -> dict[str, int] | None:
            environment_row = conn.execute("SELECT id FROM environment WHERE key = ?", (environment.key,)).fetchone()
            if environment_row is None:
                return None
            facts = {"environment": int(environment_row[0]), "now": us(now_s)}
            asked = "SELECT 1 FROM fleet_position WHERE environment_id = ? AND asked_us IS NOT NULL"
            if conn.execute(asked, environment_row).fetchone() or len(conn.execute(_OURS, facts).fetchmany(LOW)) >= LOW:
                return None
            return facts

        facts = self._db.read(few)
        if facts is not None:
            self._rows.write(lambda conn: conn.execute(_ASK, facts))

    def results(self, work: Work) -> list[ForeignResult]:
        """Results of others for this unit that wait for a check here; none whose versions are not here."""

        def ask(conn: sqlite3.Connection) -> list[ForeignResult]:
            ids = known_ids(conn, work.problem, work.environment)
            if ids is None:
                return []
            sql = (
                "SELECT path, host, text FROM fleet_result WHERE problem_id = :problem "
                "AND environment_id = :environment AND covers = :covers AND state = 'waiting' ORDER BY path"
            )
            return [
                ForeignResult.of_text(row["path"], row["host"], Unit(work.problem, work.covers), row["text"])
                for row in rows(conn, sql, {**ids, "covers": work.covers})
            ]

        return self._db.read(ask)

    def judge(self, path: str, reason: str) -> None:
        """This result was checked here: in use ("" for reason; its unit is not shared again), or refused for it."""

        def judge(conn: sqlite3.Connection) -> None:
            state = "refused" if reason else "used"
            conn.execute("UPDATE fleet_result SET state = ?, reason = ? WHERE path = ?", (state, reason[:4096], path))
            if not reason:
                conn.execute(
                    "INSERT OR IGNORE INTO fleet_shared SELECT s.id FROM solution s JOIN fleet_result f ON f.path = ? "
                    "AND f.problem_id = s.problem_id AND f.environment_id = s.environment_id AND f.covers = s.covers "
                    "WHERE s.retired_generation IS NULL",
                    (path,),
                )

        self._rows.write(judge)


def _numbers(conn: sqlite3.Connection, sql: str, facts: dict[str, int]) -> str:
    return json.dumps([row[0] for row in conn.execute(sql, facts).fetchall()])
