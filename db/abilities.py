"""What the worker of an environment has and can tune, as it says when it looks for work.

It says which kinds of operands it can tune (table `tunable`), and a trigger marks calls of all others in the column of
this name.  A layout, a size, or a form of W that no family has the kind does not tell, nor more threads than the worker
has CPUs: that is decided here, with each search for work, and stands in the same column.  Such calls are counted, said
to be untunable, and never leased.
"""

from __future__ import annotations

import json
import sqlite3
from typing import Final

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.few_cpus import most_threads, too_few
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Environment
from gemmtuned.configs.tunable import why_not
from gemmtuned.db.row_ids import LOOK_UP_AGAIN, MAX_REMEMBERED, Part, Rows, current_stamps, stamp_rows

_CURRENT: Final = """
UPDATE environment_stamp SET current = 1 WHERE environment_id = ? AND backend = ? AND kernel = ? AND stamp = ?
"""
_TUNABLE_AGAIN: Final = """
UPDATE demand SET tunable = NOT EXISTS (SELECT 1 FROM tunable WHERE environment_id = :environment)
    OR (SELECT p.operands FROM problem p WHERE p.id = demand.problem_id)
        IN (SELECT operands FROM tunable WHERE environment_id = :environment)
WHERE environment_id = :environment
"""
_ANOTHER_CHANCE: Final = """
DELETE FROM work WHERE environment_id = ? AND state = 'failed' AND cause IN ('failed', 'lapsed')
"""
# Without a verdict, and of kinds that the worker can tune, or of all where none has said so
_OPEN: Final = """
SELECT DISTINCT p.rest, d.tunable FROM demand d JOIN problem p ON p.id = d.problem_id
WHERE d.environment_id = :environment AND d.solution_id IS NULL AND (d.tunable
    OR p.operands IN (SELECT operands FROM tunable WHERE environment_id = :environment)
    OR NOT EXISTS (SELECT 1 FROM tunable WHERE environment_id = :environment))
"""
_PUT_RIGHT: Final = """
UPDATE demand SET tunable = :can WHERE environment_id = :environment AND solution_id IS NULL AND tunable <> :can
    AND problem_id IN (SELECT id FROM problem WHERE rest IN (SELECT value FROM json_each(:rests)))
"""
# Changes with each problem that comes or goes, and with each mark: the sum of a hash of both, the middle of a square,
# twice.  Sums of the numbers themselves are equal for 1 and 4, and for 2 and 3
_STATE: Final = """
SELECT count(*), sum((square >> 16 & 0x7FFFFFFF) * (square >> 16 & 0x7FFFFFFF) >> 32), max(first_seen_us) FROM (
    SELECT spread * spread AS square, first_seen_us FROM (
        SELECT (2 * problem_id + tunable) * 1103515245 & 0x7FFFFFFF AS spread, first_seen_us FROM demand
        WHERE environment_id = :environment AND solution_id IS NULL))
"""
_HERE: Final = "SELECT id FROM environment WHERE key = ?"
_State = tuple[int | None, ...]  # most_threads, which file, which environment in it, and _STATE


class Abilities(Part):
    """The part of the store that knows what workers can tune."""

    def __init__(self, shared: Rows) -> None:
        super().__init__(shared)
        self._known: dict[str, bool] = {}  # whether we can tune it, by Problem.rest
        self._most_threads = 0
        self._right: dict[str, _State] = {}  # when all marks were found right last, by Environment.key

    def settle(self, environment: Environment, now_us: int) -> None:
        """Store what this worker has and can tune, for reports; if that has changed, failed units are free again."""

        def as_said(conn: sqlite3.Connection) -> bool:
            found = conn.execute("SELECT id FROM environment WHERE key = ?", (environment.key,)).fetchone()
            return found is not None and not _changes(conn, int(found[0]), environment)

        def settle(conn: sqlite3.Connection) -> None:
            here = self._rows.environment_id(conn, environment, now_us)
            if not _changes(conn, here, environment):
                return
            self._right.pop(environment.key, None)
            conn.execute("UPDATE environment_stamp SET current = 0 WHERE environment_id = ?", (here,))
            conn.executemany(_CURRENT, stamp_rows(here, environment))
            conn.execute("DELETE FROM tunable WHERE environment_id = ?", (here,))
            conn.executemany("INSERT INTO tunable VALUES (?, ?)", [(here, kind) for kind in set(environment.tunable)])
            conn.execute(LOOK_UP_AGAIN, (here,))
            conn.execute(_TUNABLE_AGAIN, {"environment": here})
            conn.execute(_ANOTHER_CHANCE, (here,))

        if not self._db.read(as_said):
            self._rows.write(settle)
        self._leave_out(environment)

    def _leave_out(self, environment: Environment) -> None:
        """Mark what has come and cannot be tuned, and take the mark off what an older version could not."""

        most = most_threads()
        if most != self._most_threads:  # somebody has given us other CPUs
            self._known.clear()
        self._most_threads = most

        def look(conn: sqlite3.Connection) -> tuple[_State, list[tuple[str, int]]]:
            row = conn.execute(_HERE, (environment.key,)).fetchone()
            here = {"environment": None if row is None else row[0]}
            state = (self._most_threads, self._db.opened, here["environment"], *conn.execute(_STATE, here).fetchone())
            if self._right.get(environment.key) == state:
                return state, []
            return state, conn.execute(_OPEN, here).fetchall()

        wrong: dict[bool, list[str]] = {False: [], True: []}
        state, found = self._db.read(look)
        for rest, tunable in found:
            can = self._can_tune(rest)
            if can != bool(tunable):
                wrong[can].append(rest)

        def put_right(conn: sqlite3.Connection) -> None:
            here = conn.execute(_HERE, (environment.key,)).fetchone()
            for can, rests in wrong.items() if here is not None else ():  # else another file lies here by now
                conn.execute(_PUT_RIGHT, {"environment": here[0], "can": int(can), "rests": json.dumps(rests)})

        if any(wrong.values()):
            self._rows.write(put_right)
        else:
            self._right[environment.key] = state

    def _can_tune(self, rest: str) -> bool:
        known = self._known.get(rest)
        if known is None:
            if len(self._known) > MAX_REMEMBERED:
                self._known.clear()
            try:
                problem = Problem.from_rest(rest, 1)
                known = not (why_not(problem) or too_few(problem))
            except ProblemError:  # a newer version has written it
                known = True
            self._known[rest] = known
        return known


def _changes(conn: sqlite3.Connection, environment_id: int, environment: Environment) -> bool:
    """Whether this worker's stamps, or what it can tune, differ from those of the last one that leased."""
    if current_stamps(conn, environment_id) != environment.stamps:
        return True
    found = conn.execute("SELECT operands FROM tunable WHERE environment_id = ?", (environment_id,)).fetchall()
    return {kind for (kind,) in found} != set(environment.tunable)


def reason(problem: Problem) -> str:
    """Why this version, or what tunes here with its few CPUs, cannot tune it, for people."""
    why, few = why_not(problem), too_few(problem)
    if few and not why:
        return few
    held = f", or what tunes here has fewer CPUs than {problem.threads} threads (taskset, a cpuset)"
    other = f"it has no family for such operands{held if problem.threads > 1 else ''}"
    return f"this version cannot tune it: {why or other}"
