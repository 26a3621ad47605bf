"""Killed, or refused by the disk, at a random point of any work on the store: the next start has lost nothing.

Every solution that the manifest had is in the manifest, or was withdrawn by name; every call of a flush that returned
is in the database, or named as lost with its number.  `make test` runs 14 cases on a small store, `make soak` 16 more
and 60 on one of 7,000 solutions.  A case is known by its seed, in the name of the test: pytest -k 'storm and 17'.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import ENVIRONMENT, Clock, FakeMonitor, Life, solution
from store_cases import look_over

from gemmtuned._testing import faults
from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.manifest import read_manifest, read_table
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Solution
from gemmtuned.daemon.publishing.publish import publish
from gemmtuned.daemon.service.service import Daemon
from gemmtuned.db.store import Store

OLD_HOME = Path(__file__).parents[1] / "data/home-0.1.0"
DAY_S = 86_400.0
T = 1_800_000_000.0
CALLS = 7  # of each shape in the template
THEIRS = 3  # of each shape in the ingest file


def problem(i: int) -> Problem:
    return Problem(m=1 + i % 64, n=512 + 64 * (i // 64), k=256, threads=2)


def template(folder: Path, count: int) -> Path:
    """A home with so many solutions in use, counts of 20 days, and an ingest file of a tenth as many shapes."""
    home = folder / "home"
    store = Store(home / "tune.db", locks=home / "locks")
    store.solutions.install(
        None, [solution(problem(i)) for i in range(count)], environment=ENVIRONMENT, now_s=T - 30 * DAY_S
    )
    for day in (1, 20):
        seen = [Sighting(problem(i), "exact", CALLS) for i in range(count)]
        store.sightings.add("serve", ENVIRONMENT, seen, now_s=T - day * DAY_S)
    publish(store, home / "configs", home / "locks", now_s=T - 30 * DAY_S)
    store.close()
    theirs = Store(home / "ingest" / "ingest.db", locks=home / "ingest")
    seen = [Sighting(problem(i), "miss", THEIRS) for i in range(count // 10)]
    theirs.sightings.add("theirs", ENVIRONMENT, seen, now_s=T - 60)
    theirs.close()
    return home


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return template(tmp_path_factory.mktemp("small"), 100)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return template(tmp_path_factory.mktemp("large"), 7000)


class Case:
    """One fault at one point of one kind of work, in a copy of the template. What the work has done it notes first."""

    def __init__(self, source: Path, folder: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        self.phase = self.dice.choice(tuple(WORK))
        self.fault = self.dice.choice(("kill", "ENOSPC", "EIO", "time"))
        self.home = folder / "home"
        shutil.copytree(source, self.home)
        if self.phase == "migration":
            self._as_of_0_1_0()
        self.settings = Settings.from_env({"GEMMTUNED_HOME": str(self.home)})
        self.before = in_use(self.home)
        self.notes = self.home / "notes"
        self.notes.touch()

    def note(self, what: str, value: object) -> None:
        with self.notes.open("a") as file:
            file.write(json.dumps([what, value]) + "\n")

    def noted(self, what: str) -> list[object]:
        lines = [json.loads(line) for line in self.notes.read_text().splitlines()]
        return [value for kind, value in lines if kind == what]

    def strike(self) -> str:
        """Do the work in a process of its own, and strike it. Returns what was done, for the message of a failure."""
        rule = f"*={self.dice.randrange(1, 60)}:{self.fault}" if self.fault != "time" else ""
        wait_s = self.dice.random() * 0.3
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                with faults.armed(rule):
                    self.work()
                status = 0
            finally:
                os._exit(status)
        if self.fault == "time":
            time.sleep(wait_s)
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return f"phase={self.phase} fault={rule or f'kill after {wait_s:.3f} s'}"

    def work(self) -> None:
        store = Store(self.settings.db, locks=self.settings.locks)
        for step in (self.flush, WORK[self.phase], self.flush):
            with contextlib.suppress(GemmtunedError):  # the disk refused: the next step may work
                step(self, store) if step is WORK[self.phase] else step(store)
        store.close()

    def flush(self, store: Store) -> None:
        """A program's: 100 calls, noted before as tried and after as done."""
        self.note("tried", 100)
        store.sightings.add("flushed", ENVIRONMENT, [Sighting(problem(5), "exact", 100)], now_s=T)
        self.note("done", 100)

    def heal(self) -> None:
        """The next start: turns of a daemon on a busy device until it has looked the database over."""
        store = Store(self.settings.db, locks=self.settings.locks)
        clock = Clock(T + 600)
        daemon = Daemon(self.settings, store, [FakeMonitor(lambda now_s: 1.0)], Life(clock).make, now_s=clock.now_s)
        daemon.resume(clock.now_s)
        end = time.monotonic() + 600  # of 7,000 solutions on a machine that others load, too
        for turn in itertools.count():
            daemon.turn(clock.pass_s(3.0))
            looked_over = turn >= 4 and daemon.upkeep.caretaker._examination is None
            if (
                looked_over
                and not daemon.upkeep.publishing.runs
                and daemon.upkeep.generation == store.solutions.generation()
            ):
                break  # with thousands of solutions a thread publishes, which a daemon that stops does not wait for
            assert time.monotonic() < end
            time.sleep(0.01)
        daemon.turn(clock.pass_s(3.0))
        daemon.stop(clock.pass_s(3.0))
        store.close()

    def check(self, said: str) -> None:
        missing = self.before - in_use(self.home) - {str(noted) for noted in self.noted("withdrawn")}
        assert not missing, f"{said}: {len(missing)} of {len(self.before)} solutions are gone"
        store = Store(self.settings.db, locks=self.settings.locks)
        try:
            assert store.check() == [], said
            assert {name(s) for s in store.solutions.published()[1]} == in_use(self.home), said
        finally:
            store.close()
        with contextlib.closing(sqlite3.connect(self.settings.db)) as conn:
            calls = int(conn.execute("SELECT total(calls) FROM demand").fetchone()[0])
        reports = [json.loads(path.read_text()) for path in self.home.glob("tune.db.corrupt-*.json")]
        lost = sum(report["lost_calls"] for report in reports)
        done, tried = (sum(map(int, self.noted(what))) for what in ("done", "tried"))  # type: ignore[call-overload]
        assert self.counted + done <= calls + lost <= self.counted + tried, f"{said}: {calls} calls, {lost} lost"
        assert list(self.home.glob(".salvage-*")) == [], said

    @property
    def counted(self) -> int:
        """Calls that were in the database, or in the ingest file, before."""
        return int(self.noted("counted")[0])  # type: ignore[call-overload]

    def count(self) -> None:
        total = 0
        for path in (self.settings.db, self.settings.ingest):
            with contextlib.closing(sqlite3.connect(path)) as conn:
                total += int(conn.execute("SELECT total(calls) FROM demand").fetchone()[0])
        self.note("counted", total)

    def smash(self) -> None:
        """A page in the middle of the file is garbage, as of a bad disk."""
        store = Store(self.settings.db, locks=self.settings.locks)
        store.checkpoint()
        store.close()
        pages = self.settings.db.stat().st_size // 4096
        with self.settings.db.open("r+b") as file:
            file.seek(self.dice.randrange(1, pages) * 4096)
            file.write(self.dice.randbytes(4096))

    def _as_of_0_1_0(self) -> None:
        """The home of that version instead, whose schema the next opening brings up to date."""
        for path in self.home.glob("tune.db*"):
            path.unlink()
        shutil.rmtree(self.home / "configs")
        shutil.copytree(OLD_HOME / "configs", self.home / "configs")
        with contextlib.closing(sqlite3.connect(self.home / "tune.db")) as conn:
            conn.executescript((OLD_HOME / "tune.sql").read_text())


