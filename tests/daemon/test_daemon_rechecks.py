"""What was tuned before is raced again: after upgrades, when old, when measured beside others, and when asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from daemon_world import World, rows_of
from fakes import ENVIRONMENT, NEWER

from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.seats import work_queue
from gemmtuned.daemon.seats.request import Request
from gemmtuned.daemon.service import service
from gemmtuned.daemon.service.service import Daemon
from gemmtuned.db import queries


def problem(n: int = 64, m: int = 8) -> Problem:
    return Problem(m=m, n=n, k=64)


@pytest.mark.long
def test_after_a_driver_upgrade_what_is_in_use_is_raced_again_first_and_losers_are_withdrawn(world: World) -> None:
    world.see(problem(64), problem(65))
    world.monitor.conditions = "driver 1"
    world.daemon = Daemon(world.settings, world.store, [world.monitor], world.life.make, now_s=world.clock.now_s)
    world.run(60, until=lambda: len(world.solved()) == 2)
    world.daemon.stop(world.clock.now_s)
    world.see(problem(66), calls=10_000)
    world.monitor.conditions = "driver 2"
    world.life.slower_now = lambda p: p == problem(65)
    orders = len(world.life.orders)
    world.daemon = Daemon(
        world.settings, world.store, [world.monitor], world.life.make, now_s=world.clock.now_s, recheck=True
    )
    world.run(60, until=lambda: len(world.solved()) == 3)
    assert {o.target for o in world.life.orders[orders : orders + 2]} == {problem(64), problem(65)}
    states = {s.problem: s.state for s in world.store.solutions.published()[1]}
    assert states == {problem(64): "published", problem(65): "default_best", problem(66): "published"}
    done = len(world.life.orders)
    world.run(4 * 3600, step_s=30)
    assert len(world.life.orders) == done, "raced again though nothing has changed"


@pytest.mark.long
def test_old_solutions_are_raced_again_one_an_hour_and_only_when_nothing_else_waits(world: World) -> None:
    world.see(*(problem(n) for n in range(64, 70)))
    world.daemon = Daemon(
        world.settings, world.store, [world.monitor], world.life.make, now_s=world.clock.now_s, recheck=True
    )
    world.run(60, until=lambda: len(world.solved()) == 6)
    orders = len(world.life.orders)
    world.clock.pass_s(8 * 86400)
    world.run(3 * 3600 - 60, step_s=30)
    assert len(world.life.orders) - orders == 3
    assert len(world.solved()) == 6


def test_what_was_measured_beside_others_for_who_waited_is_raced_again_when_the_device_is_idle(world: World) -> None:
    world.see(problem())
    world.monitor.others = lambda now_s: 0.75
    now_s = world.clock.now_s
    request = Request(problems=[problem()])
    world.daemon = Daemon(
        world.settings, world.store, [world.monitor], world.life.make, now_s=now_s, request=request, always=True,
        quiet=True,
    )  # fmt: skip
    world.run(60, until=lambda: problem() in world.solved())
    world.daemon.stop(world.clock.now_s)
    assert [row["others"] for row in rows_of(world, "SELECT others FROM solution")] == [pytest.approx(0.75)]

    world.daemon = Daemon(
        world.settings, world.store, [world.monitor], world.life.make, now_s=world.clock.now_s, recheck=True
    )
    orders = len(world.life.orders)
    world.run(60)
    assert len(world.life.orders) == orders, "still in use"
    world.monitor.others = lambda now_s: 0.0
    world.run(300)
    assert len(world.life.orders) == orders + 1
    live = "SELECT others FROM solution WHERE retired_generation IS NULL"
    assert [row["others"] for row in rows_of(world, live)] == [pytest.approx(0.0)]


def run_once(world: World, seconds: float = 300) -> int:
    """As `gemmtuned daemon --once`: until it is finished, which it must be in so long; how many races it ran."""
    orders = len(world.life.orders)
    world.daemon = Daemon(
        world.settings, world.store, [world.monitor], world.life.make, now_s=world.clock.now_s, recheck=True,
        only_asked=True,
    )  # fmt: skip
    world.run(seconds, until=lambda: world.daemon.is_finished(world.clock.now_s))
    assert world.daemon.is_finished(world.clock.now_s)
    world.daemon.stop(world.clock.now_s)
    return len(world.life.orders) - orders


def test_once_races_again_what_somebody_asked_for_and_nothing_else(world: World) -> None:
    world.see(problem(64), problem(65))
    world.monitor.conditions = "driver 1"
    assert run_once(world) == 2
    world.monitor.conditions = "driver 2"
    world.clock.pass_s(30 * 86400)
    assert run_once(world) == 0
    world.see(problem(66))
    assert world.store.recheck.ask_again([problem(64)]) == 1 == queries.asked_again(world.settings.db)
    assert run_once(world) == 2
    assert [order.target for order in world.life.orders[2:]] == [problem(64), problem(66)]
    assert run_once(world) == queries.asked_again(world.settings.db) == 0


@pytest.mark.long
def test_once_does_not_end_before_what_somebody_asked_for_is_done_or_failed_for_good(world: World) -> None:
    world.see(problem())
    run_once(world)
    world.store.recheck.ask_again([problem()])
    world.life.refuses = lambda p: "boom"
    world.daemon = Daemon(
        world.settings, world.store, [world.monitor], world.life.make, now_s=world.clock.now_s, recheck=True,
        only_asked=True,
    )  # fmt: skip
    took_s = world.run(7200, until=lambda: world.daemon.is_finished(world.clock.now_s), step_s=1.0)
    assert 20 * 60 < took_s < 7200, "two waits after failures, and no third"
    assert len(world.life.orders) == 4
    assert problem() in world.solved() and queries.asked_again(world.settings.db) == 0


def test_once_leaves_what_was_asked_for_to_a_daemon_of_the_versions_it_was_measured_with(world: World) -> None:
    world.see(problem())
    run_once(world)
    world.store.recheck.ask_again([problem()])
    world.life.environment = NEWER
    assert run_once(world) == 0
    assert queries.asked_again(world.settings.db) == 1


def test_once_races_again_what_an_engines_operator_waits_for_where_the_engine_is(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.see(problem(64), problem(65))
    run_once(world)
    wanted = [(problem(64), "_C::cutlass_scaled_mm")]
    world.store.sightings.add_wanted(ENVIRONMENT, wanted, now_s=world.clock.now_s)
    assert run_once(world) == 0, "the engine is not here"

    world.life.environment = replace(ENVIRONMENT, stamps={**ENVIRONMENT.stamps, "vllm_cutlass": "0.32.0"})
    has_vllm(monkeypatch)
    assert run_once(world) == 1 and world.life.orders[-1].target == problem(64)
    assert queries.unraced(world.settings.db, since_s=1e9) == [] and queries.asked_again(world.settings.db) == 0
    assert run_once(world) == 0


def has_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is installed where the daemon runs, as far as its parent process knows."""
    for module in (work_queue, service):
        monkeypatch.setattr(module, "installed", lambda: {"vllm_cutlass": "0.32.0"})


def test_once_leaves_what_an_engines_operator_waits_for_to_a_daemon_of_its_versions(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_vllm(monkeypatch)
    world.see(problem(64))
    run_once(world)
    world.store.sightings.add_wanted(ENVIRONMENT, [(problem(64), "_C::cutlass_scaled_mm")], now_s=world.clock.now_s)
    world.life.environment = replace(NEWER, stamps={**NEWER.stamps, "vllm_cutlass": "0.32.0"})
    assert run_once(world) == 0
    assert len(queries.unraced(world.settings.db, since_s=1e9)) == 1
