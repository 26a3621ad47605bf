"""Each state that a database can be found in, under a running daemon, a stopped one and `tune`: the advice is taken.

Programs keep their table in all of them; the message says what to do, and doing that ends well.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from fakes import ENVIRONMENT, FakeMonitor, solution
from store_cases import new_file

from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.manifest import read_manifest, read_table
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.sighting import Sighting
from gemmtuned.daemon.publishing.publish import publish
from gemmtuned.daemon.seats.request import Request
from gemmtuned.daemon.seats.worker import Worker
from gemmtuned.daemon.service.main import tune_now
from gemmtuned.db import migrations
from gemmtuned.db.store import Store, check
from gemmtuned.reports import checks_store

SIZES = (64, 65, 66, 67)
SEARCH = f"{Path(__file__).parents[1] / 'support/planted_search.py'}:tune"


def remove(home: Path) -> None:
    for path in home.glob("tune.db*"):
        path.unlink()


def older(home: Path) -> None:
    remove(home)
    shutil.copyfile(home.parent / "backup.db", home / "tune.db")


def written_over(home: Path) -> None:
    """By `cp backup.db tune.db`: the file keeps its number, and a daemon has it open."""
    shutil.copyfile(home.parent / "backup.db", home / "tune.db")


def truncated(home: Path) -> None:
    with sqlite3.connect(home / "tune.db") as conn:
        conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    os.truncate(home / "tune.db", (home / "tune.db").stat().st_size // 8192 * 4096)


def emptied(home: Path) -> None:
    remove(home)
    (home / "tune.db").touch()


def garbage(home: Path) -> None:
    remove(home)
    (home / "tune.db").write_bytes(os.urandom(50_000))


def foreign(home: Path) -> None:
    remove(home)
    conn = sqlite3.connect(home / "tune.db")
    conn.execute("CREATE TABLE photos (name)")
    conn.close()


def newer(home: Path) -> None:
    store = Store(new_file(home / "tune.db"), locks=home / "locks")
    store.checkpoint()
    store.close()
    conn = sqlite3.connect(home / "tune.db")
    conn.execute(f"PRAGMA user_version = {migrations.SCHEMA + 1}")
    conn.close()


def text(home: Path) -> None:
    remove(home)
    (home / "tune.db").write_text("import torch\n" * 50)


def move_away(home: Path) -> None:
    for path in list(home.glob("tune.db*")):
        path.rename(home / f"moved-{path.name}")


def upgrade(home: Path) -> None:
    """As the newer gemmtuned would find it: its own."""
    conn = sqlite3.connect(home / "tune.db")
    conn.execute(f"PRAGMA user_version = {migrations.SCHEMA}")
    conn.close()


@dataclass(frozen=True)
class State:
    """said: what doctor and messages say of it, None where all mends by itself. advice: that, done."""

    make: Callable[[Path], None]
    said: str = ""
    advice: Callable[[Path], None] | None = None


STATES = {
    "deleted": State(remove),
    "older": State(older),
    "written over": State(written_over),
    "truncated": State(truncated),
    "emptied": State(emptied),
    "garbage": State(garbage),
    "foreign": State(foreign, "Move it away, or set GEMMTUNED_DB", move_away),
    "text": State(text, "Set GEMMTUNED_DB to another file", move_away),
    "newer": State(newer, "Upgrade gemmtuned here", upgrade),
}


def states(*here: str) -> pytest.MarkDecorator:
    """All of them, those that are not named here in `make long`."""
    params = [
        pytest.param(state, id=name, marks=() if name in here else pytest.mark.long) for name, state in STATES.items()
    ]
    return pytest.mark.parametrize("state", params)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with four solutions in use, and a backup from when there were two."""
    home = tmp_path / "home"
    store = Store(home / "tune.db", locks=home / "locks")
    for n in SIZES:
        store.sightings.add("serve", ENVIRONMENT, [Sighting(problem(n), "exact", 10)], now_s=time.time())
        store.solutions.install(None, [solution(problem(n))], environment=ENVIRONMENT, now_s=time.time())
        publish(store, home / "configs", home / "locks", now_s=time.time())
        if n == SIZES[1]:
            store.backup(tmp_path / "backup.db")
    store.close()
    return home


@pytest.fixture
def daemons(home: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts daemons with the planted search; their log goes to a file, so that no pipe fills."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(__file__).parents[1] / "support/daemon_process.py"), str(home)]
        with (home / "log").open("a") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def problem(n: int) -> Problem:
    return Problem(m=8, n=n, k=64, threads=1)


def in_use(home: Path) -> list[int]:
    manifest = read_manifest(home / "configs")
    assert manifest is not None
    return sorted(s.problem.n for file in manifest.files for s in read_table(home / "configs", file)[0])


def in_store(home: Path) -> list[int]:
    try:
        store = Store(home / "tune.db", locks=home / "locks", create=False)
    except StoreError:
        return []
    try:
        return sorted(s.problem.n for s in store.solutions.published()[1])
    except StoreError:
        return []
    finally:
        store.close()


def log(home: Path) -> str:
    return (home / "log").read_text()


def wait_for(what: Callable[[], bool], home: Path, seconds: float = 40.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert in_use(home) == list(SIZES), "programs lost their table"
        assert time.monotonic() < end, log(home)
        time.sleep(0.1)


def is_well(home: Path) -> bool:
    return in_use(home) == in_store(home) == list(SIZES) and check(home / "tune.db") == []


def doctor(home: Path) -> str:
    settings = Settings.from_env({"GEMMTUNED_HOME": str(home)})
    return " ".join(f"{c.result} {c.found} {c.fix}" for c in checks_store.checks(settings))


@states("deleted", "written over", "truncated", "foreign", "newer")
def test_under_a_running_daemon(home: Path, state: State, daemons: Callable[[], subprocess.Popen[str]]) -> None:
    daemon = daemons()
    wait_for(lambda: (home / "log").exists() and "started" in log(home), home)
    state.make(home)
    if state.advice is not None:
        wait_for(lambda: state.said in log(home), home)
        assert state.said in doctor(home) and "FAIL" in doctor(home)
        state.advice(home)
    wait_for(lambda: is_well(home), home)
    assert daemon.poll() is None
    daemon.terminate()
    daemon.wait(20)
    assert in_use(home) == list(SIZES)


@states("deleted", "truncated", "garbage", "newer")
def test_before_a_daemon_is_started(home: Path, state: State, daemons: Callable[[], subprocess.Popen[str]]) -> None:
    state.make(home)
    if state.advice is not None:
        assert state.said in doctor(home)
        failed = daemons()
        assert failed.wait(30) == 1 and state.said in log(home)
        assert in_use(home) == list(SIZES)
        state.advice(home)
    daemons()
    wait_for(lambda: is_well(home), home)


@states(*STATES)
def test_tune(home: Path, state: State) -> None:
    settings = Settings.from_env({"GEMMTUNED_HOME": str(home), "GEMMTUNED_IDLE_S": "0"})
    monitor = FakeMonitor()
    monitor.read(time.time())
    make = partial(Worker, nice=0, search=SEARCH)
    state.make(home)
    if state.advice is not None:
        with pytest.raises(StoreError, match=state.said):
            tune_now(Request(problems=[problem(70)]), settings, monitors=[monitor], make_worker=make)
        assert in_use(home) == list(SIZES)
        state.advice(home)

    done = tune_now(Request(problems=[problem(70)]), settings, monitors=[monitor], make_worker=make)

    assert list(done.solutions) == [problem(70)], done.failed
    assert in_use(home) == in_store(home) == [*SIZES, 70]
