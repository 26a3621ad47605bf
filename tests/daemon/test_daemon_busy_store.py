"""A store that is busy, stuck or full, and clocks that jump, under a daemon."""

from __future__ import annotations

import random

import pytest
from daemon_world import World, rows_of

from gemmtuned.configs.errors import StoreBusy, StoreError
from gemmtuned.configs.problem import Problem
from gemmtuned.db import faults as store_faults


def problem(n: int = 64, m: int = 8) -> Problem:
    return Problem(m=m, n=n, k=64)


def test_a_busy_store_delays_and_loses_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.see(*(problem(n) for n in range(64, 74)))
    rng = random.Random(3)
    store = world.store
    calls: dict[object, tuple[str, ...]] = {
        store.leases: ("lease_next", "renew", "release"), store.trials: ("add", "failed_candidates"),
        store.solutions: ("install", "take_quarantined"),
    }  # fmt: skip
    for part, name in ((part, name) for part, names in calls.items() for name in names):
        real = getattr(part, name)

        def sometimes(*args, real=real, **kwargs):  # type: ignore[no-untyped-def]
            if rng.random() < 0.5:
                raise StoreBusy("locked")
            return real(*args, **kwargs)

        monkeypatch.setattr(part, name, sometimes)
    world.run(300)
    monkeypatch.undo()
    assert len(world.solved()) == 10
    assert len(world.life.found) == 10
    assert rows_of(world, "SELECT count(*) AS n FROM trials")[0]["n"] == 40


def test_a_device_is_given_up_in_time_though_the_store_is_stuck(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.see(problem())
    world.run(60, until=lambda: bool(world.life.orders))

    def stuck(*args: object, **kwargs: object) -> None:
        raise StoreError("disk full")

    for part, name in ((world.store.trials, "add"), (world.store.leases, "release"), (world.store.leases, "renew")):
        monkeypatch.setattr(part, name, stuck)
    world.run(0.3)
    world.busy_from(world.clock.now_s)
    assert world.run(5, until=lambda: not world.life.alive) <= 0.3
    world.run(300)
    monkeypatch.undo()
    world.monitor.others = lambda now_s: 0.0
    world.run(120)
    assert world.solved() == {problem()}


def test_a_full_disk_is_in_the_log_though_the_daemon_itself_has_nothing_to_write(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gemmtuned.daemon")
    with monkeypatch.context() as patch:
        patch.setattr(store_faults, "no_room", lambda path: True)
        world.run(30)
    world.run(30)
    said = [record.getMessage().partition(" path=")[0] for record in caplog.records if "disk" in record.getMessage()]
    assert said == ["disk full", "disk has room again"]


def test_a_clock_set_back_or_forward_does_not_stop_the_daemon(world: World) -> None:
    world.see(*(problem(n) for n in range(64, 70)))
    world.run(20)
    world.clock.pass_s(86400)
    world.run(30)
    world.clock.pass_s(-2 * 86400)
    world.see(problem(99))
    world.run(120)
    assert problem(99) in world.solved()
    assert len(world.solved()) == 7
