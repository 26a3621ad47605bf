"""Leases with the time told: who holds what, for how long, and what becomes of failures."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from store_cases import DAY, NEW, OLD, found, lease, new_store, problem, saw

from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Candidate
from gemmtuned.db import leases, queries
from gemmtuned.db.leases import BACKOFF_S, Remaining
from gemmtuned.db.store import Store

T = 1_800_000_000.0


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    """Another process's."""
    one = new_store(tmp_path)
    yield one
    one.close()


def test_lapsed_lease_is_free_again(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem(16), 5, us=900)], now_s=0)

    first = lease(store, "a:1", now_s=0)
    assert first.problem == problem(16)
    assert first.members == (problem(16),)
    assert store.leases.lease_next("b:2", NEW, now_s=59, hold_s=60) is None
    second = lease(store, "b:2", now_s=61)
    assert (second.problem, second.attempt) == (problem(16), 2)
    assert not store.leases.renew(first, now_s=62, hold_s=60)
    assert store.leases.renew(second, now_s=62, hold_s=60)


def test_renewed_lease_is_not_taken(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)
    work = lease(store, "a:1", now_s=T)

    assert store.leases.renew(work, now_s=T + 50, hold_s=60)
    assert store.leases.lease_next("b:2", NEW, now_s=T + 100, hold_s=60) is None


def test_what_was_asked_for_and_not_waited_for_is_forgotten_unless_it_was_called_or_waited_before(store: Store) -> None:
    called, before, asked, later = problem(1), problem(2), problem(3), problem(4)
    store.sightings.add("r", NEW, [saw(called)], now_s=T)
    store.sightings.add("r", NEW, [saw(later)], now_s=T + 1)
    for n, one in enumerate((before, asked)):
        work = store.leases.lease_next("a:1", NEW, now_s=T + n, hold_s=60, problems=[one, called])
        assert work is not None
        store.leases.release(work, now_s=T + n, counted=False)

    assert store.leases.unask([called, before, asked, later], since_s=T + 1) == 1
    assert set(store.resume.states([called, before, asked, later], NEW, now_s=T + 2)) == {called, before, later}


def test_a_lease_from_the_future_is_void_after_the_clock_went_back(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)
    held = lease(store, "a:1", now_s=T + DAY)

    assert lease(store, "b:2", now_s=T).attempt == 2
    assert not store.leases.renew(held, now_s=T, hold_s=60)


def test_two_daemons_hold_different_units_and_the_dearest_comes_first(store: Store) -> None:
    cheap, dear = problem(k=64), problem(k=4096)
    store.sightings.add("r", NEW, [saw(cheap, 10, us=5), saw(dear, 10, us=500)], now_s=T)

    one, two = lease(store, "a:1", now_s=T), lease(store, "b:2", now_s=T)
    assert (one.problem, two.problem) == (dear, cheap)
    assert one.worth == pytest.approx(10 * 500 * 0.3)
    assert store.leases.lease_next("c:3", NEW, now_s=T, hold_s=60) is None


def test_traffic_of_the_day_before_counts_half(store: Store) -> None:
    before, today = problem(k=64), problem(k=128)
    store.sightings.add("r", NEW, [saw(before, 18, us=10)], now_s=T - 25 * 3600)
    store.sightings.add("r", NEW, [saw(today, 10, us=10)], now_s=T)

    one, two = lease(store, now_s=T), lease(store, now_s=T)
    assert (one.problem, one.worth) == (today, pytest.approx(30))
    assert (two.problem, two.worth) == (before, pytest.approx(27))


def test_the_queue_prices_a_call_as_reports_do_whatever_is_known_of_it(store: Store) -> None:
    """By what was measured, here or elsewhere; by programs; by the roofline; beside a busy program by these again."""
    now = time.time()
    seen, guessed, measured, crowded, seldom = (problem(k=k) for k in (64, 128, 256, 512, 1024))
    store.sightings.add("r", NEW, [saw(one, 10, us=70) for one in (seen, measured, crowded)], now_s=now)
    store.sightings.add("r", NEW, [Sighting(guessed, "miss", 10)], now_s=now)
    store.sightings.add("r", NEW, [Sighting(seldom, "miss", 10, sampled_calls=3, sampled_us=3 * 70.0)], now_s=now)
    for one, others in ((measured, 0.1), (crowded, 0.5), (seldom, 0.5)):
        store.solutions.install(None, [found(one, us=4.0)], environment=NEW, now_s=now, others=others)
        store.solutions.withdraw([one], reason="to be tuned again", now_s=now, hold=False)

    said = {row["problem"]: row["worth"] for row in queries.untuned(store.path)}
    leased = [lease(store, f"a:{number}", now_s=now) for number in range(5)]

    assert {str(work.problem): work.worth for work in leased} == pytest.approx(said)
    assert said[str(crowded)] == said[str(seen)] == pytest.approx(0.3 * 10 * 70)
    assert said[str(measured)] == said[str(seldom)] != said[str(crowded)]
    assert said[str(guessed)] not in (0, said[str(measured)])


