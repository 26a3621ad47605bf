"""Views and questions: promised columns, what counts as covered, what a call is taken to cost."""

import os
import socket
import sqlite3
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store_cases import DAY, HOUR, NEW, OLD, found, lease, problem, saw

from gemmtuned.configs import processes
from gemmtuned.configs.errors import SettingError, StoreError
from gemmtuned.configs.hint import Hint
from gemmtuned.configs.problem import COLUMNS
from gemmtuned.configs.processes import pid_namespace
from gemmtuned.configs.sighting import Session
from gemmtuned.configs.solution import Candidate
from gemmtuned.db import ask, queries
from gemmtuned.db.store import Store

_COVERAGE = [
    "problems", "tuned_problems", "calls", "exact_calls", "padded_calls", "missed_calls", "flops", "time_us",
    "covered_calls", "covered_flops", "covered_time_us", "covered_percent", "covered_calls_percent", "hit_percent",
    "untunable_problems", "untunable_calls", "unserved_problems", "unserved_calls",
]  # fmt: skip
PROMISED = {
    "coverage": ["family", "device", *_COVERAGE],
    "coverage_by_run": ["run", "device", *_COVERAGE, "graph_calls", "first_hour", "last_hour"],
    "coverage_by_problem": [*COLUMNS, "device", *_COVERAGE, "graph_calls", "first_hour", "last_hour"],
    "untuned": [*COLUMNS, "device", "calls", "est_time_us", "worth", "est_saving_us", "state", "last_seen"],
    "solutions": [
        *COLUMNS, "device", "mode", "backend", "config", "us", "baseline_us", "speedup", "saved_us", "err", "tflops",
        "gb_s", "environment", "generation", "state",
    ],
    "trials": [*COLUMNS, "device", "backend", "config", "phase", "us", "err", "outcome", "started"],
    "sessions": [
        "host", "pid", "run", "path", "generation", "calls", "dropped", "errors", "reload_failures", "note", "state",
        "last_seen",
    ],
    "compiled": [*COLUMNS, "device", "run", "kernel", "first_seen", "last_seen"],
    "phases": ["phase", "problem", "device", "run", "calls", "last_seen", "last_seen_at"],
    "traffic": [
        *COLUMNS, "hour", "hour_at", "run", "device", "outcome", "graph", "calls", "flops", "time_us", "now_us",
        "answer", "backend", "config", "covers", "gain", "generation", "last_seen", "last_seen_at",
    ],
    "frozen": [*COLUMNS, "device", "run", "calls", "generation", "last_seen"],
    "unraced": [
        "problem", "device", "operators", "backend", "beside", "calls", "missed", "last_seen", "last_seen_at",
    ],
    "unfit": ["problem", "device", "backend", "config", "calls", "missed", "last_seen", "last_seen_at"],
    "hints": [
        *COLUMNS, "kind", "backend", "config", "arch", "units", "us", "format", "source", "line", "row", "imported",
    ],
}  # fmt: skip


def only(rows: list[dict[str, Any]]) -> dict[str, Any]:
    assert len(rows) == 1
    return rows[0]


@pytest.mark.parametrize("view", queries.VIEWS)
def test_view_has_its_promised_columns(store: Store, view: str) -> None:
    columns = list(queries.frame(store.path, view).columns)

    assert set(PROMISED[view]) <= set(columns)
    assert len(columns) == len(set(columns))


