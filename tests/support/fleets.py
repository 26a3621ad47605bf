"""Hosts of a fleet for tests: a home each, a daemon process each, and what became of them."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import planted_search
from fakes import ENVIRONMENT
from store_cases import new_file

from gemmtuned.configs.errors import TryLater
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Environment, Solution
from gemmtuned.daemon.seats.work_queue import WorkQueue
from gemmtuned.db.store import Store
from gemmtuned.fleet.host import Trust, host_name
from gemmtuned.fleet.objects import Objects
from gemmtuned.fleet.opening import open_objects
from gemmtuned.fleet.sync import Exchange, Synced
from gemmtuned.fleet.times import Mark, Pace

HERE = Path(__file__).parent


def problem(number: int) -> Problem:
    return Problem(m=8, n=1000 + number, k=64)


class Host:
    """One home, the store in it, and the daemon that was started for it last.

    Without a process: `turn` is one exchange of a daemon, `work` what its worker does then, by a clock `skew_s` wrong.
    """

    skew_s = 0.0

    def __init__(self, folder: Path, url: str, **variables: str) -> None:
        self.folder, self.url, self.variables = folder, url, variables
        self.settings = Settings.from_env({"GEMMTUNED_HOME": str(folder), "GEMMTUNED_IDLE_S": "0", **variables})
        self.store = Store(new_file(self.settings.db), locks=self.settings.locks)
        self.process: subprocess.Popen[str] | None = None
        self.log = folder / "log"
        self.mark = Mark(Pace())
        self.trust = Trust()
        self.queue = WorkQueue(self.store, folder.name)

    def see(self, *problems: Problem, environment: Environment = ENVIRONMENT, calls: int = 10) -> None:
        sightings = [Sighting(p, "miss", calls) for p in problems]
        self.store.sightings.add("serve", environment, sightings, now_s=time.time())

    def start(self, *options: str, url: str = "", prefix: Sequence[str] = ()) -> None:
        name = {"GEMMTUNED_SYNC_NAME": self.folder.name, **self.variables}
        command = [*prefix, sys.executable, str(HERE / "fleet_host.py"), str(self.folder), url or self.url, *options]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, text=True, env={**os.environ, **name}, start_new_session=True
            )

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        self.process = None

    def kill(self) -> None:
        """The whole host at once: the daemon, its worker and its exchange."""
        if self.process is not None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.process.wait()
        self.process = None

    def exchange(self, objects: Objects | None = None, **options: object) -> Exchange:
        """The exchange of this host in the test's own process."""
        return Exchange(
            store=self.store, objects=objects or open_objects(self.url), url=self.url, host=host_name(self.settings),
            trust=options.pop("trust", self.trust), **options,  # type: ignore[arg-type]
        )  # fmt: skip

    def now_s(self) -> float:
        return time.time() + self.skew_s

    def turn(self, objects: Objects | None = None, **options: object) -> Synced | None:
        """One exchange as a daemon's child does it, and what becomes of the mark; None when it failed."""
        self.store.fleet_sync.begin(self.url, live_until_s=self.mark.begin(self.now_s()))
        try:
            done = self.exchange(objects, claim=True, **options).run(now_s=self.now_s())
        except TryLater:
            self.store.fleet_sync.begin(self.url, live_until_s=self.mark.failed())
            return None
        self.store.fleet_sync.begin(self.url, live_until_s=self.mark.reached(self.now_s(), claims=done.claims))
        return done

    def work(
        self, most: int = 1 << 20, *, search: Callable[..., Solution | Sequence[Solution]] = planted_search.tune,
        environment: Environment = ENVIRONMENT,
    ) -> int:  # fmt: skip
        """Lease and solve as a daemon and its worker would; how many units were taken up."""
        for number in range(most):
            leased = self.queue.lease(environment, self.now_s())
            if leased is None:
                return number
            order = self.queue.order(leased)
            found = search(
                order.members, order.covers, order.target, leased.environment, mode=order.mode, skip=order.skip,
                emit=partial(self.queue.record, leased), options=order.options,
            )  # fmt: skip
            self.queue.install(leased, [found] if isinstance(found, Solution) else found, self.now_s())
        return most

    def rows(self, sql: str, *values: object) -> list[tuple[object, ...]]:
        conn = sqlite3.connect(self.settings.db, timeout=30)
        try:
            return conn.execute(sql, values).fetchall()
        finally:
            conn.close()

    def solved(self) -> dict[Problem, Solution]:
        return {s.problem: s for s in self.store.solutions.published()[1]}

    def searched(self) -> set[str]:
        """Problems for which this host ran a whole search: only such a one tries the candidate `slow`."""
        sql = "SELECT DISTINCT p.text FROM trial t JOIN problem p ON p.id = t.problem_id WHERE t.backend = 'slow'"
        return {str(text) for (text,) in self.rows(sql)}


def rounds(hosts: Iterable[Host], most: int = 30, step: int = 8) -> int:
    """Each host in turn exchanges and then solves a few; how many rounds until nobody has anything to do."""
    hosts, idle = list(hosts), 0
    for number in range(most):
        done = [(host.turn(), host.work(step)) for host in hosts]
        busy = any(solved or (synced and (synced.sent or synced.claimed or synced.fetched)) for synced, solved in done)
        idle = 0 if busy else idle + 1
        if idle == 2:  # in the first one a daemon asks for more
            return number
    raise AssertionError(f"not at rest after {most} rounds")


def searches(hosts: Sequence[Host]) -> Counter[str]:
    """How many hosts searched each problem."""
    return Counter(text for host in hosts for text in host.searched())


def until_covered(hosts: Sequence[Host], problems: Sequence[Problem], seconds: float) -> float:
    """Wait until every host has a verdict for every problem; how long that took."""
    began = time.monotonic()
    wanted = set(problems)
    while True:
        left = {host.folder.name: len(wanted - set(host.solved())) for host in hosts}
        took = time.monotonic() - began
        if not any(left.values()):
            return took
        assert took < seconds, f"after {took:.0f} s still without a verdict: {left}\n" + "\n".join(
            f"{host.folder.name}: {host.log.read_text()[-1500:]}" for host in hosts if host.log.exists()
        )
        time.sleep(0.1)


def note(scenario: str, *, began: float, **facts: object) -> None:
    """Add a line about a run to the file that FLEET_RESULTS names, for benchmarks/results."""
    if path := os.environ.get("FLEET_RESULTS"):
        line = {"scenario": scenario, **facts, "took_s": round(time.monotonic() - began, 1)}
        with Path(path).open("a") as file:
            file.write(json.dumps(line) + "\n")


@contextmanager
def running(hosts: Sequence[Host]) -> Iterator[None]:
    """For `with`: their daemons are ended and their stores closed after it."""
    try:
        yield
    finally:
        for host in hosts:
            host.stop()
            host.store.close()
