"""Verdicts: what is live, what replaces what, and what programs and people take back."""

import sqlite3
from typing import Any

import pytest
from store_cases import CPU, NEW, OLD, found, lease, problem, saw

from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.solution import Candidate, Device, Environment, Solution
from gemmtuned.db import queries, solutions
from gemmtuned.db.store import Store

T = 1_800_000_000.0


def live(store: Store) -> set[tuple[str, str, int]]:
    return {(s.backend, s.stamp, s.problem.m) for s in store.solutions.published()[1]}


def test_a_verdict_waits_for_the_disk_and_counts_do_not(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[int] = []
    raised = solutions.raise_generation

    def look(conn: sqlite3.Connection, *args: Any, **options: Any) -> int:
        levels.append(conn.execute("PRAGMA synchronous").fetchone()[0])
        return raised(conn, *args, **options)

    monkeypatch.setattr(solutions, "raise_generation", look)
    store.solutions.install(None, [found(problem())], environment=NEW, now_s=T)
    store.solutions.withdraw([problem()], reason="wrong", now_s=T)

    assert levels == [2, 2]  # FULL
    assert store._db.write(lambda conn: conn.execute("PRAGMA synchronous").fetchone()[0]) == 1  # NORMAL


def test_a_solution_comes_back_as_it_was_installed_with_its_generation(store: Store) -> None:
    solution = found(problem(16, bias=True), covers="fine", us=3.25, gain_low=1.5, config='{"BLOCK_M":16}')

    assert store.solutions.generation() == 0
    assert store.solutions.install(None, [solution], environment=NEW, now_s=T) == 1
    generation, solutions = store.solutions.published()
    assert generation == 1
    assert [s.to_row() for s in solutions] == [{**solution.to_row(), "generation": 1}]


def test_a_launch_record_comes_back_and_a_solution_without_one_has_none(store: Store) -> None:
    launch = '{"binary":"' + "0" * 64 + '"}'
    store.solutions.install(None, [found(problem(), launch=launch), found(problem(9))], environment=NEW, now_s=T)

    assert {s.problem.m: s.launch for s in store.solutions.published()[1]} == {8: launch, 9: ""}
    assert store.solutions.withdraw([problem()], reason="slow", now_s=T)[0].launch == launch


def test_the_newer_verdict_replaces_the_older_of_its_environment(store: Store) -> None:
    store.solutions.install(None, [found(problem())], environment=NEW, now_s=T)
    store.solutions.install(None, [found(problem(), backend="torch", state="default_best")], environment=NEW, now_s=T)

    assert live(store) == {("torch", "2.13", 8)}
    states = {s["generation"]: (s["state"], s["reason"]) for s in queries.solutions(store.path, live=False)}
    assert states == {1: ("stale", "superseded by generation 2"), 2: ("default_best", "")}


def test_an_upgrades_verdict_stands_beside_the_old_version_but_replaces_a_backend_that_stayed(store: Store) -> None:
    store.solutions.install(
        None, [found(problem(), OLD), found(problem(9), OLD, backend="triton")], environment=OLD, now_s=T
    )
    store.solutions.install(None, [found(problem()), found(problem(9))], environment=NEW, now_s=T)

    assert live(store) == {
        ("onednn", "2.12/cpu-test", 8),
        ("onednn", "2.13/cpu-test", 8),
        ("onednn", "2.13/cpu-test", 9),
    }


def test_published_can_be_limited_to_devices(store: Store) -> None:
    other = Environment(Device("cuda-x-132", "cuda", "X", "sm_90", 132), {"torch": "2.13"})
    store.solutions.install(None, [found(problem())], environment=NEW, now_s=T)
    store.solutions.install(
        None, [found(problem(), other, backend="torch", device="cuda-x-132")], environment=other, now_s=T
    )

    assert [s.device for s in store.solutions.published([CPU.key])[1]] == [CPU.key]
    assert len(store.solutions.published()[1]) == 2
    assert store.solutions.published([])[1] == []


def test_a_solution_of_another_device_or_not_live_is_refused_and_nothing_is_kept(store: Store) -> None:
    with pytest.raises(StoreError, match="cannot be installed for cpu-test"):
        store.solutions.install(None, [found(problem()), found(problem(9), device="cuda-x")], environment=NEW, now_s=T)
    with pytest.raises(StoreError, match="that is stale"):
        store.solutions.install(None, [found(problem(), state="stale")], environment=NEW, now_s=T)
    assert store.solutions.published() == (0, [])


def test_a_pinned_solution_stays(store: Store) -> None:
    store.solutions.install(None, [found(problem(), state="pinned")], environment=NEW, now_s=T)
    store.solutions.install(None, [found(problem(), backend="triton")], environment=NEW, now_s=T)

    assert live(store) == {("onednn", "2.13/cpu-test", 8)}


def test_withdraw_takes_out_what_serves_the_problem_and_holds_it_back(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem(m)) for m in (1, 2, 3, 4)], now_s=T)
    work = lease(store, now_s=T)
    store.solutions.install(
        work, [found(work.problem, covers=work.covers), found(problem(99))], environment=NEW, now_s=T
    )

    assert len(store.solutions.withdraw([problem(3)], reason="it is slow", now_s=T, dry_run=True)) == 1
    assert store.solutions.generation() == 1
    assert [s.problem for s in store.solutions.withdraw([problem(3)], reason="it is slow", now_s=T)] == [problem(16)]
    assert store.solutions.generation() == 2
    assert live(store) == {("onednn", "2.13/cpu-test", 99)}
    assert store.solutions.withdraw([problem(3)], reason="again", now_s=T) == []
    assert store.solutions.generation() == 2
    assert store.leases.lease_next("a:1", NEW, now_s=T, hold_s=60) is None
    assert store.resume.retry_now([problem(3)]) == 1
    assert lease(store, now_s=T).problem == problem(16)


