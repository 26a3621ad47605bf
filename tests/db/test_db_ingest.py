"""Counts of other users' programs: taken exactly once, checked, and never more than counts."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from other_users import Two, as_user
from store_cases import DAY, HOUR, NEW, found, problem, saw

from gemmtuned.configs.engine_races import Peer, text_of
from gemmtuned.configs.errors import SettingError, StoreError
from gemmtuned.configs.manifest import read_manifest, write_tables
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings, trusted_uid
from gemmtuned.configs.sighting import Session
from gemmtuned.db import ingest, members_limits, queries
from gemmtuned.db.store import Store
from gemmtuned.reports.checks_host import _home

T = 1_800_000_000.0


def test_what_others_counted_is_added_once_and_what_they_count_later_too(two: Two) -> None:
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 10, us=50), saw(problem(9), 3, "exact")], now_s=T)
    assert two.take() == 13
    assert two.take(T + 1) == 0
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 7, us=50)], now_s=T + 2)
    two.theirs.sightings.add("other", NEW, [saw(problem(), 1)], now_s=T + HOUR)
    assert two.take(T + HOUR) == 8
    assert two.rows("SELECT p.m, sum(s.calls) FROM sighting s JOIN problem p ON p.id = s.problem_id GROUP BY p.m") == [
        (8, 18), (9, 3),
    ]  # fmt: skip
    assert two.rows("SELECT sum(calls), sum(sampled_calls) FROM demand") == [(21, 8)]
    assert two.ours.check() == []
    work = two.ours.leases.lease_next("a:1", NEW, now_s=T + HOUR, hold_s=60)
    assert work is not None and work.problem in (problem(), problem(9))


def test_a_kill_between_two_takes_counts_nothing_twice(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    two.theirs.sightings.add("serve", NEW, [saw(problem(m), 10) for m in range(1, 40)], now_s=T)
    real = ingest.count

    def dies(conn: sqlite3.Connection, seen: Sequence[Any]) -> None:
        real(conn, seen[:20])
        raise StoreError("killed")

    monkeypatch.setattr(ingest, "count", dies)
    with pytest.raises(StoreError):
        two.take()
    monkeypatch.undo()
    assert two.rows("SELECT count(*) FROM sighting") == [(0,)]
    assert two.take() == 390


def test_solutions_in_the_ingest_file_are_never_looked_at(two: Two) -> None:
    two.theirs.sightings.add("serve", NEW, [saw(problem())], now_s=T)
    two.theirs.solutions.install(None, [found(problem())], environment=NEW, now_s=T)
    two.take()
    assert two.ours.solutions.published()[1] == [] and two.ours.solutions.generation() == 0


def test_nonsense_is_left_out_and_the_rest_is_taken(two: Two) -> None:
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 5), saw(problem(n=1 << 21), 5), saw(problem(3), 5)], now_s=T)
    two.theirs._db.write(
        lambda conn: conn.execute("UPDATE problem SET rest = replace(rest, 'fp32', '__import__') WHERE m = 3")
    )
    two.theirs._db.write(lambda conn: conn.execute("UPDATE sighting SET last_seen_us = 4000000000000000"))
    assert two.take() == 5
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 2)], now_s=T + 5)
    assert two.take(T + 6) == 2, "a time stamp far ahead hid what came after it"
    assert two.rows("SELECT DISTINCT m, n FROM problem") == [(8, 1024)]
    assert two.rows("SELECT max(last_seen_us) FROM sighting") == [(int((T + 6) * 1e6),)]


def test_one_user_cannot_flood_the_queue(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_limits, "NEW_A_DAY", 10)
    two.theirs.sightings.add("serve", NEW, [saw(problem(n=64 + i), 1) for i in range(50)], now_s=T)
    assert two.take() == 10
    assert two.take() == 0
    assert two.take(T + 2 * DAY) == 10


def test_programs_and_failed_routes_of_others_are_known(two: Two) -> None:
    two.ours.sightings.add("mine", NEW, [saw(problem())], now_s=T)
    two.ours.solutions.install(None, [found(problem())], environment=NEW, now_s=T)
    session = Session(host="h", pid=7, started_us=1, run="theirs", path="native", generation=1, calls=9)
    two.theirs.sightings.beat(session, now_s=T)
    two.theirs.sightings.add_quarantine(found(problem()), "boom", run="theirs", how="wrong", now_s=T)
    two.take()
    two.take()
    assert [(s["run"], s["calls"]) for s in queries.sessions(two.ours.path)] == [("theirs", 9)]
    assert two.ours.solutions.take_quarantined(now_s=T) == [], "withdrawn on another user's word"
    assert two.rows("SELECT count(*) FROM solution WHERE reported_us IS NOT NULL") == [(1,)]
    two.take()
    assert two.rows("SELECT count(*) FROM quarantine WHERE taken_us IS NULL") == [(0,)]


def of_engine(m: int = 8) -> Problem:
    return problem(m, family="scaled", dtype="fp8_e4m3", out_dtype="bf16", scale="row")


def test_engines_operators_that_wait_in_programs_of_others_are_known(two: Two) -> None:
    one, other, no_engines = of_engine(), of_engine(3), problem()
    two.ours.sightings.add("mine", NEW, [saw(one), saw(no_engines)], now_s=T)
    two.ours.solutions.install(None, [found(one), found(no_engines)], environment=NEW, now_s=T)
    operators = ("_C::cutlass_scaled_mm", "_C::cutlass_scaled_mm", "sgl_kernel::fp8_scaled_mm", "_C::of_nobody")
    theirs = (one, other, no_engines)
    two.theirs.sightings.add("theirs", NEW, [saw(p) for p in theirs], now_s=T)
    two.theirs.sightings.add_wanted(NEW, [(p, name) for p in theirs for name in operators], now_s=T)
    two.take()
    [row] = queries.unraced(two.ours.path, since_s=1e9)
    assert (row["problem"], row["operators"]) == (str(one), " ".join(sorted({*operators[:3]})))

    beside = text_of({"vllm_cutlass": Peer("0.32.0", 1.1)})
    two.ours.solutions.install(None, [found(one, beside=beside)], environment=NEW, now_s=T + 1)
    two.theirs.sightings.add("theirs", NEW, [saw(one)], now_s=T + 2)
    two.take(T + 3)  # their file still names both
    [row] = queries.unraced(two.ours.path, since_s=1e9)
    assert row["operators"] == "sgl_kernel::fp8_scaled_mm"

    two.ours.solutions.install(None, [found(one, state="default_best", backend="torch")], environment=NEW, now_s=T + 4)
    two.theirs.sightings.add("theirs", NEW, [saw(one)], now_s=T + 5)
    two.take(T + 6)  # theirs is the fastest that is known
    assert queries.unraced(two.ours.path, since_s=1e9) == []


def test_an_operator_that_a_file_names_a_thousand_times_is_looked_up_once(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    look_up = ingest._wanted
    monkeypatch.setattr(ingest, "_wanted", lambda *args: [looked.append(args[2]), look_up(*args)][1])
    two.ours.sightings.add("mine", NEW, [saw(of_engine())], now_s=T)
    two.ours.solutions.install(None, [found(of_engine())], environment=NEW, now_s=T)
    two.theirs.sightings.add("theirs", NEW, [saw(of_engine())], now_s=T)
    with contextlib.closing(sqlite3.connect(two.path, isolation_level=None)) as conn:
        conn.execute("PRAGMA ignore_check_constraints = ON")
        conn.execute("UPDATE demand SET wanted = ?, wanted_of = 0", ("_C::cutlass_scaled_mm " * 1000,))
    two.take()
    assert len(looked) <= 2, "once to see whether there is anything to write, once under the lock"
    assert [row["operators"] for row in queries.unraced(two.ours.path, since_s=1e9)] == ["_C::cutlass_scaled_mm"]


def test_more_programs_and_reports_than_one_look_reads_are_all_taken(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "OTHERS_AT_ONCE", 3)
    problems = [problem(n=64 + i) for i in range(10)]
    solutions = [found(p) for p in problems]
    two.ours.solutions.install(None, solutions, environment=NEW, now_s=T)
    two.theirs.sightings.add("serve", NEW, [saw(p) for p in problems], now_s=T)
    for number, solution in enumerate(solutions):
        two.theirs.sightings.add_quarantine(solution, "boom", run="serve", now_s=T - 3600 + number)
        of = Session(host="h", pid=7 + number, started_us=1, run="r", path="native", generation=0)
        two.theirs.sightings.beat(of, now_s=T - 3600 + number)

    for turn in range(8):  # each is over before it has begun
        two.ours.ingest.take_from(two.path, now_s=T + 2 * turn, limit_s=0)

    assert two.rows("SELECT count(DISTINCT problem_id) FROM quarantine") == [(10,)]
    assert two.rows("SELECT count(*), (SELECT total(calls) FROM sighting) FROM session") == [(10, 10.0)]


def test_a_file_that_is_none_is_said_and_one_that_is_not_there_is_not(two: Two, tmp_path: Path) -> None:
    assert two.ours.ingest.take_from(tmp_path / "none.db", now_s=T) == 0
    (tmp_path / "bad.db").write_bytes(b"not a database" * 1000)
    with pytest.raises(StoreError, match=r"bad\.db: damaged \(file is not a database\)\. Remove it: it is made anew"):
        two.ours.ingest.take_from(tmp_path / "bad.db", now_s=T)


@pytest.mark.parametrize("column", ["host", "namespace", "beat_us"])
def test_a_file_with_other_types_than_ours_is_said_and_does_not_stop_us(two: Two, column: str) -> None:
    two.theirs.sightings.beat(
        Session(host="h", pid=7, started_us=1, run="theirs", path="native", generation=1), now_s=T
    )
    two.theirs.close()
    with contextlib.closing(sqlite3.connect(two.path, isolation_level=None)) as conn:
        conn.execute("PRAGMA writable_schema = ON")
        conn.execute("UPDATE sqlite_master SET sql = replace(sql, ') STRICT', ')') WHERE name = 'session'")
        conn.execute("PRAGMA writable_schema = RESET")
        conn.execute(f"UPDATE session SET {column} = x'ff'")
    with pytest.raises(StoreError, match=r"ingest\.db: holds what no gemmtuned wrote"):
        two.take()


def test_a_file_made_anew_begins_at_nothing(two: Two) -> None:
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 10)], now_s=T)
    assert two.take() == 10
    two.theirs.close()
    replaced = two.path.with_name("kept")  # so that the new file has another inode
    two.path.rename(replaced)
    two.theirs.sightings.add("serve", NEW, [saw(problem(), 4)], now_s=T + 1)
    assert two.take(T + 2) == 4


def test_the_owner_of_a_home_writes_to_its_own_database(tmp_path: Path) -> None:
    here = Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)})
    (tmp_path / "ingest").mkdir()
    assert here.counts == (tmp_path / "tune.db", tmp_path / "locks")


@pytest.fixture
def shared_home() -> Iterator[Path]:
    """A home of user 54400, for the group 54321."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be several users")
    home = Path(tempfile.mkdtemp(prefix="gemmtuned-shared-", dir="/var/tmp"))
    (home / "ingest").mkdir()
    for folder, mode in ((home, 0o2750), (home / "ingest", 0o2770)):
        os.chown(folder, 54400, 54321)
        folder.chmod(mode)
    yield home
    shutil.rmtree(home)


