"""What members may bring that is new to us, and its numbers in our own tables."""

from __future__ import annotations

import sqlite3
from typing import Final

from gemmtuned.configs.solution import Environment
from gemmtuned.db.members_progress import DAY_US
from gemmtuned.db.members_rows import Named, cached
from gemmtuned.db.row_ids import Rows, plain
from gemmtuned.db.sightings import run_id_of

NEW_A_DAY: Final = 10_000  # problems never seen before
MORE_A_DAY: Final = {"environment": 100, "run": 1000, "session": 10_000, "report": 10_000}
FURTHER_RUNS: Final = "(further runs)"  # whose calls are those of runs beyond the limit


class Ours:
    """Numbers of ours for what rows name, made when new and within the limits of a day."""

    def __init__(self, shared: Rows, conn: sqlite3.Connection, room: Room, now_us: int) -> None:
        self._rows, self._conn, self._room, self._now_us = shared, conn, room, now_us
        self._environments: dict[str, int | None] = {}
        self._runs: dict[str, int] = {}

    def ids(self, named: Named) -> tuple[int, int, int] | None:
        """(problem, environment, run); None when it is new and there is no room for it today."""
        environment = cached(self._environments, named.environment, self._environment)
        if environment is None:
            return None
        if not self._rows.is_known(self._conn, named.problem) and not self._room.take("problem"):
            return None
        return self._rows.problem_id(self._conn, named.problem), environment, cached(self._runs, named.run, self._run)

    def _environment(self, environment: Environment) -> int | None:
        known = self._conn.execute("SELECT id FROM environment WHERE key = ?", (environment.key,)).fetchone()
        if known is None and not self._room.take("environment"):
            return None
        return self._rows.environment_id(self._conn, environment, self._now_us)

    def _run(self, name: str) -> int:
        name = plain(name, 200)
        known = self._conn.execute("SELECT id FROM run WHERE name = ?", (name,)).fetchone()
        if known is None and not self._room.take("run"):
            name = FURTHER_RUNS
        return run_id_of(self._conn, name)


class Room:
    """What members may still bring that is new to us today."""

    def __init__(self, conn: sqlite3.Connection, now_us: int) -> None:
        self._conn, self._day = conn, now_us // DAY_US
        found = conn.execute("SELECT what, number FROM ingest_new WHERE day = ?", (self._day,)).fetchall()
        self._used: dict[str, int] = dict(found)
        self._before = dict(self._used)

    def take(self, what: str) -> bool:
        """Whether there is room for one more."""
        used = self._used.get(what, 0)
        if used >= (NEW_A_DAY if what == "problem" else MORE_A_DAY[what]):
            return False
        self._used[what] = used + 1
        return True

    def keep(self) -> None:
        """Write down what was used."""
        if self._used != self._before:
            self._conn.execute("DELETE FROM ingest_new WHERE day != ?", (self._day,))
            rows = [(self._day, what, number) for what, number in self._used.items()]
            self._conn.executemany("INSERT OR REPLACE INTO ingest_new (day, what, number) VALUES (?, ?, ?)", rows)
