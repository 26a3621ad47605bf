"""Whose hits the views count: the solution's that was in use when they came."""

from random import Random

import pytest
from store_cases import DAY, HOUR, NEW, OLD, found, problem, saw

from gemmtuned.configs.padding import padded_m
from gemmtuned.configs.solution import Environment
from gemmtuned.db import queries
from gemmtuned.db.store import Store

HOUR_0 = 1_800_000_000.0 // HOUR * HOUR  # an hour begins


def call(store: Store, calls: int = 100, *, environment: Environment = NEW, now_s: float = HOUR_0) -> None:
    """Let a program call the solution in use."""
    store.sightings.add("r", environment, [saw(problem(), calls, "exact")], now_s=now_s)


def hits(store: Store) -> list[int]:
    """Calls that each solution served, the oldest first."""
    found_rows = queries.solutions(store.path, live=False)
    return [row["hit_calls"] for row in sorted(found_rows, key=lambda row: (row["generation"], row["published"]))]


def test_hits_are_those_of_the_solution_in_use_when_they_came(store: Store) -> None:
    for us, calls in ((5.0, 1), (4.0, 20), (4.5, 300)):  # all within one hour
        store.solutions.install(None, [found(problem(), us=us)], environment=NEW, now_s=HOUR_0)
        call(store, calls)

    assert hits(store) == [1, 20, 300]
    assert queries.saved_us(store.path) == pytest.approx(1 * 5 + 20 * 6 + 300 * 5.5)


def test_hits_of_a_rollback_are_those_of_what_came_back(store: Store) -> None:
    first = store.solutions.install(None, [found(problem())], environment=NEW, now_s=HOUR_0)
    call(store, 1)
    store.solutions.install(None, [found(problem(), us=4.0)], environment=NEW, now_s=HOUR_0 + HOUR)
    call(store, 20)
    store.curation.roll_back(first, now_s=HOUR_0 + 2 * HOUR)
    call(store, 300)

    assert hits(store) == [1, 20, 300]


def test_a_solution_that_is_withdrawn_keeps_its_hits_and_gets_no_more(store: Store) -> None:
    store.solutions.install(None, [found(problem())], environment=NEW, now_s=HOUR_0)
    call(store, 5)
    store.solutions.withdraw([problem()], reason="test", now_s=HOUR_0)
    call(store, 70)  # of a program that has not reloaded yet
    assert hits(store) == [5]

    store.solutions.install(None, [found(problem())], environment=NEW, now_s=HOUR_0 + 2 * HOUR)
    call(store, 300)
    assert hits(store) == [5, 300]


def test_what_came_while_another_was_pinned_was_never_called(store: Store) -> None:
    store.solutions.install(None, [found(problem())], environment=NEW, now_s=HOUR_0)
    store.curation.pin([problem()], now_s=HOUR_0)
    store.solutions.install(None, [found(problem(), us=4.0)], environment=NEW, now_s=HOUR_0 + HOUR)
    call(store, 300)

    assert hits(store) == [300, 0]


def test_hits_go_to_a_later_solution_only_where_it_serves_them(store: Store) -> None:
    shared = found(problem(), OLD, "triton")  # of a stamp that both environments have
    store.solutions.install(None, [shared], environment=OLD, now_s=HOUR_0)
    call(store, 1)
    call(store, 7, environment=OLD)
    store.solutions.install(None, [found(problem())], environment=NEW, now_s=HOUR_0)
    call(store, 30, environment=OLD)  # which has lost its solution
    call(store, 200)

    assert hits(store) == [8, 200]


def test_calls_count_once_where_a_later_verdict_of_another_environment_takes_them_over(store: Store) -> None:
    store.solutions.install(None, [found(problem())], environment=NEW, now_s=HOUR_0)
    call(store, 1)
    everywhere = found(problem(), OLD, "triton")  # of a stamp that both environments have
    store.solutions.install(None, [everywhere], environment=OLD, now_s=HOUR_0)
    call(store, 20)
    call(store, 300, environment=OLD)
    assert hits(store) == [1, 320]

    store.solutions.install(None, [found(problem(), OLD)], environment=OLD, now_s=HOUR_0)  # in place of it
    call(store, 4000)
    call(store, 50000, environment=OLD)
    assert hits(store) == [4001, 320, 50000]


def test_a_later_verdict_that_serves_fewer_environments_takes_over_none_of_the_others(store: Store) -> None:
    store.solutions.install(None, [found(problem())], environment=NEW, now_s=HOUR_0)
    store.solutions.install(None, [found(problem(), OLD)], environment=OLD, now_s=HOUR_0)
    call(store, 1)
    call(store, 20, environment=OLD)
    assert hits(store) == [1, 20]


@pytest.mark.parametrize("seed", range(4))
def test_hits_are_those_of_a_count_by_hand(store: Store, seed: int) -> None:
    """Verdicts of two environments come, replace each other and go, at random; calls count for the newest that fits."""
    chosen, by_hand, at_s = Random(seed), dict[int, int](), HOUR_0
    sizes, backends = (15, 16, 40), ("onednn", "triton")
    for _ in range(40):
        at_s += chosen.choice((0, 60, HOUR, 7 * HOUR))
        environment, m = chosen.choice((NEW, OLD)), chosen.choice(sizes)
        if chosen.random() < 0.4:
            covers = chosen.choice(("exact", "fine"))
            one = found(problem(padded_m(m, 1024, covers)), environment, chosen.choice(backends), covers=covers)
            store.solutions.install(None, [one], environment=environment, now_s=at_s)
        elif chosen.random() < 0.1:
            store.solutions.withdraw([problem(m)], reason="test", now_s=at_s)
        else:
            fitting = [
                (row["covers"] == "exact", row["generation"])
                for row in queries.solutions(store.path, live=True)
                if row["m"] == padded_m(m, 1024, row["covers"]) and row["stamp"] == environment.stamps[row["backend"]]
            ]
            exact, generation = max(fitting, default=(False, 0))
            outcome = "exact" if exact else "padded" if generation else "miss"
            calls = chosen.randint(1, 50)
            store.sightings.add("r", environment, [saw(problem(m), calls, outcome)], now_s=at_s)
            by_hand[generation] = by_hand.get(generation, 0) + calls

    found_rows = queries.solutions(store.path, live=False)
    assert {row["generation"]: row["hit_calls"] for row in found_rows if row["hit_calls"]} == {
        generation: calls for generation, calls in by_hand.items() if generation
    }


def test_hits_survive_the_roll_up_and_the_forgetting_of_another_problem(store: Store) -> None:
    store.solutions.install(None, [found(problem()), found(problem(16), covers="fine")], environment=NEW, now_s=HOUR_0)
    call(store, 5)
    store.sightings.add("r", NEW, [saw(problem(12), 9, "padded")], now_s=HOUR_0)
    store.sightings.add("r", NEW, [saw(problem(40), 3)], now_s=HOUR_0)
    store.curation.forget([problem(40)], now_s=HOUR_0)
    store.rollup.roll_up(now_s=HOUR_0 + 400 * DAY)

    assert sorted(hits(store)) == [5, 9]