@pytest.mark.parametrize("labels", [("serve",), ("serve", "train", "batch", "old")], ids=["one_label", "several"])
def test_the_views_of_coverage_say_what_the_questions_say(store: Store, labels: tuple[str, ...]) -> None:
    now = time.time()
    batch = [saw(problem(m), m, outcome) for m in range(1, 40) for outcome in ("miss", "exact", "padded")]
    batch += [saw(problem(m), 7, "exact", graph=True) for m in range(10, 20)]
    newest = [(0, run) for run in labels]
    for age, run in (*newest, (3, "train"), (12, "serve"), (30, "old")):
        store.sightings.add(run, NEW, batch, now_s=now - age * HOUR)
        store.sightings.add(run, OLD, batch[: 40 + age], now_s=now - age * HOUR)
    store.solutions.install(None, [found(problem(m)) for m in range(1, 20)], environment=NEW, now_s=now)
    store.sightings.add_wanted(NEW, [(problem(m), "_C::cutlass_scaled_mm") for m in range(5, 25)], now_s=now)

    for view, by in (("coverage", "family"), ("coverage_by_run", "run"), ("coverage_by_problem", "problem")):
        theirs = queries.ask(store.path, f"SELECT * FROM {view}")
        theirs = [{n: v for n, v in row.items() if not n.endswith(("_percent", "_at"))} for row in theirs]  # for people
        ours = [{name: row[name] for name in theirs[0]} for row in queries.coverage(store.path, by=by)]
        for rows in (theirs, ours):
            rows.sort(key=lambda row: (row.get("run"), row.get("m")))
        assert len(ours) == len(theirs) > 0
        assert all(one == pytest.approx(two) for one, two in zip(ours, theirs, strict=True)), view


def test_coverage_counts_calls_of_the_window_only(store: Store) -> None:
    now = time.time()
    store.sightings.add("r", NEW, [saw(problem(), 5)], now_s=now)
    store.sightings.add("r", NEW, [saw(problem(), 70, "exact")], now_s=now - 2 * HOUR)
    store.sightings.add("r", NEW, [saw(problem(9), 900)], now_s=now - 3 * DAY)

    assert only(queries.coverage(store.path))["calls"] == 75
    assert only(queries.coverage(store.path, since_s=HOUR))["calls"] == 5
    week = only(queries.coverage(store.path, since_s=7 * DAY))
    assert (week["problems"], week["calls"], week["exact_calls"], week["missed_calls"]) == (2, 975, 70, 905)
    assert only(queries.frame(store.path, "coverage").to_dict("records"))["calls"] == 75


def test_covered_now_follows_the_table_and_observed_follows_the_calls(store: Store) -> None:
    now = time.time()
    store.sightings.add("r", NEW, [saw(problem(), 100, us=30), saw(problem(100), 100, us=10)], now_s=now)
    before = only(queries.coverage(store.path))
    store.solutions.install(None, [found(problem(), baseline_us=30)], environment=NEW, now_s=now)
    after = only(queries.coverage(store.path))

    assert (before["covered_calls"], before["covered_time_us"]) == (0, 0)
    assert (after["covered_calls"], after["tuned_problems"], after["problems"]) == (100, 1, 2)
    assert after["covered_time_us"] / after["time_us"] == pytest.approx(0.75)
    assert after["missed_calls"] == 200


def test_time_of_what_was_neither_timed_nor_tuned_is_told_apart(store: Store) -> None:
    now = time.time()
    timed, untimed = problem(), problem(100)
    store.sightings.add("r", NEW, [saw(timed, 100, us=30), saw(untimed, 100)], now_s=now)
    before = {row["problem"]: row for row in queries.coverage(store.path, by="problem")}
    assert before[str(timed)]["estimated_time_us"] == 0
    assert before[str(untimed)]["estimated_time_us"] == before[str(untimed)]["time_us"] > 0

    store.solutions.install(None, [found(untimed, baseline_us=10)], environment=NEW, now_s=now)
    after = only(queries.coverage(store.path))
    assert (after["estimated_time_us"], after["time_us"]) == (0, 4000)