def name(s: Solution) -> str:
    return f"{s.problem} {s.device} {s.covers} {s.mode} {s.backend} {s.config} {s.stamp}"


def in_use(home: Path) -> set[str]:
    manifest = read_manifest(home / "configs")
    assert manifest is not None
    return {name(s) for file in manifest.files for s in read_table(home / "configs", file)[0]}


def start(case: Case, store: Store) -> None:
    clock = Clock(T)
    daemon = Daemon(case.settings, store, [FakeMonitor(lambda now_s: 1.0)], Life(clock).make, now_s=T)
    daemon.resume(T)
    for _ in range(5):
        daemon.turn(clock.pass_s(3.0))
    daemon.stop(clock.pass_s(1.0))


def salvage(case: Case, store: Store) -> None:
    look_over(store)


def migrate(case: Case, store: Store) -> None:
    store.solutions.generation()


def roll_up(case: Case, store: Store) -> None:
    store.rollup.roll_up(now_s=T + 40 * DAY_S)


def publish_some(case: Case, store: Store) -> None:
    for i in range(4):
        new = replace(solution(problem(20_000 + i)), us=40.0)
        store.solutions.install(None, [new], environment=ENVIRONMENT, now_s=T)
        publish(store, case.settings.config_dir, case.settings.locks, now_s=T)
        case.note("withdrawn", name(solution(problem(i))))
        store.solutions.withdraw([problem(i)], reason="storm", now_s=T)
        publish(store, case.settings.config_dir, case.settings.locks, now_s=T)


def ingest(case: Case, store: Store) -> None:
    store.ingest.take_from(case.settings.ingest, now_s=T)


WORK: dict[str, Callable[[Case, Store], None]] = {
    "start": start, "salvage": salvage, "migration": migrate, "roll_up": roll_up, "publish": publish_some,
    "ingest": ingest,
}  # fmt: skip


def storm(source: Path, folder: Path, seed: int) -> None:
    case = Case(source, folder, seed)
    case.count()
    if case.phase == "salvage":
        case.smash()
    said = f"seed={seed} {case.strike()}"
    print(said, file=sys.stderr)
    case.heal()
    case.check(said)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.part(14)
@pytest.mark.parametrize("seed", range(30))
def test_storm(small: Path, tmp_path: Path, seed: int) -> None:
    storm(small, tmp_path, seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_long_storm(large: Path, tmp_path: Path) -> None:
    first = random.SystemRandom().randrange(1 << 30)
    for number in range(60):
        storm(large, tmp_path / f"{number}", first + number)
        shutil.rmtree(tmp_path / f"{number}")
