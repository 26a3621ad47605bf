"""The store as running programs write to it, every second: sightings, their own state, and routes that failed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Final

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import Session, Sighting
from gemmtuned.configs.solution import Environment, Solution
from gemmtuned.configs.tunable import why_not
from gemmtuned.configs.unpatched import builtins
from gemmtuned.db.row_ids import Part, plain, us

__builtins__ = builtins

_ADD_SIGHTING: Final = """
INSERT INTO sighting (problem_id, environment_id, run_id, hour, outcome, graph,
    calls, sampled_calls, sampled_us, last_seen_us)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET calls = calls + excluded.calls, sampled_calls = sampled_calls + excluded.sampled_calls,
    sampled_us = sampled_us + excluded.sampled_us, last_seen_us = max(last_seen_us, excluded.last_seen_us)
"""
# recent: calls of recent_day count once, those of the day before half, and so on
_ADD_DEMAND: Final = """
INSERT INTO demand (problem_id, environment_id, calls, sampled_calls, sampled_us, first_seen_us, last_seen_us,
    recent, recent_day, exact_calls, padded_calls, exact_graph_calls, padded_graph_calls)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET calls = calls + excluded.calls, sampled_calls = sampled_calls + excluded.sampled_calls,
    sampled_us = sampled_us + excluded.sampled_us, last_seen_us = max(last_seen_us, excluded.last_seen_us),
    recent = recent / (1 << min(max(excluded.recent_day - recent_day, 0), 62))
        + excluded.recent / (1 << min(max(recent_day - excluded.recent_day, 0), 62)),
    recent_day = max(recent_day, excluded.recent_day),
    exact_calls = exact_calls + excluded.exact_calls, padded_calls = padded_calls + excluded.padded_calls,
    exact_graph_calls = exact_graph_calls + excluded.exact_graph_calls,
    padded_graph_calls = padded_graph_calls + excluded.padded_graph_calls
"""
# Said before a daemon looks (db/abilities.py), which knows what its own version can tune
_NEVER: Final = """
UPDATE demand SET tunable = 0 WHERE environment_id = ? AND problem_id = ? AND tunable AND solution_id IS NULL
"""
ADD_RECENT: Final = """
UPDATE demand SET recent = recent / (1 << min(max(:day - recent_day, 0), 62))
        + :calls / (1 << min(max(recent_day - :day, 0), 62)), recent_day = max(recent_day, :day)
WHERE problem_id = :problem AND environment_id = :environment
"""
# Each hour that has rows, by one look-up each: the rows themselves are not read
HOURS: Final = """
WITH RECURSIVE at(hour) AS (
    SELECT min(hour) FROM sighting
    UNION ALL SELECT (SELECT min(hour) FROM sighting WHERE hour > at.hour) FROM at WHERE at.hour IS NOT NULL
) SELECT hour FROM at WHERE hour IS NOT NULL
"""
_SESSION: Final = """
INSERT INTO session (host, pid, started_us, run, path, generation, active_us, calls, dropped, errors,
    reload_failures, note, sqlite_version, store_dev, store_ino, beat_us, ended_us, rank, namespace, role, operators,
    waited_us)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET run = excluded.run, path = excluded.path, generation = excluded.generation,
    active_us = excluded.active_us,
    calls = excluded.calls, dropped = excluded.dropped, errors = excluded.errors,
    reload_failures = excluded.reload_failures, note = excluded.note, sqlite_version = excluded.sqlite_version,
    store_dev = excluded.store_dev, store_ino = excluded.store_ino,
    beat_us = max(beat_us, excluded.beat_us), ended_us = excluded.ended_us, rank = excluded.rank,
    namespace = excluded.namespace, role = excluded.role, operators = excluded.operators,
    waited_us = excluded.waited_us
"""
ADD_QUARANTINE: Final = """
INSERT INTO quarantine (problem_id, device, mode, covers, backend, config, stamp, reason, run, how,
    reports, last_seen_us, taken_us)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1, ?, NULL)