@pytest.mark.parametrize(
    ("solution", "covered"),
    [
        (found(problem(8)), True),
        (found(problem(16)), False),
        (found(problem(16), covers="fine"), True),
        (found(problem(8), covers="coarse"), True),
        (found(problem(32), covers="fine"), False),
        (found(problem(8, bias=True)), False),
        (found(problem(8), state="default_best", backend="torch"), True),
        (found(problem(8), state="pinned"), True),
        (found(problem(8), stamp="2.12/cpu-test"), False),
    ],
)
def test_a_problem_is_covered_by_a_live_solution_of_its_bucket_and_stamp(
    store: Store, solution: Any, covered: bool
) -> None:
    store.sightings.add("r", NEW, [saw(problem(8))], now_s=time.time())
    store.solutions.install(None, [solution], environment=NEW, now_s=time.time())

    assert only(queries.coverage(store.path))["tuned_problems"] == covered
    assert len(queries.untuned(store.path)) == (not covered)


def test_a_verdict_holds_in_another_environment_while_its_backend_is_the_same(store: Store) -> None:
    now = time.time()
    store.sightings.add("r", NEW, [saw(problem(1)), saw(problem(100))], now_s=now)
    store.solutions.install(
        None, [found(problem(1), OLD), found(problem(100), OLD, "triton")], environment=OLD, now_s=now
    )

    assert only(queries.untuned(store.path))["m"] == 1


def test_a_call_costs_what_was_measured_else_timed_on_the_way_else_the_roofline(store: Store) -> None:
    now = time.time()
    store.sightings.add("r", NEW, [saw(problem(m, n=1000, k=1000), 2) for m in (1, 2, 3)], now_s=now)
    store.sightings.add("r", NEW, [saw(problem(m, n=1000, k=1000), 4, us=77) for m in (2, 3)], now_s=now)
    store.sightings.add("r", NEW, [saw(problem(2, n=1000, k=1000), 4, "exact", us=7)], now_s=now)
    store.solutions.install(None, [found(problem(3, n=1000, k=1000), baseline_us=55)], environment=NEW, now_s=now)

    cost = {row["m"]: row["time_us"] / row["calls"] for row in queries.coverage(store.path, by="problem")}
    roofline = 2e6 / 50e3 + 4 * (1e6 + 2e3) / 10e3
    assert cost == {1: pytest.approx(roofline), 2: pytest.approx(77), 3: pytest.approx(55)}
    store.solutions.withdraw([problem(3, n=1000, k=1000)], reason="test", now_s=now)
    cost = {row["m"]: row["time_us"] / row["calls"] for row in queries.coverage(store.path, by="problem")}
    assert cost[3] == pytest.approx(55)


def test_what_a_solution_saved_is_counted_from_its_hits_since_it_was_published(store: Store) -> None:
    now = time.time()
    store.sightings.add("r", NEW, [saw(problem(), 1000, "exact")], now_s=now - 5 * HOUR)
    store.solutions.install(
        None, [found(problem()), found(problem(16), covers="fine", us=8.0)], environment=NEW, now_s=now - 2 * HOUR
    )
    store.sightings.add("r", NEW, [saw(problem(), 30, "exact"), saw(problem(), 9)], now_s=now)
    store.sightings.add("r", NEW, [saw(problem(3), 7, "padded"), saw(problem(20), 5, "padded")], now_s=now)
    store.sightings.add("r", OLD, [saw(problem(), 500, "exact")], now_s=now)

    saved = {row["covers"]: (row["hit_calls"], row["saved_us"]) for row in queries.solutions(store.path)}
    assert saved == {"exact": (30, 150.0), "fine": (7, 14.0)}


