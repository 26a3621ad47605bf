"""The store as a sync (gemmtuned/fleet) uses it: how far it has read, claims, results of other hosts and our own."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gemmtuned.configs.solution import Environment, Solution
from gemmtuned.db.fleet import ForeignResult, Unit
from gemmtuned.db.leases import CLOCK_SLACK_US, DAY_US, STALE_US, rank
from gemmtuned.db.row_ids import PROBLEM_COLUMNS, Part, problem_of, rows, solution_of, us

_CLAIM: Final = """
INSERT INTO fleet_claim (problem_id, environment_id, covers, ours, path, until_us) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET ours = excluded.ours, path = excluded.path, until_us = excluded.until_us
"""
_RESULT: Final = """
INSERT INTO fleet_result (path, problem_id, environment_id, covers, host, state, reason, text, seen_us)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING
"""
_UNSHARED: Final = f"""
SELECT {PROBLEM_COLUMNS}, s.id, h.key AS device, s.mode, s.covers, s.backend, s.config, s.stamp, s.us,
    s.baseline_us, s.gain_low, s.err, s.baseline_err, s.state, 0 AS generation, '' AS launch, '' AS beside,
    s.conditions, s.others, s.published_us, s.problem_id
FROM solution s JOIN problem p ON p.id = s.problem_id JOIN device h ON h.id = s.device_id
WHERE s.retired_generation IS NULL AND s.environment_id = :environment AND s.state IN ('published', 'default_best')
    AND (:every OR NOT EXISTS (SELECT 1 FROM fleet_shared x WHERE x.solution_id = s.id))
ORDER BY s.problem_id, s.covers, s.mode
"""  # noqa: S608
_TRIALS: Final = """
SELECT backend, config, phase, mode, us, err, outcome FROM trial
WHERE problem_id = :problem AND environment_id = :environment AND us IS NOT NULL
ORDER BY us LIMIT 32
"""
_FORGET_LISTED: Final = """
DELETE FROM fleet_listed WHERE environment_id = ? AND path NOT IN (SELECT value FROM json_each(?))
"""
_FORGET_REFUSED: Final = """
DELETE FROM fleet_result WHERE environment_id = ? AND state = 'refused' AND path NOT IN (SELECT value FROM json_each(?))
"""
_COUNTS: Final = f"""
SELECT {PROBLEM_COLUMNS}, d.calls, c.us, d.last_seen_us,
    CASE WHEN d.solution_id IS NULL THEN 0
        WHEN c.waits THEN max(1.0 * (d.exact_calls + d.padded_calls) / max(d.calls, 1), 1e-9) ELSE 1 END AS covered,
    d.exact_calls + d.padded_calls AS hits,
    0.3 * c.us * d.recent / (1 << min(max(:day - d.recent_day, 0), 62)) AS worth