def test_only_problems_of_an_equal_environment_are_leased(store: Store) -> None:
    store.sightings.add("r", OLD, [saw(problem())], now_s=T)

    assert store.leases.lease_next("a:1", NEW, now_s=T, hold_s=60) is None
    assert lease(store, now_s=T, environment=OLD).problem == problem()


def test_failure_backs_off_and_the_third_is_for_good_until_an_upgrade(store: Store) -> None:
    store.sightings.add("r", OLD, [saw(problem())], now_s=T)
    now = T
    for attempt in (1, 2, 3):
        work = lease(store, now_s=now, environment=OLD)
        assert work.attempt == attempt
        store.leases.fail(work, "it hung", now_s=now)
        pause = BACKOFF_S * 4**attempt
        assert store.leases.lease_next("a:1", OLD, now_s=now + pause - 1, hold_s=60) is None
        now += pause + 1

    assert store.leases.lease_next("a:1", OLD, now_s=now + 365 * DAY, hold_s=60) is None
    assert store.leases.remaining(OLD, now_s=now) == Remaining(queued=0, leased=0, waiting=0, failed=1)
    store.sightings.add("r", NEW, [saw(problem())], now_s=now)
    assert lease(store, now_s=now).attempt == 1


def test_the_third_failure_for_want_of_something_begins_anew_after_a_day_with_three_attempts(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)
    now = T
    for _ in range(2):
        waits = []
        for attempt in (1, 2, 3):
            work = lease(store, now_s=now)
            assert work.attempt == attempt
            wait_s = store.leases.fail(work, "no compiler", now_s=now, passing=True)
            assert wait_s is not None and store.leases.lease_next("a:1", NEW, now_s=now + wait_s - 1, hold_s=60) is None
            waits.append(wait_s)
            now += wait_s + 1
        assert waits == [BACKOFF_S * 4, BACKOFF_S * 16, DAY]


def test_a_problem_that_kills_three_daemons_without_a_word_is_failed_for_good(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem(k=64), 9), saw(problem(k=128), 1)], now_s=T)
    for hour in range(3):
        lease(store, f"a:{hour}", now_s=T + 100 * hour)
        lease(store, f"b:{hour}", now_s=T + 100 * hour)

    assert store.leases.lease_next("a:9", NEW, now_s=T + 300, hold_s=60) is None
    assert store.leases.remaining(NEW, now_s=T + 300).failed == 2


def test_giving_back_counts_only_when_it_was_the_problems_fault(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)

    for _ in range(9):
        work = lease(store, now_s=T)
        assert work.attempt == 1
        store.leases.release(work, now_s=T, counted=False)
    store.leases.release(lease(store, now_s=T), now_s=T)
    assert lease(store, now_s=T).attempt == 2


def test_a_lost_lease_changes_nothing_any_more(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)
    lost = lease(store, "a:1", now_s=T)
    kept = lease(store, "b:2", now_s=T + 61)

    store.leases.fail(lost, "late", now_s=T + 62)
    store.leases.release(lost, now_s=T + 62)
    assert store.leases.remaining(NEW, now_s=T + 63) == Remaining(queued=0, leased=1, waiting=0, failed=0)
    assert store.leases.renew(kept, now_s=T + 63, hold_s=60)


def test_a_lease_that_lapsed_is_lost_to_a_newer_one_of_the_same_owner(store: Store) -> None:
    """The number of the attempt is the fence: a daemon has one name, whatever its seats hold."""
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)
    lost = lease(store, "a:1", now_s=T)
    kept = lease(store, "a:1", now_s=T + 61)

    assert not store.leases.renew(lost, now_s=T + 62, hold_s=600)
    store.leases.fail(lost, "late", now_s=T + 62)
    assert store.leases.remaining(NEW, now_s=T + 63) == Remaining(queued=0, leased=1, waiting=0, failed=0)
    assert store.leases.renew(kept, now_s=T + 63, hold_s=60)


def test_three_sizes_of_a_bucket_are_three_units(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem(m)) for m in (1, 3, 7)], now_s=T)

    held = [lease(store, now_s=T) for _ in range(3)]
    assert {(work.covers, work.problem.m) for work in held} == {("exact", 1), ("exact", 3), ("exact", 7)}


