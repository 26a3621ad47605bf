"""Many writers at once, and writers that are killed: sums stay exact and nothing committed is lost."""

import random
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_cases import open_store
from store_writer import calls

from gemmtuned.db import migrations

WRITER = str(Path(__file__).parents[1].joinpath("support", "store_writer.py"))


def start(folder: Path, run: int, flushes: int, shapes: int) -> subprocess.Popen[str]:
    command = [sys.executable, WRITER, str(folder), str(run), str(flushes), str(shapes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def flushed(folder: Path, run: int, shapes: int) -> int:
    """How many flushes of this run are in the database, each whole."""
    with sqlite3.connect(folder / "tune.db") as conn:
        sums = conn.execute(
            "SELECT p.id, sum(s.calls) FROM sighting s JOIN run r ON r.id = s.run_id "
            "JOIN problem p ON p.id = s.problem_id "
            "WHERE r.name = ? GROUP BY p.id ORDER BY p.id",
            (str(run),),
        ).fetchall()
    conn.close()
    if not sums:
        return 0
    assert len(sums) == shapes
    count, total = 0, 0
    while total < sums[0][1]:
        total += calls(run, count, 0)
        count += 1
    assert [s for _, s in sums] == [sum(calls(run, f, i) for f in range(count)) for i in range(shapes)]
    return count


@pytest.mark.long
def test_eight_processes_over_500_shapes_give_exactly_the_sums(tmp_path: Path) -> None:
    flushes, shapes = 25, 500
    writers = [start(tmp_path, run, flushes, shapes) for run in range(8)]
    for writer in writers:
        writer.communicate(timeout=100)
        assert writer.returncode == 0

    assert [flushed(tmp_path, run, shapes) for run in range(8)] == [flushes] * 8
    store = open_store(tmp_path)
    assert store.check() == []
    store.close()


def storm(folder: Path, kills: int, seed: int) -> None:
    dice = random.Random(seed)
    shapes, writers = 20, 4
    running: dict[int, subprocess.Popen[str]] = {}
    run = 0
    acknowledged: dict[int, int] = {}
    try:
        for kill in range(kills):
            while len(running) < writers:
                running[run] = start(folder, run, 1_000_000, shapes)
                run += 1
            victim = min(running)  # the oldest
            process = running.pop(victim)
            if dice.random() < 0.7:  # the others are hit while they start, migrate, or write for the first time
                select.select([process.stdout], [], [], 20)
            time.sleep(dice.uniform(0.0, 0.2))
            process.send_signal(signal.SIGKILL)
            told = process.communicate(timeout=30)[0].split("\n")[:-1]
            acknowledged[victim] = int(told[-1]) if told else 0
            in_store = flushed(folder, victim, shapes) if (folder / "tune.db").exists() and told else 0
            assert in_store - acknowledged[victim] in (0, 1), f"seed={seed} kill={kill} run={victim}"
    finally:
        for process in running.values():
            process.kill()
            process.communicate(timeout=30)
    assert sum(count > 0 for count in acknowledged.values()) > kills // 3, "the storm hit too few that were writing"
    store = open_store(folder)
    assert store.check() == []
    for victim, count in acknowledged.items():
        assert flushed(folder, victim, shapes) - count in (0, 1)
    store.close()


@pytest.mark.long
def test_writers_killed_ten_times_lose_nothing_they_were_told_is_stored(tmp_path: Path) -> None:
    storm(tmp_path, kills=10, seed=1)


@pytest.mark.soak
def test_writers_killed_200_times_lose_nothing_they_were_told_is_stored(tmp_path: Path) -> None:
    storm(tmp_path, kills=200, seed=2)


@pytest.fixture
def four_starters(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    code = (
        "import sys, time; from pathlib import Path; from gemmtuned.db.store import Store; f = Path(sys.argv[1])\n"
        "while time.time() < float(sys.argv[2]): pass\n"
        "s = Store(f / 'tune.db', locks=f / 'locks'); print(s.solutions.generation()); s.close()"
    )
    at = str(time.time() + 1.0)
    command = [sys.executable, "-c", code, str(tmp_path), at]
    yield [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]


@pytest.mark.long
def test_four_racing_starters_make_the_schema_once(tmp_path: Path, four_starters: list[subprocess.Popen[str]]) -> None:
    said = [starter.communicate(timeout=60) for starter in four_starters]

    assert said == [("0\n", "")] * 4
    conn = sqlite3.connect(tmp_path / "tune.db")
    steps = [name for (name,) in conn.execute("SELECT name FROM _sqlite_migrations ORDER BY id")]
    conn.close()
    assert steps == [step.stem for step in migrations.STEPS]