ON CONFLICT DO UPDATE SET reports = reports + 1, reason = excluded.reason, run = excluded.run,
    how = max(how, excluded.how), last_seen_us = max(last_seen_us, excluded.last_seen_us), taken_us = NULL
"""
_COMPILED: Final = """
INSERT INTO compiled_gemm (problem_id, environment_id, run_id, kernel, first_seen_us, last_seen_us)
VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET last_seen_us = max(last_seen_us, excluded.last_seen_us)
"""
_ADD_PHASE: Final = """
INSERT INTO phase_call (problem_id, environment_id, run_id, phase, hour, calls, last_seen_us)
VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET calls = calls + excluded.calls, last_seen_us = max(last_seen_us, excluded.last_seen_us)
"""
# wanted_of: the solution that they cannot have; 0 where the file has none, as that of other users' programs. A name
# that stands there for it already is not added again. What was reported of an older table says nothing of a newer
# solution
ADD_WANTED: Final = """
UPDATE demand SET wanted = CASE WHEN wanted = '' OR wanted_of IS NOT coalesce(solution_id, 0) THEN :operator
        WHEN instr(' ' || wanted || ' ', ' ' || :operator || ' ') THEN wanted
        ELSE substr(wanted || ' ' || :operator, 1, 512) END, wanted_of = coalesce(solution_id, 0)
WHERE environment_id = :environment AND problem_id = :problem
    AND NOT EXISTS (SELECT 1 FROM solution s WHERE s.id = demand.solution_id AND s.generation > :generation)
