"""What operators make of solutions: pin, forget, race again, roll back; and which candidates are poison."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from store_cases import DAY, NEW, OLD, found, lease, new_store, problem, saw

from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.db import queries
from gemmtuned.db.store import Store

T = 1_800_000_000.0
ONE, TWO, THREE = problem(n=64), problem(n=128), problem(n=192)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    one = new_store(tmp_path)
    one.sightings.add("r", NEW, [saw(p, 10, us=100) for p in (ONE, TWO, THREE)], now_s=T)
    yield one
    one.close()


def live(store: Store) -> dict[tuple[Problem, str], str]:
    return {(s.problem, s.mode): f"{s.backend} {s.us:g} {s.state}" for s in store.solutions.published()[1]}


def install(store: Store, p: Problem, **columns: object) -> int:
    return store.solutions.install(None, [found(p, **columns)], environment=NEW, now_s=T, conditions="driver 1")  # type: ignore[arg-type]


def test_a_pinned_solution_stays_whatever_is_measured_later(store: Store) -> None:
    install(store, ONE)
    before = store.solutions.generation()
    assert [s.problem for s in store.curation.pin([ONE], now_s=T)] == [ONE]
    assert store.solutions.generation() == before + 1
    install(store, ONE, us=2.0)
    assert live(store)[ONE, "eager"] == "onednn 5 pinned"
    assert store.curation.pin([ONE], now_s=T) == []
    assert len(store.curation.pin([ONE], now_s=T, off=True)) == 1
    install(store, ONE, us=2.0)
    assert live(store)[ONE, "eager"] == "onednn 2 published"


def test_what_is_forgotten_is_new_when_it_is_seen_again(store: Store) -> None:
    install(store, ONE)
    work = lease(store, "a:1", now_s=T)
    store.trials.add(
        work, TWO, Candidate("onednn"), phase="screen", us=1.0, err=None, outcome="wrong", note="", started_us=1
    )
    withdrawn, dropped = store.curation.forget([ONE, TWO], now_s=T, dry_run=True)
    assert len(live(store)) == len(withdrawn) == 1 and dropped >= 5
    assert store.curation.forget([ONE, TWO], now_s=T) == (withdrawn, dropped)
    assert live(store) == {} and store.check() == []
    assert store.trials.failed_candidates(TWO, NEW) == set()
    assert store.leases.lease_next("b:1", NEW, now_s=T, hold_s=60).problem == THREE  # type: ignore[union-attr]
    store.sightings.add("r", NEW, [saw(ONE, 1000, us=100)], now_s=T)
    assert lease(store, "b:1", now_s=T).problem == ONE


def test_rolling_back_publishes_what_was_there_and_only_ever_counts_up(store: Store) -> None:
    install(store, ONE)
    first = install(store, TWO, us=6.0)
    install(store, TWO, us=2.0)
    install(store, THREE)
    store.solutions.withdraw([ONE], reason="by hand", now_s=T)
    newest = store.solutions.generation()
    assert len(live(store)) == 2
    would = store.curation.roll_back(first, now_s=T, dry_run=True)
    assert store.solutions.generation() == newest and len(live(store)) == 2
    done = store.curation.roll_back(first, now_s=T)
    assert (done.gone, done.back) == (would.gone, would.back)
    assert done.generation == store.solutions.generation() == newest + 1
    assert live(store) == {(ONE, "eager"): "onednn 5 published", (TWO, "eager"): "onednn 6 published"}
    assert store.leases.lease_next("a:1", NEW, now_s=T, hold_s=60) is None, "what went would be brought back at once"
    assert store.curation.roll_back(newest, now_s=T).generation == newest + 2
    assert live(store) == {(TWO, "eager"): "onednn 2 published", (THREE, "eager"): "onednn 5 published"}
    store.curation.roll_back(0, now_s=T)
    assert live(store) == {} and store.check() == []
    with pytest.raises(StoreError, match="generation 99"):
        store.curation.roll_back(99, now_s=T)


def test_what_comes_back_is_still_marked_as_measured_beside_others(store: Store) -> None:
    store.solutions.install(None, [found(ONE)], environment=NEW, now_s=T, others=0.7, again=True)
    generation = store.solutions.generation()
    store.solutions.withdraw([ONE], reason="test", now_s=T, hold=False)
    assert not store.recheck.has_recheck("")
    store.curation.roll_back(generation, now_s=T)
    assert queries.solutions(store.path)[0]["others"] == 0.7 and store.recheck.has_recheck("")


def test_what_comes_back_is_still_raced_again_where_somebody_asked(store: Store) -> None:
    generation = install(store, ONE)
    store.recheck.ask_again([ONE])
    store.curation.roll_back(0, now_s=T)
    store.curation.roll_back(generation, now_s=T)
    work = store.recheck.lease_recheck("a:1", NEW, ("asked",), now_s=T, hold_s=60)
    assert work is not None and work.problem == ONE
    store.leases.release(work, now_s=T, counted=False)

    generation = store.solutions.generation()
    store.solutions.withdraw([ONE], reason="by hand", now_s=T)
    store.curation.roll_back(generation, now_s=T)
    assert store.recheck.lease_recheck("a:1", NEW, ("asked",), now_s=T, hold_s=60) is not None


def test_what_failed_by_itself_is_not_raced_again_after_a_rollback_and_what_went_stays_out(store: Store) -> None:
    generation = install(store, ONE)
    store.recheck.ask_again([ONE])
    for attempt in range(3):
        work = store.recheck.lease_recheck("a:1", NEW, ("asked",), now_s=T + attempt * DAY, hold_s=60)
        assert work is not None
        store.leases.fail(work, "boom", now_s=T + attempt * DAY)
    store.solutions.withdraw([ONE], reason="test", now_s=T, hold=False)
    install(store, TWO)
    store.curation.roll_back(generation, now_s=T)
    assert live(store) == {(ONE, "eager"): "onednn 5 published"}
    assert store.recheck.lease_recheck("a:1", NEW, ("asked",), now_s=T + 9 * DAY, hold_s=60) is None
    held = {row["n"] for row in queries.untuned(store.path) if row["state"] == "failed"}
    assert held == {TWO.n}


def test_rolling_back_to_now_changes_nothing(store: Store) -> None:
    generation = install(store, ONE)
    assert store.curation.roll_back(generation, now_s=T).generation == generation == store.solutions.generation()


def test_solutions_of_another_driver_are_raced_again_first_and_stay_in_use_meanwhile(store: Store) -> None:
    for p in (ONE, TWO):
        install(store, p)
    store.sightings.add("r", NEW, [saw(TWO, 1000)], now_s=T)
    assert not store.recheck.has_recheck("driver 1") and store.recheck.has_recheck("driver 2")
    assert store.recheck.mark_changed(NEW, "driver 1", now_s=T) == 0
    assert store.recheck.mark_changed(NEW, "driver 2", now_s=T) == 2
    assert store.recheck.lease_recheck("a:1", OLD, ("conditions",), now_s=T, hold_s=60) is None, (
        "another torch: not comparable"
    )
    work = store.recheck.lease_recheck("a:1", NEW, ("conditions",), now_s=T, hold_s=60)
    assert work is not None and work.problem == TWO, "the dearest first"
    assert len(live(store)) == 2
    other = store.recheck.lease_recheck("b:1", NEW, ("conditions",), now_s=T, hold_s=60)
    assert other is not None and other.problem == ONE
    assert store.recheck.lease_recheck("c:1", NEW, ("conditions",), now_s=T, hold_s=60) is None
    best = found(TWO, backend="torch", us=10.0, state="default_best", gain_low=1.0)
    store.solutions.install(work, [best], environment=NEW, now_s=T, conditions="driver 2")
    store.leases.release(other, now_s=T)
    assert live(store)[TWO, "eager"] == "torch 10 default_best"
    again = store.recheck.lease_recheck("a:1", NEW, ("conditions",), now_s=T, hold_s=60)
    assert again is not None and again.problem == ONE


def test_a_race_that_cannot_be_run_again_is_given_up_and_the_solution_stays(store: Store) -> None:
    install(store, ONE)
    store.recheck.ask_again([ONE])
    for attempt in range(3):
        work = store.recheck.lease_recheck("a:1", NEW, ("asked",), now_s=T + attempt * DAY, hold_s=60)
        assert work is not None
        store.leases.fail(work, "boom", now_s=T + attempt * DAY)
    assert store.recheck.lease_recheck("a:1", NEW, ("asked",), now_s=T + 9 * DAY, hold_s=60) is None
    assert len(live(store)) == 1


def test_a_sample_is_the_oldest_solution_that_is_old_enough_and_not_pinned(store: Store) -> None:
    for p in (ONE, TWO):
        install(store, p)
    best = found(THREE, backend="torch", us=10.0, state="default_best", gain_low=1.0)
    store.solutions.install(None, [best], environment=NEW, now_s=T - 20 * DAY)
    store.curation.pin([ONE], now_s=T)
    assert store.recheck.mark_sample(NEW, before_s=T - DAY, now_s=T) == 0
    assert store.recheck.mark_sample(NEW, before_s=T + DAY, now_s=T) == 1
    work = store.recheck.lease_recheck("a:1", NEW, ("drift",), now_s=T, hold_s=60)
    assert work is not None and work.problem == TWO


def test_a_verdict_for_torch_is_raced_again_after_a_day_if_candidates_could_not_be_tried(store: Store) -> None:
    work = lease(store, "a:1", now_s=T)
    for p, outcome in ((ONE, "hindered"), (TWO, "slower")):
        store.trials.add(
            work, p, Candidate("onednn"), phase="screen", us=None, err=None, outcome=outcome, note="", started_us=1
        )
        best = found(p, backend="torch", us=10.0, state="default_best", gain_low=1.0)
        store.solutions.install(None, [best], environment=NEW, now_s=T)
    assert store.recheck.mark_sample(NEW, before_s=T - 7 * DAY, now_s=T + DAY - 1) == 0
    assert store.recheck.mark_sample(NEW, before_s=T - 7 * DAY, now_s=T + DAY + 1) == 1
    again = store.recheck.lease_recheck("a:1", NEW, ("drift",), now_s=T + 2 * DAY, hold_s=60)
    assert again is not None and again.problem == ONE and not store.recheck.is_served(again)
    assert store.recheck.mark_sample(NEW, before_s=T - 7 * DAY, now_s=T + 2 * DAY) == 0
    install(store, TWO)
    assert store.recheck.is_served(replace(again, problem=TWO))


def test_verdicts_that_lack_candidates_keep_no_old_solution_waiting(store: Store) -> None:
    work = lease(store, "a:1", now_s=T)
    store.trials.add(
        work, ONE, Candidate("onednn"), phase="screen", us=None, err=None, outcome="oom", note="", started_us=1
    )
    now_s = T + 20 * DAY
    best = found(ONE, backend="torch", us=10.0, state="default_best", gain_low=1.0)
    order = []
    for age_s in (2 * DAY, 4 * DAY):
        store.solutions.install(None, [found(TWO)], environment=NEW, now_s=now_s - 21 * DAY)
        store.solutions.install(None, [best], environment=NEW, now_s=now_s - age_s)
        assert store.recheck.mark_sample(NEW, before_s=now_s - 7 * DAY, now_s=now_s) == 1
        again = store.recheck.lease_recheck("a:1", NEW, ("drift",), now_s=now_s, hold_s=60)
        order.append(again and again.problem)
        store.solutions.install(None, [best, found(TWO)], environment=NEW, now_s=now_s)
        now_s += 30 * DAY
    assert order == [TWO, ONE]


@pytest.mark.parametrize("then", ["tried since", "of another version"])
def test_a_verdict_for_torch_is_not_raced_again_for_a_candidate_that_could_be_tried_since(
    store: Store, then: str
) -> None:
    work = lease(store, "a:1", now_s=T)

    def tried(phase: str, outcome: str, at_us: int) -> None:
        store.trials.add(
            work, ONE, Candidate("onednn"), phase=phase, us=None, err=None, outcome=outcome, note="", started_us=at_us
        )

    tried("verify", "oom", 1)
    here = NEW
    if then == "tried since":
        tried("screen", "slower", 2)
    else:
        here = type(NEW)(NEW.device, {**NEW.stamps, "onednn": "another"})
    best = found(ONE, backend="torch", us=10.0, state="default_best", gain_low=1.0)
    store.solutions.install(None, [best], environment=NEW, now_s=T)
    assert store.recheck.mark_sample(here, before_s=T - 7 * DAY, now_s=T + 2 * DAY) == 0


@pytest.mark.parametrize(
    ("others", "again", "waits"), [(0.7, True, True), (0.7, False, False), (0.1, True, False), (None, True, False)]
)
def test_what_somebody_had_measured_beside_others_is_raced_again_once(
    store: Store, others: float | None, again: bool, waits: bool
) -> None:
    store.solutions.install(None, [found(ONE)], environment=NEW, now_s=T, others=others, again=again)
    assert store.recheck.has_recheck("") == waits
    work = store.recheck.lease_recheck("a:1", NEW, ("drift",), now_s=T, hold_s=60)
    assert (work is not None) == waits
    if work is not None:
        store.solutions.install(work, [found(ONE, us=6.0)], environment=NEW, now_s=T, others=others)
        assert (
            not store.recheck.has_recheck("")
            and store.recheck.lease_recheck("a:1", NEW, ("drift",), now_s=T, hold_s=60) is None
        )


def test_what_cannot_be_raced_again_calls_no_daemon_to_work(store: Store) -> None:
    store.solutions.install(None, [found(ONE)], environment=NEW, now_s=T, others=0.7, again=True)
    for attempt in range(3):
        work = store.recheck.lease_recheck("a:1", NEW, ("drift",), now_s=T + attempt * DAY, hold_s=60)
        assert work is not None
        store.leases.fail(work, "boom", now_s=T + attempt * DAY)
    assert not store.recheck.has_recheck("")


def test_a_bucket_is_raced_again_at_the_sizes_seen_now(store: Store) -> None:
    sizes = [problem(m=m, n=320) for m in (33, 35, 40, 48)]
    store.sightings.add("r", NEW, [saw(p, 10) for p in sizes], now_s=T)
    install(store, problem(m=48, n=320), covers="fine")
    store.recheck.ask_again(sizes[:1])
    work = store.recheck.lease_recheck("a:1", NEW, ("asked",), now_s=T, hold_s=60)
    assert work is not None
    assert (work.covers, [p.m for p in work.members]) == ("fine", [33, 40, 48])


def test_a_candidate_that_killed_workers_on_two_problems_is_poison_until_an_upgrade(store: Store) -> None:
    work = lease(store, "a:1", now_s=T)
    bad, unlucky = Candidate("triton", '{"x":1}'), Candidate("onednn")

    def tried(p: Problem, candidate: Candidate, outcome: str, note: str = "") -> None:
        store.trials.add(
            work, p, candidate, phase="screen", us=None, err=None, outcome=outcome, note=note, started_us=1
        )

    tried(ONE, bad, "crash", "worker killed by SIGSEGV")
    assert bad not in store.trials.failed_candidates(THREE, NEW)
    tried(TWO, bad, "hang")
    store.sightings.add("r", OLD, [saw(THREE)], now_s=T)
    assert store.trials.failed_candidates(THREE, NEW) == {bad}
    assert store.trials.failed_candidates(THREE, OLD) == {bad}, "the same triton, so the same source"
    upgraded = type(NEW)(NEW.device, {**NEW.stamps, "triton": "3.7"})
    store.sightings.add("r", upgraded, [saw(THREE)], now_s=T)
    assert store.trials.failed_candidates(THREE, upgraded) == set()
    for p in (ONE, TWO):
        tried(p, unlucky, "killed", "worker killed by SIGKILL (out of memory, or by somebody's hand)")
    assert unlucky not in store.trials.failed_candidates(THREE, NEW), "killed by somebody's hand, or for want of memory"


def test_a_family_that_had_its_share_stands_back(store: Store, tmp_path: Path) -> None:
    batched = problem(n=256, family="batched", batch=4)
    store.sightings.add("r", NEW, [saw(batched, 1)], now_s=T)
    assert store.leases.lease_next("a:1", NEW, now_s=T, hold_s=60, family_last="dense").problem == batched  # type: ignore[union-attr]
    assert store.leases.lease_next("b:1", NEW, now_s=T, hold_s=60, family_last="dense").problem.family == "dense"  # type: ignore[union-attr]


def test_a_database_from_before_gains_the_columns_and_keeps_its_rows(tmp_path: Path) -> None:
    from gemmtuned.db import migrations

    path = tmp_path / "old.db"
    conn = sqlite3.connect(path, isolation_level=None)
    steps = [s for s in migrations.STEPS if s.name < "0006"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrations, "STEPS", tuple(steps))
        patch.setattr(migrations, "SCHEMA", len(steps))
        migrations.apply(conn)
    conn.close()
    store = Store(path, locks=tmp_path / "locks")
    try:
        install(store, ONE)
        assert store.recheck.has_recheck("driver 2") and store.check() == []
    finally:
        store.close()


def test_a_rollback_keeps_what_was_pinned_since(store: Store) -> None:
    first = install(store, ONE, us=6.0)
    install(store, ONE, us=2.0)
    install(store, problem(16))
    store.curation.pin([ONE], now_s=T)

    done = store.curation.roll_back(first, now_s=T)

    assert [s.problem for s in done.gone] == [problem(16)] and done.back == []
    assert live(store) == {(ONE, "eager"): "onednn 2 pinned"}