@pytest.mark.parametrize(
    ("others", "timed", "call_us"), [(0.7, 8, 4.0), (0.7, 2, 10.0), (0.05, 8, 10.0), (None, 8, 10.0)]
)
def test_what_was_measured_beside_others_is_priced_by_the_programs_own_calls_where_those_were_timed(
    store: Store, others: float | None, timed: int, call_us: float
) -> None:
    now = time.time()
    bucket = [problem(m, n=2048) for m in (1, 2)]
    store.sightings.add("r", NEW, [saw(p, timed, us=4.0) for p in (problem(), *bucket)], now_s=now - DAY / 2)
    found_beside = [found(problem()), found(problem(16, n=2048), covers="fine")]
    store.solutions.install(None, found_beside, environment=NEW, now_s=now - HOUR, others=others)
    store.sightings.add("r", NEW, [saw(problem(), 100, "exact"), saw(bucket[0], 10, "padded")], now_s=now)

    cost = {row["m"]: row["time_us"] / row["calls"] for row in queries.coverage(store.path, by="problem")}
    assert cost[8] == pytest.approx(call_us)
    rows = {row["covers"]: row for row in queries.solutions(store.path)}
    # half of what a call takes is saved, whatever it takes; the bucket's two sizes have twice as many timed calls
    in_bucket = 4.0 if others == 0.7 and timed > 2 else 10.0
    assert (rows["exact"]["saved_us"], rows["fine"]["saved_us"]) == (
        pytest.approx(100 * call_us / 2), pytest.approx(10 * in_bucket / 2),
    )  # fmt: skip
    assert rows["exact"]["us"] == 5.0 and rows["exact"]["others"] == others
    told = queries.explain(store.path, problem())[0]["why"]
    assert ("timed while others used 70% of the device" in told) == (others == 0.7)


def test_a_price_is_of_calls_where_the_solution_may_run(store: Store) -> None:
    now = time.time()
    store.sightings.add("r", NEW, [saw(problem(), 10, us=4.0)], now_s=now - DAY / 2)
    store.sightings.add("r", OLD, [saw(problem(), 1000, us=40.0)], now_s=now - DAY / 2)
    store.solutions.install(None, [found(problem())], environment=NEW, now_s=now - HOUR, others=0.7)
    store.sightings.add("r", NEW, [saw(problem(), 100, "exact")], now_s=now)

    assert only(queries.solutions(store.path))["saved_us"] == pytest.approx(200.0)


def test_views_are_read_by_every_sqlite_that_we_run_on(store: Store) -> None:
    for view in queries.ask(store.path, "SELECT name, sql FROM sqlite_master WHERE type = 'view'"):
        for part in view["sql"].split("HAVING")[:-1]:
            assert "GROUP BY" in part.rpartition("SELECT")[2], f"{view['name']}: SQLite 3.38 knows no HAVING alone"


def test_what_a_graph_keeps_of_old_kernels_is_told_until_it_is_captured_again(store: Store) -> None:
    now = time.time()
    best = found(problem(3), state="default_best", backend="torch", baseline_us=5.0)
    store.sightings.add("serve", NEW, [saw(problem(m), 7, graph=True) for m in (1, 2, 3)], now_s=now - 100)
    store.solutions.install(None, [found(problem(1)), best], environment=NEW, now_s=now - 90)
    assert queries.frozen(store.path) == []  # replayed before the publish, for all we know

    store.sightings.add("serve", NEW, [saw(problem(m), 7, graph=True) for m in (1, 2, 3)], now_s=now)
    store.sightings.add("train", NEW, [saw(problem(1), 7), saw(problem(1), 9, "exact", graph=True)], now_s=now)
    row = only(queries.frozen(store.path))
    assert (row["run"], row["problem"]) == ("serve", str(problem(1)))
    assert row["calls"] in (7, 14)  # 7 when an hour has begun since the first ones

    store.solutions.install(None, [found(problem(1), us=4.0)], environment=NEW, now_s=now + 1)
    store.sightings.add("serve", NEW, [saw(problem(1), 7, "exact", graph=True)], now_s=now + 20)
    assert queries.frozen(store.path) == []


def test_untuned_tells_state_and_dearest_first(store: Store) -> None:
    now = time.time()
    store.sightings.add("r", NEW, [saw(problem(m), 100 - m, us=10) for m in (1, 20, 40)], now_s=now)
    leased = lease(store, "host:7", now_s=now)
    work = lease(store, now_s=now)
    for attempt in (1, 2, 3):
        store.leases.fail(work, "it hung", now_s=now - 9 * DAY)
        work = lease(store, now_s=now) if attempt < 3 else work

    rows = queries.untuned(store.path)
    assert [(row["m"], row["state"]) for row in rows] == [(1, "leased"), (20, "failed"), (40, "queued")]
    assert (rows[0]["owner"], rows[1]["reason"]) == ("host:7", "it hung")
    assert leased.worth == pytest.approx(rows[0]["worth"]) == pytest.approx(99 * 10 * 0.3)
    assert len(queries.untuned(store.path, limit=2)) == 2
    assert only(queries.environments(store.path))["open_problems"] == 3
    assert only(queries.environments(store.path))["failed"] == 1


