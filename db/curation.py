"""What an operator decides about solutions: keep this one, forget that one, go back to an earlier generation."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import DEFAULT_BACKEND, Solution
from gemmtuned.db.leases import current_generation
from gemmtuned.db.row_ids import SOLUTION_SELECT, Part, look_up_keys, rows, us
from gemmtuned.db.sightings import HOURS
from gemmtuned.db.solutions import HOLD, RETIRE, SERVING, raise_generation, solutions_of

_COLUMNS: Final = (
    "problem_id, device_id, environment_id, mode, covers, backend, config, stamp, us, baseline_us, gain_low, err, "
    "baseline_err, launch, beside, conditions, others, recheck"
)
# A row lived at generation N when it came with N or before, and went after N. Pinned or not is not kept with it.
_LIVED: Final = "s.generation <= :to AND (s.retired_generation IS NULL OR s.retired_generation > :to)"
# What somebody has pinned stays, whenever it came, and nothing comes back in its place.
_GONE: Final = (
    f"{SOLUTION_SELECT} WHERE s.retired_generation IS NULL AND s.generation > :to AND s.state <> 'pinned' ORDER BY s.id"
)
_BACK: Final = f"""
{SOLUTION_SELECT} WHERE s.retired_generation > :to AND {_LIVED} AND NOT EXISTS (
    SELECT 1 FROM solution l WHERE l.retired_generation IS NULL AND l.state = 'pinned' AND l.problem_id = s.problem_id
        AND l.device_id = s.device_id AND l.covers = s.covers AND l.mode = s.mode) ORDER BY s.id
"""  # noqa: S608
_UNPINNED: Final = f"CASE backend WHEN '{DEFAULT_BACKEND}' THEN 'default_best' ELSE 'published' END"
_REVIVE: Final = f"""
INSERT INTO solution ({_COLUMNS}, state, generation, published_us)
SELECT {_COLUMNS}, {_UNPINNED}, ?, ?
FROM solution WHERE id IN (SELECT value FROM json_each(?))
"""  # noqa: S608
# What is not there any more after it would be tuned again at once, to the same result
_UNSERVED: Final = """
SELECT g.id FROM solution g WHERE g.id IN (SELECT value FROM json_each(?)) AND NOT EXISTS (
    SELECT 1 FROM solution l WHERE l.retired_generation IS NULL AND l.problem_id = g.problem_id
        AND l.device_id = g.device_id AND l.covers = g.covers)
"""
# What comes back may be raced again: only what failed by itself may not
_RELEASE: Final = """
DELETE FROM work WHERE state = 'failed' AND cause IN ('withdrawn', 'rolled_back')
    AND EXISTS (SELECT 1 FROM solution s WHERE s.id IN (SELECT value FROM json_each(?))
        AND s.problem_id = work.problem_id AND s.environment_id = work.environment_id AND s.covers = work.covers)
"""
_OF_THESE: Final = "problem_id IN (SELECT value FROM json_each(:ids))"
_TRACES: Final = {
    **dict.fromkeys(
        ("sighting_before", "demand", "trial", "work", "quarantine", "compiled_gemm", "phase_call", "fleet_result"),
        _OF_THESE,
    ),
    "sighting": f"hour IN ({HOURS}) AND {_OF_THESE}",  # its key begins with the hour
}


@dataclass(frozen=True)
class RolledBack:
    """generation: the new one, which has what `to` had. gone, back: solutions that went and that came back."""

    generation: int
    gone: list[Solution]
    back: list[Solution]


class Curation(Part):
    """The part of the store for the operator's hand."""

    def pin(
        self, problems: Sequence[Problem], *, now_s: float, off: bool = False, dry_run: bool = False
    ) -> list[Solution]:
        """Keep what serves these problems whatever is measured later; off: no longer. The changed ones are returned."""

        def once(conn: sqlite3.Connection) -> list[Solution]:
            found = rows(conn, SERVING, (look_up_keys(problems),))
            change = [row for row in found if (row["state"] == "pinned") == off]
            if change and not dry_run:
                ids = json.dumps([row["id"] for row in change])
                raise_generation(conn, us(now_s), note="unpinned" if off else "pinned")
                conn.execute(
                    f"UPDATE solution SET state = {_UNPINNED if off else repr('pinned')}, recheck = NULL "  # noqa: S608
                    "WHERE id IN (SELECT value FROM json_each(?))",
                    (ids,),
                )
            return solutions_of(change)

        return self._rows.write(once, durable=not dry_run)

    def forget(self, problems: Sequence[Problem], *, now_s: float, dry_run: bool = False) -> tuple[list[Solution], int]:
        """Withdraw what serves these problems and drop their traffic, trials and failures.

        Returns (solutions withdrawn, rows dropped).  A program that calls one again brings it back as new.
        """

        def once(conn: sqlite3.Connection) -> tuple[list[Solution], int]:
            found = rows(conn, SERVING, (look_up_keys(problems),))
            traces = [f"FROM {table} WHERE {where}" for table, where in _TRACES.items()]
            values = {"ids": json.dumps(self._rows.known_problems(conn, problems))}
            if dry_run:
                counts = [conn.execute(f"SELECT count(*) {of}", values).fetchone()[0] for of in traces]
                return solutions_of(found), sum(counts)
            if found:
                generation = raise_generation(conn, us(now_s), retired=len(found), note="forgotten")
                which = json.dumps([row["id"] for row in found])
                conn.execute(RETIRE, ("withdrawn", generation, us(now_s), "forgotten by hand", which))
            dropped = sum(conn.execute(f"DELETE {of}", values).rowcount for of in traces)
            return solutions_of(found), dropped

        return self._rows.write(once, durable=not dry_run)

    def roll_back(self, to: int, *, now_s: float, dry_run: bool = False) -> RolledBack:
        """Publish again what generation `to` had, as a new generation: generations only ever grow.

        Problems that had no solution then are not tuned again until somebody asks.  Raises StoreError when there was
        no such generation.
        """

        def once(conn: sqlite3.Connection) -> RolledBack:
            newest = current_generation(conn)
            if to and not newest:
                raise StoreError(f"generation {to}: nothing is published yet")
            if not 0 <= to <= newest:
                raise StoreError(
                    f"generation {to}: the store has 0 to {newest}. gemmtuned rollback lists the newest, with "
                    "--generation N --dry-run it shows what would change"
                )
            gone, back = rows(conn, _GONE, {"to": to}), rows(conn, _BACK, {"to": to})
            if dry_run or not (gone or back):
                return RolledBack(newest, solutions_of(gone), solutions_of(back))
            note = f"rolled back to generation {to}"
            generation = raise_generation(conn, us(now_s), installed=len(back), retired=len(gone), note=note)
            out = json.dumps([row["id"] for row in gone])
            conn.execute(RETIRE, ("withdrawn", generation, us(now_s), note, out))
            again = json.dumps([row["id"] for row in back])
            conn.execute(_REVIVE, (generation, us(now_s), again))
            conn.execute(_RELEASE, (again,))
            left = json.dumps([row[0] for row in conn.execute(_UNSERVED, (out,)).fetchall()])
            conn.execute(HOLD, (us(now_s), us(now_s), "rolled_back", note, left))
            return RolledBack(generation, solutions_of(gone), solutions_of(back))

        return self._rows.write(once, durable=not dry_run)