"""
ANY_GENERATION: Final = (1 << 63) - 1
_HITS: Final = (("exact", 0), ("padded", 0), ("exact", 1), ("padded", 1))  # outcome and graph, as the columns of demand


class Sightings(Part):
    """The part of the store that programs write."""

    def add(
        self, run: str, environment: Environment, sightings: Iterable[Sighting], *, now_s: float,
        session: Session | None = None,
    ) -> None:  # fmt: skip
        """Add the calls of these sightings, all or none; calls in a phase are stored apart from the traffic.

        session: stored with them, as by `beat`, which takes a transaction of its own.
        Raises StoreBusy or StoreError; then nothing was added, and the same batch can be added later.
        """
        batch = list(sightings)
        now_us = us(now_s)
        hour = now_us // 3_600_000_000

        def work(conn: sqlite3.Connection) -> None:
            environment_id = self._rows.environment_id(conn, environment, now_us)
            run_id = run_id_of(conn, run)
            ids = self._rows.problem_ids(conn, [s.problem for s in batch])
            whose = (environment_id, run_id)
            seen = list(zip(ids, batch, strict=True))
            traffic = [
                (i, *whose, hour, s.outcome, int(s.graph), s.calls, s.sampled_calls, s.sampled_us, now_us)
                for i, s in seen
                if not s.phase
            ]
            count(conn, traffic)
            conn.executemany(_NEVER, {(environment_id, i) for i, s in seen if why_not(s.problem)})
            phases = [(i, *whose, plain(s.phase, 60), hour, s.calls, now_us) for i, s in seen if s.phase and s.calls]
            conn.executemany(_ADD_PHASE, phases)
            if session is not None:
                keep_session(conn, self._db.file(), session, now_us, None)

        self._rows.write(work)

    def add_compiled(
        self, run: str, environment: Environment, gemms: Iterable[tuple[Problem, str]], *, now_s: float
    ) -> None:
        """Remember that these problems are inside kernels (by name) that torch.compile made for this run."""
        batch = list(gemms)
        now_us = us(now_s)

        def work(conn: sqlite3.Connection) -> None:
            whose = (self._rows.environment_id(conn, environment, now_us), run_id_of(conn, run))
            ids = self._rows.problem_ids(conn, [problem for problem, _ in batch])
            rows = [(i, *whose, plain(kernel, 200), now_us, now_us) for i, (_, kernel) in zip(ids, batch, strict=True)]
            conn.executemany(_COMPILED, rows)

        self._rows.write(work)

    def add_wanted(
        self, environment: Environment, wanted: Iterable[tuple[Problem, str]], generation: int = ANY_GENERATION,
        *, now_s: float,
    ) -> None:  # fmt: skip
        """Remember (problem, engine's operator): the solution was not raced beside that operator's own kernel.

        generation: of the table that says so; a newer solution is another one.
        """
        batch = list(wanted)

        def work(conn: sqlite3.Connection) -> None:
            here = self._rows.environment_id(conn, environment, us(now_s))
            ids = self._rows.problem_ids(conn, [problem for problem, _ in batch])
            for problem_id, (_, operator) in zip(ids, batch, strict=True):
                name = plain(operator, 200)
                values = {"environment": here, "problem": problem_id, "operator": name, "generation": generation}
                conn.execute(ADD_WANTED, values)

        self._rows.write(work)

    def beat(self, session: Session, *, now_s: float) -> None:
        """Store that this process is alive, and its state."""
        self._put_session(session, us(now_s), None)

    def end_session(self, session: Session, *, now_s: float) -> None:
        """Store that this process has ended in good order."""
        self._put_session(session, us(now_s), us(now_s))

    def add_quarantine(self, solution: Solution, reason: str, *, run: str, now_s: float, how: str = "failed") -> None:
        """Report a route that failed inside a program; see `take_quarantined`.

        how: `failed`: it raised; `wrong`: its result differed from torch's.
        """

        def work(conn: sqlite3.Connection) -> None:
            s = solution
            key = (s.device, s.mode, s.covers, s.backend, s.config, s.stamp)
            conn.execute(
                ADD_QUARANTINE,
                (self._rows.problem_id(conn, s.problem), *key, plain(reason, 4096), plain(run, 512), how, us(now_s)),
            )

        self._rows.write(work)

    def _put_session(self, s: Session, beat_us: int, ended_us: int | None) -> None:
        self._rows.write(lambda conn: keep_session(conn, self._db.file(), s, beat_us, ended_us))


def count(conn: sqlite3.Connection, seen: Sequence[tuple[int, int, int, int, str, int, int, int, float, int]]) -> None:
    """Within a transaction: add these counts to the sightings and to all sums of them.

    Each is (problem, environment and run by number, hour, outcome, graph, calls, sampled_calls, sampled_us,
    last_seen_us).
    """
    demand = []
    for problem, environment, _, hour, outcome, graph, calls, sampled, sampled_us, seen_us in seen:
        # a hit ran our kernel, so its time says nothing about the default's
        samples = (sampled, sampled_us) if outcome == "miss" else (0, 0.0)
        hits = (calls if (outcome, graph) == of else 0 for of in _HITS)
        demand.append((problem, environment, calls, *samples, seen_us, seen_us, float(calls), hour // 24, *hits))
    conn.executemany(_ADD_SIGHTING, seen)
    conn.executemany(_ADD_DEMAND, demand)


def run_id_of(conn: sqlite3.Connection, name: str) -> int:
    """Within a transaction: the row id of this run, which is stored if new."""
    name = plain(name, 512)
    found = conn.execute("SELECT id FROM run WHERE name = ?", (name,)).fetchone()
    if found is None:
        found = conn.execute("INSERT INTO run (name) VALUES (?) RETURNING id", (name,)).fetchone()
    return int(found[0])


def keep_session(
    conn: sqlite3.Connection, file: tuple[int, int], s: Session, beat_us: int, ended_us: int | None
) -> None:
    """Write the row of a session. file: st_dev and st_ino of the database that it writes to. Within a write only."""
    key = (plain(s.host, 512), s.pid, s.started_us, plain(s.run, 512))
    where = None if s.namespace is None else plain(s.namespace, 100)
    state = (
        s.path,
        s.generation,
        s.active_us,
        s.calls,
        s.dropped,
        s.errors,
        s.reload_failures,
        plain(s.note, 4096),
    )
    device, inode = file
    counted_in = (device, inode & (1 << 63) - 1)  # inode numbers are unsigned, SQLite's integers are not
    more = (beat_us, ended_us, s.rank, where, plain(s.role, 60), plain(s.operators, 8192), max(s.waited_us, 0))
    conn.execute(_SESSION, (*key, *state, sqlite3.sqlite_version, *counted_in, *more))
