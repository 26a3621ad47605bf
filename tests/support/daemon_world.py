"""A daemon with its store, its devices and its workers, in a time that tests move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fakes import ENVIRONMENT, Clock, FakeMonitor, Life

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Environment
from gemmtuned.daemon.service.service import Daemon
from gemmtuned.db.store import Store


@dataclass
class World:
    """A daemon in faked time, with the real store."""

    settings: Settings
    clock: Clock
    store: Store
    monitor: FakeMonitor
    life: Life
    daemon: Daemon

    def see(self, *problems: Problem, environment: Environment = ENVIRONMENT, calls: int = 10) -> None:
        sightings = [Sighting(p, "miss", calls) for p in problems]
        self.store.sightings.add("serve", environment, sightings, now_s=self.clock.now_s)

    def run(self, seconds: float, *, until: Callable[[], bool] | None = None, step_s: float = 0.0) -> float:
        """Let the daemon live for so long; returns how long it took until `until`.

        step_s: longer turns while no worker is at work.
        """
        start_s = self.clock.now_s
        while self.clock.now_s < start_s + seconds:
            self.daemon.turn(self.clock.now_s)
            took_s = self.clock.now_s - start_s
            at_work = any(worker.is_at_work for worker in self.life.alive)
            self.clock.pass_s(self.daemon.pause_s if at_work else max(self.daemon.pause_s, step_s))
            if until is not None and until():
                return took_s
        return seconds

    def solved(self) -> set[Problem]:
        return {s.problem for s in self.store.solutions.published()[1]}

    def busy_from(self, start_s: float, end_s: float = float("inf")) -> None:
        self.monitor.others = lambda now_s: 1.0 if start_s <= now_s < end_s else 0.0

    def left(self) -> tuple[int, int, int, int]:
        left = self.store.leases.remaining(ENVIRONMENT, now_s=self.clock.now_s)
        return left.queued, left.leased, left.waiting, left.failed


def rows_of(world: World, sql: str) -> list[dict[str, object]]:
    import sqlite3

    conn = sqlite3.connect(world.settings.db)
    conn.row_factory = sqlite3.Row
    try:
        return [dict(row) for row in conn.execute(sql).fetchall()]
    finally:
        conn.close()


def problem(n: int = 64, m: int = 8) -> Problem:
    return Problem(m=m, n=n, k=64)
