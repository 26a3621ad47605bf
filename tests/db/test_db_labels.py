"""The number of run labels is bounded, and every sum stays as it was."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_cases import DAY, HOUR, NEW, OLD, new_store, open_store, problem, saw

from gemmtuned._testing import faults
from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.sighting import Sighting
from gemmtuned.db import labels
from gemmtuned.db.labels import EARLIER
from gemmtuned.db.of_runs import labels as labels_of
from gemmtuned.db.row_ids import us
from gemmtuned.db.store import Store

T = 1_800_000_000.0
JOBS = 60


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """120 days: a server all along, a job every other day with a label of its own, the same few shapes in each."""
    monkeypatch.setattr(labels, "KEEP_RUNS", 25)
    monkeypatch.setattr(labels, "SLACK", 5)
    monkeypatch.setattr(labels, "PIECE", 7)
    store = new_store(tmp_path)
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


def names_of(store: Store) -> set[str]:
    return {name for (name,) in store._db.read(lambda conn: conn.execute("SELECT name FROM run").fetchall())}


@pytest.mark.parametrize("left", [60, 40, 30])
def test_a_pass_that_was_killed_while_labels_went_is_ended_by_the_next(store: Store, left: int) -> None:
    before = ask(store, SUMS)
    names: set[str] = set()
    while len(names) > left or not any(name.startswith("(dropped ") for name in names):
        assert store.rollup.roll_up(now_s=T, for_s=0.0) is False
        names = names_of(store)
    assert not any(name.startswith("(dropped ") for name in labels_of(store.path))
    store.sightings.add("job-0", OLD, [saw(problem(), 3)], now_s=T)
    other = Store(store.path, locks=store.path.with_name("locks"))
    other.rollup.roll_up(now_s=T)
    other.close()
    # job-0 has come back: it takes another's place, unless all that go had been chosen before
    last = {f"job-{job}" for job in range(JOBS - (23 if left == 30 else 22), JOBS)}
    assert names_of(store) == last | {"serve", EARLIER, "job-0"}
    assert sum(row[4] for row in ask(store, SUMS)) == sum(row[4] for row in before) + 3
    assert ask(store, "PRAGMA foreign_key_check") == [] and store.check() == []


def test_calls_of_warm_ups_keep_their_label_if_it_goes_while_they_come_in(store: Store) -> None:
    """Those of the last four weeks do in any case; here they come in under a label that is being dropped."""
    warm = Sighting(problem(), "miss", 5, phase="warmup")
    while not any(name.startswith("(dropped ") for name in names_of(store)):
        store.sightings.add("job-0", OLD, [warm], now_s=T)
        assert store.rollup.roll_up(now_s=T, for_s=0.0) is False
    calls = "SELECT run, sum(calls) FROM phases GROUP BY 1"
    ((was, before),) = ask(store, calls)
    assert was == "job-0"
    store.rollup.roll_up(now_s=T)
    assert ask(store, calls) == [("job-0", before)]


def test_a_label_that_only_warms_up_stays(store: Store) -> None:
    store.sightings.add("warm", NEW, [Sighting(problem(), "miss", 5, phase="warmup")], now_s=T - 20 * DAY)
    store.rollup.roll_up(now_s=T)
    assert ask(store, "SELECT run, calls FROM phases") == [("warm", 5)] and "job-0" not in names_of(store)


def steps_of_each_write(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many instructions SQLite's machine runs in each transaction of the roll-up from here on, in hundreds."""
    found: list[int] = []
    real = store.rollup._rows.write

    def write(work: Any, **more: Any) -> Any:
        def once(conn: sqlite3.Connection) -> Any:
            found.append(0)

            def count() -> int:
                found[-1] += 1
                return 0

            conn.set_progress_handler(count, 100)
            try:
                return work(conn)
            finally:
                conn.set_progress_handler(None, 0)

        return real(once, **more)

    monkeypatch.setattr(store.rollup._rows, "write", write)
    return found


def test_no_transaction_looks_at_all_rows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs wait for each, and SQLite's own look for rows that name a label goes through all that there are."""
    with contextlib.closing(sqlite3.connect(store.path)) as conn:
        (newest,) = conn.execute("SELECT max(hour) FROM sighting").fetchone()
        columns = (
            "hour, problem_id, environment_id, run_id, outcome, graph, calls, sampled_calls, sampled_us, last_seen_us"
        )
        for outcome in ("miss", "exact", "padded"):  # of a label that stays, in an hour of which others go
            conn.execute(
                f"INSERT OR IGNORE INTO sighting ({columns}) "
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 4000) "
                "SELECT h.hour, 1000 + i, 1, (SELECT id FROM run WHERE name = 'serve'), ?, 0, 1, 0, 0.0, 0 "
                "FROM n, (SELECT min(hour) AS hour FROM sighting UNION SELECT ?) h", (outcome, newest),
            )  # fmt: skip
        conn.execute(
            "INSERT OR IGNORE INTO compiled_gemm SELECT 1000 + problem_id, 1, run_id, outcome, 0, 0 FROM sighting"
        )
        conn.commit()
    monkeypatch.setattr(labels, "SCAN", 500, raising=False)
    monkeypatch.setattr(labels, "SLACK", 0)
    taken = steps_of_each_write(store, monkeypatch)
    while store.rollup._labels.prune(us(T)):
        pass
    assert len(names_of(store)) == 25 and len(taken) > 30
    assert max(taken) < 100, "no more than for some rows, where there are 24,000"


def test_sessions_are_looked_through_once_however_many_labels_go(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    real = store.rollup._db.read

    def read(work: Any) -> Any:
        def once(conn: sqlite3.Connection) -> Any:
            nonlocal looks
            statements: list[str] = []
            conn.set_trace_callback(statements.append)
            try:
                return work(conn)
            finally:
                conn.set_trace_callback(None)
                looks += any("FROM session" in statement for statement in statements)

        return real(once)

    monkeypatch.setattr(store.rollup._db, "read", read)
    steps = 0
    while store.rollup.roll_up(now_s=T, for_s=0.0) is False:
        steps += 1
    assert steps > 100 and looks == 1
    store.rollup.roll_up(now_s=T)
    assert looks == 2, "and again in the next"


def test_few_labels_are_left_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for job in range(100):
        store.sightings.add(f"job-{job}", NEW, [saw(problem())], now_s=T - 400 * DAY)
    store.rollup.roll_up(now_s=T)
    assert len(ask(store, "SELECT name FROM run")) == 100
    store.close()
