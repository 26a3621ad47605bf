"""The number of run labels is bounded, and every sum stays as it was."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_cases import DAY, HOUR, NEW, OLD, open_store, problem, saw

from gemmtuned._testing import faults
from gemmtuned.configs.errors import StoreError
from gemmtuned.db import labels
from gemmtuned.db.labels import EARLIER
from gemmtuned.db.store import Store

T = 1_800_000_000.0
JOBS = 60


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """120 days: a server all along, a job every other day with a label of its own, the same few shapes in each."""
    monkeypatch.setattr(labels, "KEEP_RUNS", 25)
    monkeypatch.setattr(labels, "SLACK", 5)
    monkeypatch.setattr(labels, "PIECE", 7)
    store = open_store(tmp_path)
    dice = random.Random(5)
    for job in range(JOBS):
        now_s = T - 120 * DAY + 2 * job * DAY
        for outcome in ("miss", "exact"):
            batch = [saw(problem(m), dice.randrange(1, 9), outcome) for m in (1, 2, 3, 4)]
            store.sightings.add(f"job-{job}", NEW if job % 2 else OLD, batch, now_s=now_s)
            store.sightings.add("serve", NEW, batch, now_s=now_s + HOUR)
        store.sightings.add_compiled(f"job-{job}", NEW, [(problem(job + 1), "fused")], now_s=now_s)
    yield store
    store.close()


def ask(store: Store, sql: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(store.path)) as conn:
        return conn.execute(sql).fetchall()


SUMS = """
SELECT problem_id, environment_id, outcome, graph, sum(calls), max(last_seen_us) FROM every_sighting
GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
"""


def test_old_labels_go_and_no_sum_changes(store: Store) -> None:
    before = ask(store, SUMS)
    serve = ask(store, "SELECT sum(calls) FROM every_sighting JOIN run r ON r.id = run_id WHERE r.name = 'serve'")
    store.rollup.roll_up(now_s=T)
    names = {name for (name,) in ask(store, "SELECT name FROM run")}
    assert len(names) == 25 and {"serve", EARLIER, f"job-{JOBS - 1}"} <= names and "job-0" not in names
    assert names - {"serve", EARLIER} == {f"job-{job}" for job in range(JOBS - 23, JOBS)}, "the last ones stay"
    assert ask(store, SUMS) == before
    assert serve == ask(
        store, "SELECT sum(calls) FROM every_sighting JOIN run r ON r.id = run_id WHERE r.name = 'serve'"
    )
    assert len(ask(store, "SELECT DISTINCT problem_id FROM compiled_gemm")) == JOBS
    assert store.check() == []
    store.rollup.roll_up(now_s=T + 2 * DAY)
    assert {name for (name,) in ask(store, "SELECT name FROM run")} == names


@pytest.mark.parametrize("every", [2, 3, 5])
def test_transactions_that_fail_skip_no_row_and_no_label(store: Store, every: int) -> None:
    before, failed = ask(store, SUMS), 0
    for _ in range(2000):
        try:
            with faults.armed(f"store.commit={every}:ENOSPC"):
                if store.rollup.roll_up(now_s=T):
                    break
        except StoreError:
            failed += 1
    assert failed > 10
    assert len(ask(store, "SELECT name FROM run")) == 25, "each label was dropped in this pass, not in that of tomorrow"
    assert ask(store, SUMS) == before


def test_what_was_seen_in_the_last_four_weeks_stays_however_many(store: Store) -> None:
    for job in range(50):
        store.sightings.add(f"new-{job}", NEW, [saw(problem())], now_s=T - 20 * DAY)
    store.rollup.roll_up(now_s=T)
    names = {name for (name,) in ask(store, "SELECT name FROM run")}
    assert {f"new-{job}" for job in range(50)} <= names and "job-10" not in names


def test_a_label_that_comes_back_in_the_midst_of_it_stays(store: Store) -> None:
    before = sum(row[4] for row in ask(store, SUMS))
    steps = 0
    while store.rollup.roll_up(now_s=T, for_s=0.0) is False:
        steps += 1
        store.sightings.add("job-0", OLD, [saw(problem(), 1)], now_s=T)
    assert steps > 100
    assert sum(row[4] for row in ask(store, SUMS)) == before + steps
    assert ("job-0",) in ask(store, "SELECT name FROM run")
    assert store.check() == []


def test_another_file_in_its_place_in_the_midst_of_it_is_looked_at_anew(store: Store, tmp_path: Path) -> None:
    store.backup(tmp_path / "backup.db")
    for _ in range(60):
        store.rollup.roll_up(now_s=T, for_s=0.0)
    with contextlib.closing(sqlite3.connect(tmp_path / "backup.db")) as conn:  # numbers mean other labels there
        conn.execute("UPDATE run SET name = 'x' || name")
        conn.commit()
    before = sum(row[4] for row in ask(store, SUMS))
    for end in ("", "-wal", "-shm"):
        (tmp_path / f"tune.db{end}").unlink(missing_ok=True)
    (tmp_path / "backup.db").rename(tmp_path / "tune.db")
    store.rollup.roll_up(now_s=T)
    names = {name for (name,) in ask(store, "SELECT name FROM run")}
    assert "xserve" in names and f"xjob-{JOBS - 1}" in names and "xjob-0" not in names
    assert sum(row[4] for row in ask(store, SUMS)) == before
    assert store.check() == []


def test_few_labels_are_left_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for job in range(100):
        store.sightings.add(f"job-{job}", NEW, [saw(problem())], now_s=T - 400 * DAY)
    store.rollup.roll_up(now_s=T)
    assert len(ask(store, "SELECT name FROM run")) == 100
    store.close()