def test_withdrawn_without_hold_is_tuned_again(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)
    store.solutions.install(None, [found(problem())], environment=NEW, now_s=T)

    store.solutions.withdraw([problem()], reason="driver changed", now_s=T, hold=False)
    assert lease(store, now_s=T).problem == problem()


def test_a_wrong_result_in_a_program_withdraws_at_once_and_is_not_tried_again(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)
    store.solutions.install(None, [found(problem()), found(problem(9))], environment=NEW, now_s=T)
    bad = store.solutions.published()[1][0]

    for run in ("serve", "train"):
        store.sightings.add_quarantine(bad, "live check: off", run=run, how="wrong", now_s=T)
    assert [s.problem for s in store.solutions.take_quarantined(now_s=T)] == [problem()]
    assert store.solutions.generation() == 2
    assert store.solutions.take_quarantined(now_s=T) == []
    assert store.solutions.generation() == 2
    assert store.trials.failed_candidates(problem(), NEW) == {Candidate("onednn")}
    assert store.trials.failed_candidates(problem(), OLD) == set()
    assert lease(store, now_s=T).problem == problem()


def reported(store: Store) -> Solution:
    """A live solution that raised in a program, taken note of."""
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)
    store.solutions.install(None, [found(problem())], environment=NEW, now_s=T)
    bad = store.solutions.published()[1][0]
    store.sightings.add_quarantine(bad, "RuntimeError: no", run="serve", now_s=T)
    assert store.solutions.take_quarantined(now_s=T) == [], "withdrawn on a program's word"
    assert store.trials.failed_candidates(problem(), NEW) == set(), "the run of our own would leave it out"
    return bad


@pytest.mark.parametrize("outcome", ["crash", "hang", "wrong", "refused"])
def test_what_raised_in_a_program_is_withdrawn_when_our_own_run_fails_too(store: Store, outcome: str) -> None:
    bad = reported(store)
    assert store.recheck.has_recheck("")
    work = store.recheck.lease_recheck("a:1", NEW, ("reported",), now_s=T + 1, hold_s=60)
    assert work is not None
    started_us = int((T + 2) * 1e6)
    store.trials.add(work, bad.problem, bad.candidate, phase="verify", us=None, err=None, outcome=outcome, note="",
                    started_us=started_us)  # fmt: skip

    assert [s.problem for s in store.solutions.take_quarantined(now_s=T + 3)] == [problem()]
    assert store.solutions.published()[1] == []
    assert store.solutions.take_quarantined(now_s=T + 4) == []


def test_what_our_own_run_clears_stays_and_is_not_run_again_the_same_day(store: Store) -> None:
    bad = reported(store)
    work = store.recheck.lease_recheck("a:1", NEW, ("reported",), now_s=T + 1, hold_s=60)
    store.solutions.install(work, [bad], environment=NEW, now_s=T + 2)

    for later_s in (3, 80_000):
        store.sightings.add_quarantine(bad, "RuntimeError: no", run="serve", now_s=T + later_s)
        assert store.solutions.take_quarantined(now_s=T + later_s) == []
        assert not store.recheck.has_recheck("")
    store.sightings.add_quarantine(bad, "RuntimeError: no", run="serve", now_s=T + 90_000)
    assert store.solutions.take_quarantined(now_s=T + 90_000) == []
    assert store.recheck.has_recheck("")
    assert len(store.solutions.published()[1]) == 1


def test_what_is_pinned_after_it_was_reported_waits_for_no_run_and_stays(store: Store) -> None:
    bad = reported(store)
    work = store.recheck.lease_recheck("a:1", NEW, ("reported",), now_s=T + 1, hold_s=60)
    assert work is not None
    store.trials.add(work, bad.problem, bad.candidate, phase="verify", us=None, err=None, outcome="crash", note="",
                    started_us=int((T + 2) * 1e6))  # fmt: skip
    store.curation.pin([problem()], now_s=T + 3)
    assert store.solutions.take_quarantined(now_s=T + 4) == []
    assert [s.state for s in store.solutions.published()[1]] == ["pinned"]
    store.curation.pin([problem()], off=True, now_s=T + 5)

    assert not store.recheck.has_recheck("")
    assert store.solutions.take_quarantined(now_s=T + 6) == []
    assert len(store.solutions.published()[1]) == 1


def test_an_earlier_failure_of_ours_is_no_evidence(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)
    work = lease(store, now_s=T)
    store.trials.add(work, problem(), found(problem()).candidate, phase="verify", us=None, err=None, outcome="hang",
                    note="", started_us=int(T * 1e6) - 5)  # fmt: skip
    reported_later = [found(problem())]
    store.solutions.install(work, reported_later, environment=NEW, now_s=T)
    store.sightings.add_quarantine(store.solutions.published()[1][0], "RuntimeError: no", run="serve", now_s=T)

    assert store.solutions.take_quarantined(now_s=T) == []


def test_a_report_on_what_is_no_longer_live_changes_nothing(store: Store) -> None:
    store.sightings.add_quarantine(found(problem()), "old news", run="serve", now_s=T)

    assert store.solutions.take_quarantined(now_s=T) == []
    assert store.solutions.generation() == 0
