"""What single runs of candidates gave, and which candidates are not tried again for it."""

from __future__ import annotations

import sqlite3
from typing import Final

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Environment
from gemmtuned.db.leases import Work, known_ids
from gemmtuned.db.row_ids import Part, plain, stamps_here

DEADLY: Final = 2  # problems on which a candidate killed its worker: with this source and these versions it is poison
_TRIAL: Final = """
INSERT INTO trial (problem_id, environment_id, mode, backend, config, phase, us, err, outcome, note, owner, started_us,
    stamp)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET us = excluded.us, err = excluded.err, outcome = excluded.outcome, note = excluded.note,
    owner = excluded.owner, started_us = excluded.started_us, stamp = excluded.stamp
"""
_NOT_KILLED: Final = """
UPDATE trial SET outcome = 'hindered'
WHERE problem_id = :problem AND environment_id = :environment AND outcome = 'killed'
"""
_FAILED: Final = """
SELECT t.backend, t.config FROM trial t
    WHERE t.problem_id = :problem AND t.environment_id = :environment
        AND t.outcome IN ('crash', 'hang', 'killed', 'wrong', 'refused')
        AND (t.backend || ' ' || t.stamp) IN (SELECT value FROM json_each(:stamps))
UNION
SELECT q.backend, q.config FROM quarantine q
    WHERE q.problem_id = :problem AND q.how = 'wrong'
        AND (q.backend || ' ' || q.stamp) IN (SELECT value FROM json_each(:stamps))
UNION
SELECT t.backend, t.config FROM trial t
    JOIN environment e ON e.id = t.environment_id
    JOIN environment f ON f.id = :environment AND f.device_id = e.device_id
    WHERE t.outcome IN ('crash', 'hang')
        AND (t.backend || ' ' || t.stamp) IN (SELECT value FROM json_each(:stamps))
    GROUP BY t.backend, t.config HAVING count(DISTINCT t.problem_id) >= :deadly
"""


class Trials(Part):
    """The part of the store that holds trials."""

    def add(
        self, work: Work, problem: Problem, candidate: Candidate, *, phase: str, us: float | None, err: float | None,
        outcome: str, note: str, started_us: int,
    ) -> None:  # fmt: skip
        """Keep what one run of a candidate gave, at once; the newest of its problem, candidate and phase stays.

        problem: the member that was run.  outcome: one of protocol/wire.py.
        """

        def keep(conn: sqlite3.Connection) -> None:
            key = (
                self._rows.problem_id(conn, problem),
                self._rows.environment_id(conn, work.environment, started_us),
                work.mode,
            )
            what = (
                candidate.backend,
                candidate.config,
                phase,
                us,
                err,
                outcome,
                plain(note, 4096),
                work.owner,
                started_us,
                work.environment.stamp_of(candidate) or "",
            )
            conn.execute(_TRIAL, (*key, *what))

        self._rows.write(keep)

    def free_killed(self, work: Work) -> None:
        """Candidates at which a worker of this work was killed may be tried again: memory may have been short."""

        def free(conn: sqlite3.Connection) -> None:
            for problem in {work.problem, *work.members}:
                ids = known_ids(conn, problem, work.environment)
                if ids is not None:
                    conn.execute(_NOT_KILLED, ids)

        self._rows.write(free)

    def failed_candidates(self, problem: Problem, environment: Environment) -> set[Candidate]:
        """Candidates not to be tried: they crashed, hung, were wrong or refused here, or failed inside a program.

        So are those that crashed or hung on two problems on such a device under the stamp they have here: the
        stamp holds the kernel's source and the versions, so an upgrade gives them another chance.
        """

        def ask(conn: sqlite3.Connection) -> set[Candidate]:
            ids = known_ids(conn, problem, environment)
            if not ids:
                return set()
            values = {**ids, "deadly": DEADLY, "stamps": stamps_here(environment)}
            return {Candidate(*row) for row in conn.execute(_FAILED, values).fetchall()}

        return self._db.read(ask)