FROM demand d JOIN problem p ON p.id = d.problem_id
JOIN problem_cost c ON c.environment_id = d.environment_id AND c.problem_id = d.problem_id
WHERE d.environment_id = :environment AND d.tunable ORDER BY d.calls * c.us DESC, p.id LIMIT :limit
"""  # noqa: S608


@dataclass(frozen=True)
class Unshared:
    """Verdicts of one unit that we have not shared. measured: how they were measured; ids: of their rows."""

    solutions: tuple[Solution, ...]
    measured: dict[str, Any]
    trials: list[dict[str, Any]]
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Ours:
    """A unit that this host has claimed. path: of the claim.

    is_won: False: we were about to claim it, and another host may have won.
    is_shared: there is a verdict here by now, and the others have it.
    is_open: there is none, and it has not failed for good: it is still to do.
    """

    unit: Unit
    path: str
    is_won: bool
    is_shared: bool
    is_open: bool


class FleetSync(Part):
    """The part of the store that a sync reads and writes."""

    def url(self) -> str:
        """Where this home shares its results; "" while it does not."""
        found = self._db.read(lambda conn: conn.execute("SELECT url FROM fleet").fetchone())
        return str(found[0]) if found else ""

    def begin(self, url: str, *, live_until_s: float | None = None) -> None:
        """Share at this URL, and forget what is known of another one.

        live_until_s: by our clock; until then daemons lease only claimed units; 0: any unit; None: no change.
        """

        def begin(conn: sqlite3.Connection) -> None:
            found = conn.execute("SELECT url FROM fleet").fetchone()
            if found is not None and found[0] != url:
                for table in ("fleet_position", "fleet_claim", "fleet_listed", "fleet_result", "fleet_shared", "fleet"):
                    conn.execute(f"DELETE FROM {table}")  # noqa: S608
            conn.execute("INSERT OR IGNORE INTO fleet VALUES (1, ?, 0, 0)", (url,))
            if live_until_s is not None:
                conn.execute("UPDATE fleet SET live_until_us = ?", (us(live_until_s),))

        self._rows.write(begin)

    def seen(self, *, now_s: float | None = None) -> float:
        """When our counts were last written, in seconds. now_s: note that they are written now."""
        if now_s is not None:
            self._rows.write(lambda conn: conn.execute("UPDATE fleet SET seen_us = ?", (us(now_s),)))
        found = self._db.read(lambda conn: conn.execute("SELECT seen_us FROM fleet").fetchone())
        return found[0] / 1e6 if found else 0.0

    def asked(self) -> list[str]:
        """Keys of environments whose worker waits for claims."""
        sql = (
            "SELECT key FROM fleet_position f JOIN environment e ON e.id = f.environment_id WHERE asked_us IS NOT NULL"
        )
        return self._db.read(lambda conn: [str(row[0]) for row in conn.execute(sql).fetchall()])

    def position(self, environment: Environment) -> tuple[str, float]:
        """(up to which name results are known, when all names were listed last)."""
        sql = "SELECT after, full_us FROM fleet_position JOIN environment ON id = environment_id WHERE key = ?"
        found = self._db.read(lambda conn: conn.execute(sql, (environment.key,)).fetchone())
        return (str(found[0]), found[1] / 1e6) if found else ("", 0.0)

    def move(self, environment: Environment, after: str, listed: Mapping[str, str], *, full_s: float) -> list[str]:
        """Note that results are known up to this name. listed: names with their unit's hash; returns the new ones.

        full_s: when all names were listed last. If that is now, names that are not among them are forgotten.
        """

        def move(conn: sqlite3.Connection) -> list[str]:
            here = self._rows.environment_id(conn, environment, us(full_s))
            before = conn.execute("SELECT full_us FROM fleet_position WHERE environment_id = ?", (here,)).fetchone()
            if before is not None and before[0] != us(full_s):
                there = json.dumps(list(listed))
                conn.execute(_FORGET_LISTED, (here, there))
                conn.execute(_FORGET_REFUSED, (here, there))
            insert = "INSERT OR IGNORE INTO fleet_listed VALUES (?, ?, ?)"
            new = [path for path, unit in listed.items() if conn.execute(insert, (here, unit, path)).rowcount]
            conn.execute(
                "INSERT INTO fleet_position (environment_id, after, full_us) VALUES (?, ?, ?) "
                "ON CONFLICT DO UPDATE SET after = excluded.after, full_us = excluded.full_us",
                (here, after, us(full_s)),
            )
            return new

        return self._rows.write(move)

    def open(self, environment: Environment, *, now_s: float, limit: int) -> list[Unit]:
        """Units without a verdict that are free here, worth most first: what a daemon would lease if it were alone."""
        facts: dict[str, Any] = {
            "now": us(now_s), "day": us(now_s) // DAY_US, "slack": CLOCK_SLACK_US, "stale": us(now_s) - STALE_US,
            "mode": "eager", "only": None, "never": None, "again": False, "family_last": "", "look_at": limit,
        }  # fmt: skip
        found = self._db.read(lambda conn: rank(conn, environment, facts))
        return [Unit(problem_of(row).with_m(row["unit_m"]), row["covers"], row["worth"]) for row in found]

    def new(self, environment: Environment, units: Iterable[str]) -> list[str]:
        """Names of results for these units that were listed and never fetched, oldest first."""
        sql = """
            SELECT l.path FROM fleet_listed l JOIN environment e ON e.id = l.environment_id AND e.key = :key
            WHERE l.unit IN (SELECT value FROM json_each(:units))
                AND NOT EXISTS (SELECT 1 FROM fleet_result r WHERE r.path = l.path)
            ORDER BY l.path
        """
        values = {"key": environment.key, "units": json.dumps(list(units))}
        return self._db.read(lambda conn: [str(row[0]) for row in conn.execute(sql, values).fetchall()])

    def unknown(self, paths: Sequence[str]) -> list[str]:
        """The names among these whose objects were not fetched yet."""
        sql = "SELECT value FROM json_each(?) WHERE NOT EXISTS (SELECT 1 FROM fleet_result r WHERE r.path = value)"
        values = (json.dumps(list(paths)),)
        return self._db.read(lambda conn: [str(row[0]) for row in conn.execute(sql, values).fetchall()])

    def take(
        self, environment: Environment, found: Sequence[ForeignResult], *, gone: Sequence[str] = (), now_s: float
    ) -> None:
        """Store fetched results, which wait for a check here, or the fact that they cannot be read.

        gone: names that were listed, but whose objects no longer exist.
        """

        def take(conn: sqlite3.Connection) -> None:
            here = self._rows.environment_id(conn, environment, us(now_s))
            for one in found:
                unit: tuple[object, ...] = (None, None, None)
                if one.unit is not None:
                    unit = (self._rows.problem_id(conn, one.unit.problem), here, one.unit.covers)
                state = "refused" if one.reason else "waiting"
                values = (one.path, *unit, one.host[:200], state, one.reason[:4096], one.text(), us(now_s))
                conn.execute(_RESULT, values)
            conn.executemany("DELETE FROM fleet_listed WHERE path = ?", [(path,) for path in gone])

        self._rows.write(take)

    def waiting(self, environment: Environment) -> list[Unit]:
        """Units for which a result of another host waits for a check here."""
        sql = f"""
            SELECT DISTINCT {PROBLEM_COLUMNS}, f.covers FROM fleet_result f JOIN problem p ON p.id = f.problem_id
            JOIN environment e ON e.id = f.environment_id WHERE e.key = ? AND f.state = 'waiting'
        """  # noqa: S608
        found = self._db.read(lambda conn: rows(conn, sql, (environment.key,)))
        return [Unit(problem_of(row), row["covers"]) for row in found]

    def intend(self, environment: Environment, claims: Iterable[tuple[Unit, str]], *, now_s: float) -> None:
        """Note that we are about to claim these by these names, so that after a kill we can find out what we won."""

        def put(conn: sqlite3.Connection) -> None:
            here = self._rows.environment_id(conn, environment, us(now_s))
            for unit, path in claims:
                conn.execute(_CLAIM, (self._rows.problem_id(conn, unit.problem), here, unit.covers, 1, path, 0))

        self._rows.write(put)

    def claims(
        self, environment: Environment, claims: Iterable[tuple[Unit, bool, str, float]], *, now_s: float
    ) -> None:
        """Replace the known claims by these: (unit, whether it is ours, name, until when by our clock).

        Our own claims that are not among them stay until they lapse.  The daemon may ask for more claims again.
        """

        def put(conn: sqlite3.Connection) -> None:
            here = self._rows.environment_id(conn, environment, us(now_s))
            gone = "DELETE FROM fleet_claim WHERE environment_id = ? AND (ours = 0 OR until_us <= ?)"
            conn.execute(gone, (here, us(now_s)))
            for unit, ours, path, until_s in claims:
                number = self._rows.problem_id(conn, unit.problem)
                conn.execute(_CLAIM, (number, here, unit.covers, int(ours), path, us(until_s)))
            conn.execute("UPDATE fleet_position SET asked_us = NULL WHERE environment_id = ?", (here,))

        self._rows.write(put)

    def ours(self, environment: Environment) -> list[Ours]:
        """What this host has claimed, or was about to."""
        here = (
            "s.problem_id = f.problem_id AND s.covers = f.covers AND s.environment_id = f.environment_id "
            "AND s.retired_generation IS NULL"
        )
        sql = f"""
            SELECT {PROBLEM_COLUMNS}, f.covers, f.path, f.until_us > 0 AS is_won,
                (SELECT count(*) FROM solution s WHERE {here}) AS verdicts,
                (SELECT count(*) FROM solution s JOIN fleet_shared x ON x.solution_id = s.id WHERE {here}) AS shared,
                EXISTS (SELECT 1 FROM work w WHERE w.problem_id = f.problem_id AND w.covers = f.covers
                    AND w.environment_id = f.environment_id AND w.state = 'failed') AS has_failed
            FROM fleet_claim f JOIN problem p ON p.id = f.problem_id JOIN environment e ON e.id = f.environment_id
            WHERE f.ours = 1 AND e.key = ?
        """  # noqa: S608
        found = self._db.read(lambda conn: rows(conn, sql, (environment.key,)))
        return [
            Ours(
                Unit(problem_of(row), row["covers"]), row["path"], bool(row["is_won"]),
                row["shared"] == row["verdicts"] > 0, not row["verdicts"] and not row["has_failed"],
            )
            for row in found
        ]  # fmt: skip

    def drop(self, environment: Environment, units: Iterable[Unit]) -> None:
        """Give up our claims of these units."""

        def drop(conn: sqlite3.Connection) -> None:
            for unit in units:
                conn.execute(
                    "DELETE FROM fleet_claim WHERE problem_id = ? AND covers = ? AND ours = 1 AND environment_id = "
                    "(SELECT id FROM environment WHERE key = ?)",
                    (self._rows.problem_id(conn, unit.problem), unit.covers, environment.key),
                )

        self._rows.write(drop)

    def unshared(self, environment: Environment, *, every: bool = False) -> list[Unshared]:
        """Verdicts found here that we have not shared, by unit. every: also shared ones."""

        def ask(conn: sqlite3.Connection) -> list[Unshared]:
            environment_row = conn.execute("SELECT id FROM environment WHERE key = ?", (environment.key,)).fetchone()
            if environment_row is None:
                return []
            units: dict[tuple[int, str], list[dict[str, Any]]] = {}
            for row in rows(conn, _UNSHARED, {"environment": environment_row[0], "every": every}):
                units.setdefault((row["problem_id"], row["covers"]), []).append(row)
            return [_unshared(conn, environment_row[0], number, found) for (number, _), found in units.items()]

        return [one for one in self._db.read(ask) if one.solutions]

    def shared(self, ids: Sequence[int]) -> None:
        """Note that these solutions are shared."""
        self._rows.write(
            lambda conn: conn.executemany("INSERT OR IGNORE INTO fleet_shared VALUES (?)", [(i,) for i in ids])
        )

    def solved(self, environment: Environment, *, since_s: float) -> int:
        """How many verdicts our own searches found since then; checks of other hosts' results do not count."""
        sql = """
            SELECT count(*) FROM solution s JOIN environment e ON e.id = s.environment_id
            WHERE e.key = ? AND s.published_us > ? AND NOT EXISTS (
                SELECT 1 FROM fleet_result f WHERE f.problem_id = s.problem_id
                AND f.environment_id = s.environment_id AND f.covers = s.covers AND f.state = 'used')
        """
        return self._db.read(lambda conn: int(conn.execute(sql, (environment.key, us(since_s))).fetchone()[0]))

    def found_by(self, environment: Environment) -> dict[tuple[str, str], str]:
        """The host whose result was checked and taken over here, by (problem, covers)."""
        sql = """
            SELECT p.text, f.covers, f.host FROM fleet_result f JOIN problem p ON p.id = f.problem_id
            JOIN environment e ON e.id = f.environment_id WHERE e.key = ? AND f.state = 'used'
        """
        found = self._db.read(lambda conn: conn.execute(sql, (environment.key,)).fetchall())
        return {(str(text), str(covers)): str(host) for text, covers, host in found}

    def counts(self, environment: Environment, *, now_s: float, limit: int) -> list[dict[str, Any]]:
        """Problems called here, most expensive first: problem, calls, us a call, hits, covered, worth, last_seen_us.

        covered: the share of its calls, above 0 where there is a verdict at all: one that waits for a race beside an
        engine's kernel is nothing to search on another host.
        """

        def ask(conn: sqlite3.Connection) -> list[dict[str, Any]]:
            environment_row = conn.execute("SELECT id FROM environment WHERE key = ?", (environment.key,)).fetchone()
            facts = {
                "environment": environment_row[0] if environment_row else 0,
                "day": us(now_s) // DAY_US,
                "limit": limit,
            }
            return rows(conn, _COUNTS, facts)

        found = self._db.read(ask)
        names = ("calls", "us", "hits", "covered", "worth", "last_seen_us")
        return [{"problem": str(problem_of(row)), **{name: row[name] for name in names}} for row in found]


def _unshared(conn: sqlite3.Connection, environment: int, problem: int, found: list[dict[str, Any]]) -> Unshared:
    solutions = tuple(s for s in map(solution_of, found) if s is not None)
    first = found[0]
    measured = {name: first[name] for name in ("conditions", "others", "published_us")}
    trials = rows(conn, _TRIALS, {"problem": problem, "environment": environment})
    return Unshared(solutions, measured, trials, tuple(row["id"] for row in found))