def test_more_than_three_sizes_of_a_bucket_are_one_unit(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem(m), calls) for m, calls in ((1, 2), (3, 9), (7, 3))], now_s=T)
    assert store.leases.remaining(NEW, now_s=T).queued == 3

    store.sightings.add("r", NEW, [saw(problem(12), 1), saw(problem(17), 1), saw(problem(9, k=64))], now_s=T)
    assert store.leases.remaining(NEW, now_s=T).queued == 3
    units = {(w.covers, w.problem.m, w.problem.k): w for w in (lease(store, now_s=T) for _ in range(3))}
    assert set(units) == {("fine", 16, 512), ("exact", 17, 512), ("exact", 9, 64)}
    fine = units["fine", 16, 512]
    assert fine.members == (problem(1), problem(3), problem(12))
    assert fine.calls == 15


def test_members_of_a_bucket_are_named_once(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem(m), 20 - m) for m in (2, 4, 6, 8)], now_s=T)

    assert lease(store, now_s=T).members == (problem(2), problem(8))


def test_sizes_seen_elsewhere_do_not_fill_a_bucket(store: Store) -> None:
    store.sightings.add("r", OLD, [saw(problem(m)) for m in (1, 2, 3)], now_s=T)
    store.sightings.add("r", NEW, [saw(problem(4)), saw(problem(5, bias=True))], now_s=T)

    assert {lease(store, now_s=T).covers for _ in range(2)} == {"exact"}


def test_problems_asked_for_are_leased_though_never_seen(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem(8), 1000, us=1e6)], now_s=T)
    wanted = [problem(99), problem(100)]

    got = [store.leases.lease_next("a:1", NEW, now_s=T, hold_s=60, problems=wanted) for _ in range(3)]
    assert [work.problem for work in got if work] == wanted
    assert [work.worth for work in got if work] == [0, 0]
    assert got[2] is None


def test_sizes_asked_for_fill_a_bucket_as_called_ones_do(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem(33), 7)], now_s=T)
    wanted = [problem(m) for m in (48, 40, 35, 17, 18)]  # with 33 four in the bucket of 48, two in that of 32

    got = [store.leases.lease_next("a:1", NEW, now_s=T, hold_s=60, problems=wanted) for _ in range(4)]

    units = {work.problem: work for work in got if work}
    assert set(units) == {problem(48), problem(17), problem(18)}
    assert (units[problem(48)].covers, units[problem(48)].members) == ("fine", (problem(33), problem(48)))
    assert got[3] is None


def test_of_sizes_never_called_the_middle_one_stands_for_the_bucket(store: Store) -> None:
    wanted = [problem(m) for m in (17, 20, 21, 30, 32)]

    work = store.leases.lease_next("a:1", NEW, now_s=T, hold_s=60, problems=wanted)

    assert work is not None and work.members == (problem(17), problem(21), problem(32))


def test_what_has_a_verdict_is_not_leased(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem(m)) for m in (1, 2, 3, 40)], now_s=T)
    store.solutions.install(None, [found(problem(16), covers="fine")], environment=NEW, now_s=T)

    assert lease(store, now_s=T).problem == problem(40)
    assert store.leases.lease_next("a:1", NEW, now_s=T, hold_s=60) is None
    assert store.leases.lease_next("a:1", NEW, now_s=T, hold_s=60, problems=[problem(1)]) is None


def test_install_ends_the_lease_and_a_lost_one_keeps_its_verdict(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)
    lost = lease(store, "a:1", now_s=T)
    lease(store, "b:2", now_s=T + 61)

    assert store.solutions.install(lost, [found(problem())], environment=NEW, now_s=T + 62) == 1
    assert store.leases.remaining(NEW, now_s=T + 62) == Remaining(queued=0, leased=0, waiting=0, failed=0)


def test_failed_candidates_are_remembered_for_their_environment(store: Store) -> None:
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)
    work = lease(store, now_s=T)
    crash, slow = Candidate.of("triton", BLOCK_M=16), Candidate.of("triton", BLOCK_M=32)
    for candidate, outcome in ((crash, "ok"), (crash, "crash"), (slow, "ok")):
        us = None if outcome == "crash" else 7.5
        store.trials.add(
            work, problem(), candidate, phase="screen", us=us, err=None, outcome=outcome, note="", started_us=1
        )

    assert store.trials.failed_candidates(problem(), NEW) == {crash}
    assert store.trials.failed_candidates(problem(), OLD) == set()
    assert store.trials.failed_candidates(problem(9), NEW) == set()


