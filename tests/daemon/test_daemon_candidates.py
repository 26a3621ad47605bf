"""Candidates that hang, crash or have their workers killed cost themselves and no more."""

from __future__ import annotations

import pytest
from daemon_world import World, problem, rows_of
from fakes import ENVIRONMENT

from gemmtuned.configs.errors import WorkerKilled
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.service.service import Daemon


def test_a_hang_costs_one_candidate(world: World) -> None:
    world.see(problem())
    world.life.hangs = lambda p, c: c.backend == "bad"
    world.run(90, until=lambda: bool(world.solved()))
    assert len(world.life.orders) == 2
    assert world.life.orders[1].skip == (Candidate("bad"),)
    found = rows_of(world, "SELECT outcome, note FROM trials WHERE backend = 'bad'")
    assert [(r["outcome"], r["note"]) for r in found] == [("hang", "no word past the deadline")]


def test_a_crash_costs_one_candidate(world: World) -> None:
    world.see(problem(), problem(65))
    world.life.crashes = lambda p, c: c.backend in ("bad", "slow")
    world.run(90, until=lambda: len(world.solved()) == 2)
    assert world.solved() == {problem(), problem(65)}
    assert world.life.started == 5


@pytest.mark.parametrize("at", ["torch", "bad"])
def test_a_worker_killed_by_somebody_costs_no_candidate(
    world: World, at: str, caplog: pytest.LogCaptureFixture
) -> None:
    world.see(problem())
    world.life.crashes = lambda p, c: c.backend == at and world.life.started == 1
    world.life.death = WorkerKilled("worker killed by SIGKILL (out of memory, or by somebody's hand)")
    world.run(60, until=lambda: bool(world.solved()))
    assert [order.skip for order in world.life.orders] == [(), ()]
    assert not rows_of(world, "SELECT 1 FROM trials WHERE outcome = 'crash'")
    assert "hand)\" then='a new worker tries it again'" in caplog.text


def test_a_candidate_at_which_the_worker_is_killed_twice_is_left_out(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.see(problem())
    world.life.crashes = lambda p, c: c.backend == "bad"
    world.life.death = WorkerKilled("worker killed by SIGKILL (out of memory, or by somebody's hand)")
    world.run(90, until=lambda: bool(world.solved()))
    assert [order.skip for order in world.life.orders] == [(), (), (Candidate("bad"),)]
    assert "then='a new worker goes on without bad'" in caplog.text


def test_torch_is_not_called_best_while_a_worker_is_killed_at_a_candidate(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory may be short for a while, and then it is there again; after the third attempt it is the candidate's."""
    world.see(problem(), problem(65))
    world.life.death = WorkerKilled("worker killed by SIGKILL (out of memory, or by somebody's hand)")
    world.life.slower_now = lambda p: True
    short_until_s = world.clock.now_s + 600
    world.life.crashes = lambda p, c: c.backend == "bad" and (world.clock.now_s < short_until_s or p.n == 65)
    world.run(200)
    assert world.left() == (0, 0, 2, 0) and not world.solved()
    assert 'attempt=1 retry_s=240 reason="1 of the candidates could not be tried, such as bad: worker' in caplog.text
    world.run(1400, step_s=2.0)

    assert world.solved() == {problem(), problem(65)}
    outcomes = rows_of(world, "SELECT n, outcome FROM trials WHERE backend = 'bad' ORDER BY n")
    assert [(row["n"], row["outcome"]) for row in outcomes] == [(64, "ok"), (65, "killed")]


def test_a_solution_in_use_stays_where_candidates_cannot_be_tried_again(world: World) -> None:
    world.daemon = Daemon(
        world.settings, world.store, [world.monitor], world.life.make, now_s=world.clock.now_s, recheck=True
    )
    world.see(problem())
    world.run(60, until=lambda: bool(world.solved()))
    world.life.death = WorkerKilled("worker killed by SIGKILL (out of memory, or by somebody's hand)")
    world.life.slower_now, world.life.crashes = lambda p: True, lambda p, c: c.backend == "fast"
    world.store.recheck.ask_again([problem()])
    world.run(1600, step_s=2.0)
    assert [order.skip for order in world.life.orders].count((Candidate("fast"),)) == 3
    assert [s.backend for s in world.store.solutions.published()[1]] == ["fast"]
    world.life.crashes = lambda p, c: False  # and it has not failed for good: it is raced again once there is memory
    world.run(2 * 86400, step_s=60.0, until=lambda: not world.store.recheck.has_recheck(""))
    assert [s.backend for s in world.store.solutions.published()[1]] == ["torch"]


def test_a_candidate_that_kills_its_workers_is_left_out_though_others_come_in_between(world: World) -> None:
    world.see(problem())
    world.life.crashes = lambda p, c: c.backend == "bad"
    world.life.death = WorkerKilled("worker killed by SIGKILL (out of memory, or by somebody's hand)")
    for killed in (1, 2):
        world.run(90, until=lambda killed=killed: len(world.life.orders) == killed)
        started = world.life.started
        world.run(5, until=lambda started=started: world.life.started > started)
        world.busy_from(world.clock.now_s, world.clock.now_s + 5)
        world.run(5)
        assert world.left() == (1, 0, 0, 0), "given back, uncounted"
    world.run(90, until=lambda: bool(world.solved()))
    assert [order.skip for order in world.life.orders] == [(), (), (Candidate("bad"),)]


@pytest.mark.long
def test_a_failed_attempt_says_when_the_next_one_is(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.see(problem())
    world.life.refuses = lambda p: "no"
    world.run(3600, step_s=2.0)
    said = [record.getMessage().partition("attempt=")[2] for record in caplog.records if record.levelname == "WARNING"]
    assert said == ["1 retry_s=240 reason='no'", "2 retry_s=960 reason='no'", "3 retry_s=never reason='no'"]


@pytest.mark.long
def test_a_problem_whose_default_crashes_fails_for_good_after_three_attempts(world: World) -> None:
    world.see(problem())
    world.life.crashes = lambda p, c: c.backend == "torch"
    world.run(60)
    assert world.left() == (0, 0, 1, 0)
    world.run(3600, step_s=2.0)
    assert world.left() == (0, 0, 0, 1)
    assert world.daemon.is_finished(world.clock.now_s)
    assert len(world.life.orders) == 3


@pytest.mark.long
def test_a_failed_problem_does_not_stop_the_others(world: World) -> None:
    world.see(*(problem(n) for n in range(64, 70)))
    world.life.refuses = lambda p: "no" if p.n % 2 else ""
    world.run(3600, step_s=2.0)
    assert world.solved() == {problem(64), problem(66), problem(68)}
    assert world.left() == (0, 0, 0, 3)


def test_a_worker_that_answers_another_question_is_not_believed(world: World) -> None:
    world.see(problem())
    world.life.environment = ENVIRONMENT
    make = world.life.make

    def liar(device: str):  # type: ignore[no-untyped-def]
        worker = make(device)
        tune = worker.tune

        def other(order):  # type: ignore[no-untyped-def]
            tune(type(order)((problem(99),), "exact", problem(99), "eager"))

        worker.tune = other  # type: ignore[method-assign]
        return worker

    world.daemon.seats[0].keeper.make_worker = liar
    world.run(60)
    assert world.solved() == set()
    assert "answered for" in rows_of(world, "SELECT reason FROM work")[0]["reason"]
