"""A database that is replaced or spoilt under a daemon while two programs count into it: all three go on."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from fakes import ENVIRONMENT, solution
from forked import ForkServer
from hooked import Home, wait_for

from gemmtuned.configs.manifest import read_manifest
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import Sighting
from gemmtuned.daemon.publishing.publish import publish
from gemmtuned.db.migrations import SCHEMA
from gemmtuned.db.store import Store, check

pytestmark = pytest.mark.soak

COUNTING = """
    import sys, time, torch
    from pathlib import Path
    x, ws = torch.ones(8, 64), [torch.ones(64, n) for n in (64, 65, 80)]
    while not Path(sys.argv[1]).exists():
        for w in ws:
            x @ w
        time.sleep(0.01)
    """
COPY_CALLS = 20  # of the copy that is put in place: two problems, ten calls each
SETTLED_S = 3.0  # until all who had the file before have looked


def copy_of(home: Path, version: int = SCHEMA) -> Path:
    copy = home.parent / "copy.db"
    shutil.copyfile(home.parent / "backup.db", copy)
    with closing(sqlite3.connect(copy)) as conn:
        conn.execute(f"PRAGMA user_version = {version}")
    return copy


def moved(home: Path) -> None:
    copy_of(home).replace(home / "tune.db")


def newer_moved(home: Path) -> None:
    copy_of(home, SCHEMA + 1).replace(home / "tune.db")


def newer_written_over(home: Path) -> None:
    shutil.copyfile(copy_of(home, SCHEMA + 1), home / "tune.db")


def written_over(home: Path) -> None:
    shutil.copyfile(copy_of(home), home / "tune.db")


def cut(home: Path) -> None:
    os.truncate(home / "tune.db", 5000)


def emptied(home: Path) -> None:
    os.truncate(home / "tune.db", 0)


def removed(home: Path) -> None:
    (home / "tune.db").unlink()


def upgraded(home: Path) -> None:
    """What a newer gemmtuned would find to be its own."""
    with (home / "tune.db").open("r+b") as file:
        file.seek(60)
        file.write(SCHEMA.to_bytes(4, "big"))


@pytest.mark.parametrize("spoil", [moved, newer_moved, newer_written_over, written_over, cut, emptied, removed])
def test_a_database_that_is_replaced_while_two_programs_count_into_it(
    tmp_path: Path, native_cache: Path, fork_server: ForkServer, spoil: Callable[[Path], None]
) -> None:
    home = Home(tmp_path / "home", native_cache, fork_server)
    store = Store(home.path / "tune.db", locks=home.path / "locks")
    for number, n in enumerate((64, 65, 66, 67)):
        problem = Problem(m=8, n=n, k=64, threads=1)
        store.sightings.add("serve", ENVIRONMENT, [Sighting(problem, "exact", 10)], now_s=time.time())
        store.solutions.install(None, [solution(problem)], environment=ENVIRONMENT, now_s=time.time())
        publish(store, home.path / "configs", home.path / "locks", now_s=time.time())
        if number == 1:
            store.backup(tmp_path / "backup.db")
    store.close()
    log, stop = tmp_path / "log", tmp_path / "stop"
    command = [sys.executable, str(Path(__file__).parents[1] / "support/daemon_process.py"), str(home.path)]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as daemon:
        programs = [home.start(COUNTING, str(stop), GEMMTUNED_RUN=f"job-{i}") for i in range(2)]
        try:
            wait_for(lambda: "started" in log.read_text())
            wait_for(lambda: {"job-0", "job-1"} <= runs(home.path).keys())
            spoil(home.path)
            if spoil in (newer_moved, newer_written_over):
                wait_for(lambda: "Upgrade gemmtuned here" in log.read_text(), limit_s=30)
                upgraded(home.path)
            time.sleep(SETTLED_S)
            wait_for(lambda: check(home.path / "tune.db") == [], limit_s=30)
            before = runs(home.path)
            wait_for(lambda: all(runs(home.path).get(job, 0) > before.get(job, 0) for job in ("job-0", "job-1")))
            assert daemon.poll() is None
        finally:
            stop.touch()
            ended = [(program.communicate(timeout=60), program.wait()) for program in programs]
            daemon.terminate()
            daemon.wait(20)
    for (_, err), code in ended:
        assert code == 0 and "Traceback" not in err, err
    manifest = read_manifest(home.path / "configs")
    assert manifest is not None and sum(file.rows for file in manifest.files) == 4, log.read_text()
    assert check(home.path / "tune.db") == []
    if spoil in (moved, newer_moved):
        assert runs(home.path)["serve"] == COPY_CALLS
        assert list(home.path.glob("*.corrupt-*")) == []


def runs(home: Path) -> dict[str, int]:
    try:
        with closing(sqlite3.connect(f"file:{home}/tune.db?mode=ro", uri=True)) as conn:
            sql = "SELECT r.name, sum(calls) FROM every_sighting s JOIN run r ON r.id = s.run_id GROUP BY 1"
            return dict(conn.execute(sql).fetchall())
    except sqlite3.Error:
        return {}