def test_who_asks_for_what_was_put_off_still_sees_why(store: Store, tmp_path: Path) -> None:
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)

    def why() -> str:
        with closing(sqlite3.connect(tmp_path / "tune.db")) as connection:
            return str(connection.execute("SELECT reason FROM untuned").fetchone()[0])

    store.leases.release(lease(store, now_s=T), now_s=T, counted=False, put_off="the CPU is in use")

    assert store.resume.retry_now([problem()]) == 0
    assert why() == "put off: the CPU is in use"
    (row,) = queries.environments(tmp_path / "tune.db")
    assert (row["open_problems"], row["put_off"], row["put_off_reason"]) == (1, 1, "put off: the CPU is in use")
    store.leases.fail(lease(store, now_s=T + 1), "it hung", now_s=T + 1)
    (row,) = queries.environments(tmp_path / "tune.db")
    assert (row["open_problems"], row["put_off"], row["put_off_reason"]) == (1, 0, None)
    assert store.resume.retry_now([problem()]) == 1
    assert why() == ""


def test_what_was_not_called_for_a_week_waits_for_nobody_unless_somebody_asked(store: Store) -> None:
    """One rule for the lease, what is left to do, and what `untuned` says."""
    now_s = time.time()
    old, asked, tuned_by_hand, listed = (problem(m, k=64 * m) for m in (1, 2, 3, 9))
    store.sightings.add("r", NEW, [saw(p) for p in (old, asked, tuned_by_hand)], now_s=now_s - 8 * DAY)
    store.leases.ask_for([asked, listed], NEW, now_s=now_s - 300 * DAY)  # by an import, long ago

    def states() -> dict[int, str]:
        return {row["m"]: row["state"] for row in queries.untuned(store.path)}

    assert states() == {1: "stale", 2: "queued", 3: "stale", 9: "queued"}
    assert store.leases.remaining(NEW, now_s=now_s).queued == store.resume.waiting(now_s=now_s)[0]["problems"] == 2
    leased = {lease(store, now_s=now_s).problem, lease(store, now_s=now_s).problem}
    assert leased == {asked, listed}
    assert store.leases.lease_next("a:1", NEW, now_s=now_s, hold_s=60) is None

    assert store.resume.ask_for_seen([tuned_by_hand, problem(77)], now_s=now_s) == 1
    assert lease(store, now_s=now_s).problem == tuned_by_hand
    store.sightings.add("r", NEW, [saw(old)], now_s=now_s)  # it is called again
    assert states()[1] == "queued" and lease(store, now_s=now_s).problem == old


def test_a_lease_ends_while_others_publish_without_end(
    store: Store, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.sightings.add("r", NEW, [saw(problem(k=64 * n)) for n in range(1, 40)], now_s=T)
    real, ranked = leases.rank, []

    def rank(*args: Any) -> list[dict[str, Any]]:
        found_rows = real(*args)
        ranked.append(len(found_rows))
        other.solutions.install(
            None, [found(problem(n=4096))], environment=NEW, now_s=T
        )  # a generation of somebody else's
        return found_rows

    monkeypatch.setattr(leases, "rank", rank)
    assert store.leases.lease_next("a:1", NEW, now_s=T, hold_s=60) is not None
    assert ranked == [32]


def test_of_units_that_all_went_to_others_two_tries_give_none(
    store: Store, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.sightings.add("r", NEW, [saw(problem())], now_s=T)
    real, ranked = leases.rank, []

    def rank(*args: Any) -> list[dict[str, Any]]:
        found_rows = real(*args)
        ranked.append(1)
        if len(ranked) == 1:
            lease(other, "b:2", now_s=T)
        return found_rows

    monkeypatch.setattr(leases, "rank", rank)
    assert store.leases.lease_next("a:1", NEW, now_s=T, hold_s=60) is None
    assert len(ranked) == 3  # ours, the other's, ours again


def test_a_verdict_that_came_between_rank_and_claim_is_seen(
    store: Store, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    dear, cheap = problem(k=4096), problem(k=64)
    store.sightings.add("r", NEW, [saw(dear, 10, us=500), saw(cheap, 10, us=5)], now_s=T)
    real = leases.rank

    def rank(*args: Any) -> list[dict[str, Any]]:
        found_rows = real(*args)
        other.solutions.install(None, [found(dear)], environment=NEW, now_s=T)
        return found_rows

    monkeypatch.setattr(leases, "rank", rank)
    assert lease(store, now_s=T).problem == cheap


def test_a_hundred_that_are_held_do_not_hide_one_that_is_free(store: Store) -> None:
    many = [problem(k=64 * n) for n in range(2, 102)]
    store.sightings.add("r", NEW, [*(saw(p, 1000) for p in many), saw(problem(k=64))], now_s=T)
    for _ in many:
        lease(store, now_s=T)

    assert lease(store, now_s=T).problem == problem(k=64)