@pytest.mark.long
def test_programs_of_two_other_users_share_the_ingest_file_of_a_home(shared_home: Path) -> None:
    importlib.import_module("sqlite_utils")  # what the children need is there: they may not read this checkout
    here = Settings.from_env({"GEMMTUNED_HOME": str(shared_home)})
    daemon = (54400, 54321)

    def count(calls: int) -> str:
        path, locks = here.counts
        store = Store(path, locks=locks)
        store.sightings.add("theirs", NEW, [saw(problem(), calls)], now_s=T)
        store.close()
        return f"{path.name} {oct(path.stat().st_mode & 0o777)}"

    def take() -> int:
        store = Store(here.db, locks=here.locks)
        try:
            return store.ingest.take_from(here.ingest, now_s=T)
        finally:
            store.close()

    assert as_user(*daemon, take) == "0"
    for uid, calls in ((54401, 3), (54402, 4), (54401, 5)):
        assert as_user(uid, 54321, lambda calls=calls: count(calls)) == "ingest.db 0o660"
        assert as_user(*daemon, take) == str(calls)
    assert queries.untuned(here.db)[0]["calls"] == 12
    assert as_user(54401, 54321, lambda: queries.untuned(here.db)[0]["calls"]) == "12", "members read the same views"
    assert as_user(54401, 54321, lambda: _home(here).result) == "PASS"

    def write() -> None:
        Store(here.db, locks=here.locks).sightings.add("theirs", NEW, [saw(problem(), 1)], now_s=T)

    assert "StoreError" in as_user(54401, 54321, write), "the daemon's own is not theirs to write"
    assert "denied" in as_user(54403, 54999, lambda: count(1)), "not of the group"


def test_tables_of_another_user_are_used_only_when_that_one_is_named(shared_home: Path) -> None:
    folder = shared_home / "configs"
    as_user(54400, 54321, lambda: write_tables(folder, {}, generation=5))

    def read(trust: str) -> int:
        os.environ["GEMMTUNED_TRUST"] = trust
        manifest = read_manifest(folder)
        assert manifest is not None
        return manifest.generation

    assert "GEMMTUNED_TRUST=54400" in as_user(54401, 54321, lambda: read(""))
    assert "GEMMTUNED_TRUST=54400" in as_user(54401, 54321, lambda: read("54999"))
    assert as_user(54401, 54321, lambda: read("54400")) == "5"


def test_a_trusted_user_is_a_name_or_a_number() -> None:
    assert trusted_uid({}) is None
    assert trusted_uid({"GEMMTUNED_TRUST": "17"}) == 17
    assert trusted_uid({"GEMMTUNED_TRUST": "root"}) == 0
    with pytest.raises(SettingError, match="GEMMTUNED_TRUST"):
        trusted_uid({"GEMMTUNED_TRUST": "no-such-user"})