def test_problems_that_no_daemon_has_looked_at_yet_wait_and_none_has_failed(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem(m), 5) for m in (1, 20)], now_s=time.time())
    row = only(queries.environments(store.path))
    assert (row["open_problems"], row["failed"]) == (2, 0)


def test_a_problem_is_found_without_what_its_spelling_leaves_out(store: Store) -> None:
    known = [replace(problem(), threads=2), replace(problem(), threads=4, deterministic=True), problem(9)]
    store.sightings.add("r", NEW, [saw(one, 5) for one in known], now_s=time.time())
    plain = replace(problem(), threads=0)
    named = Hint(format="x", family="x", kind="tuned", source="x", line=1, row="{}", problem=plain, candidate=None)
    store.hints.add([named], source="x", now_s=time.time())  # a table's row is no call of the plain case
    assert queries.spelled_like(store.path, plain) == known[:2]
    (store.path.parent / "empty.db").touch()
    assert queries.spelled_like(store.path.parent / "empty.db", plain) == []
    assert queries.spelled_like(store.path, problem(10)) == []


def test_trials_keep_the_newest_of_a_kind(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem())], now_s=time.time())
    work = lease(store, now_s=time.time())
    for us, started_us in ((9.0, 1), (8.0, 2)):
        store.trials.add(
            work, problem(), Candidate.of("triton", BLOCK_M=16), phase="screen", us=us, err=1e-6, outcome="ok", note="",
            started_us=started_us,
        )  # fmt: skip

    row = only(queries.trials(store.path, problem=problem()))
    assert (row["us"], row["started"], row["config"], row["device"]) == (8.0, 2, '{"BLOCK_M":16}', "cpu-test")
    assert queries.trials(store.path, problem=problem(9)) == []


def test_sessions_are_live_silent_or_ended(store: Store) -> None:
    now = time.time()
    for pid, age in ((1, 0), (2, 60), (3, 0)):
        session = Session(host="h", pid=pid, started_us=5, run="r", path="native", generation=2, calls=7)
        store.sightings.beat(session, now_s=now - age - 10)
        store.sightings.beat(session, now_s=now - age)
    store.sightings.end_session(session, now_s=now)

    rows = {row["pid"]: row for row in queries.sessions(store.path)}
    assert {pid: row["state"] for pid, row in rows.items()} == {1: "live", 2: "silent", 3: "ended"}
    facts = store.path.stat()
    assert (rows[1]["store_dev"], rows[1]["store_ino"]) == (facts.st_dev, facts.st_ino)


def test_a_process_is_gone_only_where_its_number_means_the_same(store: Store) -> None:
    dead, unwaited = subprocess.Popen(["true"]), subprocess.Popen(["true"])
    dead.wait()
    os.waitid(os.P_PID, unwaited.pid, os.WEXITED | os.WNOWAIT)
    here = pid_namespace()
    if here is None:
        pytest.skip("this system does not name its PID namespaces")
    host = socket.gethostname()
    places = {
        "gone": (host, here, dead.pid),
        "gone, nobody waited": (host, here, unwaited.pid),
        "running": (host, here, os.getpid()),
        "another container": (host, f"{here}0", dead.pid),
        "another host": (f"{host}2", here, dead.pid),
        "an older gemmtuned": (host, None, dead.pid),
    }
    for name, (host, namespace, pid) in places.items():
        one = Session(
            host=host, pid=pid, started_us=len(name), run=name, path="native", generation=0, namespace=namespace
        )
        store.sightings.beat(one, now_s=time.time())

    said = {row["run"]: row["state"] for row in queries.sessions(store.path)}
    unwaited.wait()
    assert said == {name: "gone" if name.startswith("gone") else "live" for name in places}


def test_where_proc_is_of_another_namespace_nothing_is_known_to_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.os, "getpid", os.getppid)  # as after `unshare --pid` without a /proc of its own
    assert pid_namespace() is None


def test_explain_names_the_step_that_is_found_and_why_the_others_are_not(store: Store) -> None:
    now = time.time()
    store.sightings.add("r", NEW, [saw(problem(8), 4, us=10)], now_s=now)
    store.solutions.install(None, [found(problem(8), OLD)], environment=OLD, now_s=now)
    missed = queries.explain(store.path, problem(8))
    store.solutions.install(None, [found(problem(16), covers="fine")], environment=NEW, now_s=now)
    rows = queries.explain(store.path, problem(8), environment=NEW)

    assert [row["covers"] for row in missed] == ["exact", "fine", "coarse", "queue"]
    assert missed[0]["why"] == "made for onednn 2.12/cpu-test, here it is 2.13/cpu-test"
    assert "waits for a daemon" in missed[3]["why"]
    assert [(row["covers"], row["m"], row["chosen"]) for row in rows] == [
        ("exact", 8, False), ("fine", 16, True), ("coarse", 8, False), ("queue", 8, False),
    ]  # fmt: skip
    never = queries.explain(store.path, problem(77), environment=NEW)
    assert "never seen" in never[-1]["why"]
    assert queries.explain(store.path, problem(77)) == []


def test_wrong_names_and_a_missing_database_are_named(tmp_path: Path, store: Store) -> None:
    with pytest.raises(SettingError, match="coverage by 'shape'"):
        queries.coverage(store.path, by="shape")
    with pytest.raises(SettingError, match="weight 'mass'"):
        queries.coverage(store.path, weight="mass")
    with pytest.raises(SettingError, match="'sqlite_master' is not a view"):
        queries.frame(store.path, "sqlite_master")
    with pytest.raises(StoreError, match="no such database"):
        queries.coverage(tmp_path / "none.db")
    assert not (tmp_path / "none.db").exists()


def test_questions_do_not_wait_for_a_writer(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem(), 3)], now_s=time.time())
    conn = sqlite3.connect(store.path, isolation_level=None)
    conn.execute("BEGIN IMMEDIATE")
    conn.execute("UPDATE sighting SET calls = 99")

    assert only(queries.coverage(store.path))["calls"] == 3
    conn.execute("ROLLBACK")
    conn.close()


@pytest.mark.long
def test_100_000_sightings_are_covered_in_under_a_second(store: Store) -> None:
    now = time.time()
    shapes = [problem(1 + i % 200, k=64 * (1 + i // 200)) for i in range(5000)]
    for hour in range(20):
        store.sightings.add("r", NEW, [saw(p, 3) for p in shapes], now_s=now - hour * HOUR)
    store.solutions.install(None, [found(p) for p in shapes[::3]], environment=NEW, now_s=now)

    start = time.process_time()  # others use the machine too
    row = only(queries.frame(store.path, "coverage").to_dict("records"))
    assert time.process_time() - start < 1
    assert (row["calls"], row["problems"], row["tuned_problems"]) == (300_000, 5000, 1667)


@pytest.mark.parametrize("times", [1, 2])
def test_a_read_that_the_disk_refused_once_is_asked_again(store: Store, times: int) -> None:
    told = []

    def look(conn: sqlite3.Connection) -> int:
        if len(told) < times:
            told.append(sqlite3.DatabaseError("database disk image is malformed"))
            raise told[-1]
        return int(conn.execute("SELECT 7").fetchone()[0])

    if times == 1:
        assert ask.on(store.path, look, 0) == 7
    else:
        with pytest.raises(StoreError, match="damaged"):
            ask.on(store.path, look, 0)
