from __future__ import annotations

import json
import logging
import random
import re

import pytest
from daemon_world import World, problem, rows_of
from fakes import DEVICE, ENVIRONMENT, FakeMonitor, Life, solution
from hooked import wait_for

from gemmtuned.configs.manifest import read_manifest
from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.device.device_lock import DeviceLock
from gemmtuned.daemon.seats.keeper import HELD_S
from gemmtuned.daemon.seats.request import Request
from gemmtuned.daemon.seats.work_queue import WorkQueue
from gemmtuned.daemon.service.rules import PAUSED
from gemmtuned.daemon.service.service import Daemon
from gemmtuned.daemon.status_file import read_notice
from gemmtuned.db.store import Store


def test_a_daemon_and_a_command_that_waits_for_idle_times_never_tune_at_once(world: World) -> None:
    """`gemmtuned tune --idle` beside the daemon of its home, each with a store and workers of its own."""
    life, store = Life(world.clock), Store(world.settings.db, locks=world.settings.locks)
    request = Request(problems=[problem(256)], again=True)
    command = Daemon(
        world.settings, store, [FakeMonitor()], life.make, now_s=world.clock.now_s, request=request, quiet=True
    )
    world.see(problem(), problem(128))
    both, said = 0, set()

    def turn() -> bool:
        nonlocal both
        command.turn(world.clock.now_s)
        both = max(both, len(world.life.alive) + len(life.alive))
        said.add(command.seats[0].notice().reason.partition(": ")[0])
        return bool(request.settled)

    world.run(600, until=turn)
    command.stop(world.clock.now_s)
    store.close()

    assert (both, request.settled) == (1, {problem(256)})
    assert world.life.started and life.started and world.solved() >= {problem(), problem(128)}
    assert "another gemmtuned daemon tunes on it" in said


@pytest.mark.parametrize(("what", "at"), [("header", 0), ("list of tables", 100), ("pages", 5 * 4096)])
def test_the_daemons_own_log_gives_no_advice_to_start_it(
    world: World, caplog: pytest.LogCaptureFixture, what: str, at: int
) -> None:
    world.see(problem(), problem(128))
    world.run(60, until=lambda: len(world.solved()) == 2)
    world.store.checkpoint()
    world.store.close()
    with world.settings.db.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * (16 if what == "header" else 2 * 4096))
    with caplog.at_level(logging.INFO, "gemmtuned"):
        world.daemon.resume(world.clock.now_s)
        wait_for(lambda: world.run(5) and "store was damaged" in caplog.text)
        wait_for(lambda: world.run(30) and len(world.solved()) == 2)  # they come back in a thread

    said = [record.getMessage() for record in caplog.records]
    assert not [line for line in said if "tart gemmtuned daemon" in line or "restart the one" in line], said
    assert world.solved() == {problem(), problem(128)}


def test_a_problem_seen_is_tuned_on_an_idle_device_and_published(world: World) -> None:
    world.see(problem())
    world.run(30, until=lambda: problem() in world.solved())
    manifest = read_manifest(world.settings.config_dir)
    assert manifest is not None
    assert manifest.generation == world.store.solutions.generation() == 1


def test_the_log_says_each_minute_of_tuning_what_is_left(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.see(*(problem(n) for n in range(64, 64 + 40)))
    world.life.trial_s = 2.0
    with caplog.at_level(logging.INFO, logger="gemmtuned.daemon"):
        world.run(200)

    found = [re.fullmatch(r"left problems=(\d+) solved=(\d+) eta_s=(\d+)", line) for line in caplog.messages]
    told = [tuple(map(int, one.groups())) for one in found if one]
    assert 2 <= len(told) <= 4
    assert all(left + solved in (39, 40) and 7 * left <= eta <= 15 * left for left, solved, eta in told), told


def test_nothing_starts_before_the_clear_window_is_over(world: World) -> None:
    world.see(problem())
    took_s = world.run(60, until=lambda: bool(world.life.orders))
    assert 10.0 <= took_s <= 11.5


def test_a_worker_gets_ready_while_the_window_is_not_over(world: World) -> None:
    world.see(problem())
    assert 4.5 <= world.run(60, until=lambda: bool(world.life.alive)) <= 6.0


def test_a_device_in_use_is_left_alone(world: World) -> None:
    world.see(problem())
    world.busy_from(0.0)
    world.run(600, step_s=1.0)
    assert world.life.started == 0


def test_a_device_nobody_can_read_is_left_alone(world: World) -> None:
    world.see(problem())
    world.monitor.others = lambda now_s: None
    world.run(600, step_s=1.0)
    assert world.life.started == 0


def test_no_worker_is_started_when_nothing_waits(world: World) -> None:
    world.run(120)
    assert world.life.started == 0


def test_an_unused_worker_is_ended(world: World) -> None:
    world.see(problem())
    world.run(30)
    assert world.life.alive
    world.run(90)
    assert not world.life.alive


def test_work_that_comes_later_is_taken_up_without_a_new_window(world: World) -> None:
    world.see(problem())
    world.run(200)
    world.see(problem(65))
    assert world.run(60, until=lambda: problem(65) in world.solved()) < 6.0


def test_others_get_the_device_within_half_a_second_and_finished_trials_are_kept(world: World) -> None:
    world.see(problem())
    world.life.trial_s = 1.0
    world.run(60, until=lambda: bool(world.life.orders))
    world.run(2.35)
    world.busy_from(world.clock.now_s)
    assert world.run(5, until=lambda: not world.life.alive) <= 0.3
    assert world.left() == (1, 0, 0, 0)
    backends = {row["backend"] for row in rows_of(world, "SELECT backend FROM trials")}
    assert backends == {"torch", "slow"}


def test_an_attempt_that_gave_way_does_not_count(world: World) -> None:
    world.see(problem())
    world.life.trial_s = 5.0
    for _ in range(5):
        world.monitor.others = lambda now_s: 0.0
        orders = len(world.life.orders)
        world.run(60, until=lambda orders=orders: len(world.life.orders) > orders)
        world.busy_from(0.0)
        world.run(3)
    world.monitor.others = lambda now_s: 0.0
    world.run(200)  # after so many in vain it waits longer
    assert world.solved() == {problem()}


def test_tuning_goes_on_after_the_next_clear_window(world: World) -> None:
    world.see(problem())
    world.life.trial_s = 2.0
    world.run(60, until=lambda: bool(world.life.orders))
    world.busy_from(world.clock.now_s, world.clock.now_s + 5)
    took_s = world.run(60, until=lambda: len(world.life.orders) == 2)
    assert 14.0 <= took_s <= 17.0  # 5 of use, 10 of window, less one reading's length


def test_a_daemon_whose_lock_was_removed_gives_way_to_the_one_that_has_the_new_file(world: World) -> None:
    """systemd-tmpfiles removes what is old in /tmp; two daemons would measure on one device then."""
    world.see(problem())
    world.life.trial_s = 200.0
    world.run(60, until=lambda: bool(world.life.orders))
    (file,) = world.settings.locks.glob("gemmtuned-*cpu*.lock")
    file.unlink()
    world.run(HELD_S + 1)
    assert world.life.alive and file.exists(), "nobody else has it"
    file.unlink()
    other = DeviceLock(world.settings.locks, "cpu", "another", own=True)
    assert other.take() == ""
    assert world.run(HELD_S + 5, until=lambda: not world.life.alive) <= HELD_S + 1
    assert "another gemmtuned daemon tunes on it: another" in world.daemon.seats[0].notice().reason
    other.drop()
    world.run(60, until=lambda: len(world.life.orders) == 2)
    assert rows_of(world, "SELECT attempts FROM work") == [{"attempts": 1}], "what gave way does not count"


def test_a_result_that_was_wrong_in_a_program_is_withdrawn_and_published(world: World) -> None:
    world.see(problem())
    world.run(60)
    world.store.sightings.add_quarantine(solution(problem()), "off", run="serve", how="wrong", now_s=world.clock.now_s)
    world.busy_from(0.0)
    world.run(10)
    assert world.solved() == set()
    manifest = read_manifest(world.settings.config_dir)
    assert manifest is not None
    assert sum(f.rows for f in manifest.files) == 0
    assert manifest.generation == world.store.solutions.generation()


def test_a_route_that_raised_in_a_program_is_raced_again_before_anything_is_withdrawn(world: World) -> None:
    world.daemon = Daemon(
        world.settings, world.store, [world.monitor], world.life.make, now_s=world.clock.now_s, recheck=True
    )
    world.see(problem())
    world.run(60)
    world.store.sightings.add_quarantine(solution(problem()), "boom", run="serve", now_s=world.clock.now_s)
    world.busy_from(0.0)
    world.run(10)
    assert world.solved() == {problem()}, "withdrawn on a program's word"
    before = world.store.solutions.generation()
    world.busy_from(0.0, 0.0)
    world.run(60)
    assert world.store.solutions.generation() > before, "not raced again"
    assert world.solved() == {problem()}
    assert not world.store.recheck.has_recheck("")


def test_a_withdrawal_by_hand_is_published(world: World) -> None:
    world.see(problem())
    world.run(60)
    world.store.solutions.withdraw([problem()], reason="test", now_s=world.clock.now_s)
    world.run(10)
    manifest = read_manifest(world.settings.config_dir)
    assert manifest is not None
    assert sum(f.rows for f in manifest.files) == 0


def test_paused_means_no_worker(world: World) -> None:
    world.see(*(problem(n) for n in range(64, 90)))
    world.run(30)
    assert world.life.alive
    (world.settings.home / PAUSED).touch()
    world.run(1)
    assert not world.life.alive
    world.run(300)
    assert not world.life.alive
    notice = read_notice(world.settings.home)
    assert notice is not None
    assert notice["state"] == "paused"
    (world.settings.home / PAUSED).unlink()
    world.run(60)
    assert len(world.solved()) == 26


@pytest.mark.parametrize("for_good", [True, False])
def test_what_is_put_off_is_over_for_who_waits_and_not_for_who_waits_for_an_idle_device(
    world: World, for_good: bool
) -> None:
    request = Request(problems=[problem()])
    queue = WorkQueue(world.store, "a:1", request=request)
    work = queue.lease(ENVIRONMENT, world.clock.now_s)
    assert work is not None

    queue.put_off(work, "the CPU is in use", world.clock.now_s, for_good=for_good)

    assert request.open() == ([] if for_good else [problem()])
    assert request.put_off == ({problem(): "the CPU is in use"} if for_good else {})
    assert world.left() == (1, 0, 0, 0)


@pytest.mark.long
def test_a_lease_is_held_as_long_as_the_work_takes(world: World) -> None:
    world.see(problem())
    world.life.trial_s = 100.0
    world.run(300)
    assert world.store.leases.lease_next("other:1:1", ENVIRONMENT, now_s=world.clock.now_s, hold_s=60) is None
    world.run(200)
    assert world.solved() == {problem()}


def test_a_lost_lease_ends_the_work(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.see(problem())
    world.life.trial_s = 5000.0
    world.run(60, until=lambda: bool(world.life.orders))
    assert world.daemon.seats[0].tuning
    world.clock.pass_s(3600)  # the machine slept
    stolen = world.store.leases.lease_next("other:1:1", ENVIRONMENT, now_s=world.clock.now_s, hold_s=1e6)
    assert stolen is not None
    world.run(30)
    assert not world.daemon.seats[0].tuning and world.daemon.seats[0].notice().problem == ""
    assert world.life.ends[-1:] == ["waited for"], "the worker still used the device for what another tunes"
    assert f"lease lost problem={problem()}" in [record.getMessage() for record in caplog.records]
    assert world.store.leases.renew(stolen, now_s=world.clock.now_s, hold_s=60)
    assert world.solved() == set() and len(world.life.orders) == 1


@pytest.mark.long
def test_a_worker_that_cannot_start_is_tried_less_and_less_often(world: World) -> None:
    world.see(problem())
    world.life.starts_dead = True
    world.run(3600, step_s=2.0)
    assert 5 <= world.life.started <= 15
    notice = read_notice(world.settings.home)
    assert notice is not None
    assert "ended at once" in notice["reason"]
    world.life.starts_dead = False
    world.run(900, step_s=2.0)
    assert world.solved() == {problem()}


def test_a_worker_that_cannot_be_killed_takes_its_device_out_of_use(world: World) -> None:
    world.see(problem())
    world.life.trial_s = 100.0
    world.life.unkillable_s = 300.0
    world.run(60, until=lambda: bool(world.life.orders))
    start_s = world.clock.now_s
    world.busy_from(start_s, start_s + 1)
    world.run(200)
    assert world.life.started == 1
    notice = read_notice(world.settings.home)
    assert notice is not None
    assert "cannot be killed" in notice["seats"][0]["reason"]
    world.life.trial_s = 0.1
    world.run(150)
    assert world.solved() == {problem()}


def test_a_worker_stuck_before_its_first_word_is_called_stuck_and_its_failure_is_not_forgotten(world: World) -> None:
    keeper = world.daemon.seats[0].keeper
    world.life.unkillable_s = 30.0
    keeper.start(world.clock.now_s)
    keeper.failed("no word", world.clock.now_s)
    assert keeper.is_stuck(world.clock.now_s) and "no word" in keeper.trouble
    world.clock.pass_s(6.0)
    assert keeper.is_stuck(world.clock.now_s) and "cannot be killed" in keeper.trouble
    world.clock.pass_s(30.0)
    assert not keeper.is_stuck(world.clock.now_s) and "no word" in keeper.trouble


def test_a_bucket_is_raced_at_its_smallest_most_called_and_largest_size(world: World) -> None:
    for m, calls in ((33, 1), (35, 9), (40, 2), (48, 3)):
        world.see(problem(m=m), calls=calls)
    world.run(60, until=lambda: bool(world.solved()))
    assert len(world.life.orders) == 1
    order = world.life.orders[0]
    assert (order.covers, order.target.m, [p.m for p in order.members]) == ("fine", 48, [33, 35, 48])


def test_the_daemon_says_what_it_does_and_why(world: World) -> None:
    def notice() -> dict[str, object]:
        raw = json.loads((world.settings.home / "daemon.json").read_text())
        assert isinstance(raw, dict)
        return {**raw, **raw["seats"][0], "all": raw["state"]}

    world.see(problem())
    world.life.trial_s = 5.0
    world.busy_from(0.0)
    world.run(3)
    assert (notice()["all"], notice()["reason"]) == ("waiting", "others use 100 %")
    world.monitor.others = lambda now_s: 0.0
    world.run(4)
    assert str(notice()["reason"]).startswith("clear for")
    world.run(60, until=lambda: bool(world.life.orders))
    world.run(7)
    assert (notice()["all"], notice()["problem"], notice()["candidate"]) == ("tuning", str(problem()), "slow")
    assert notice()["device"] == DEVICE.key
    world.run(60)
    assert (notice()["all"], notice()["solved"]) == ("ready", 1)
    world.daemon.stop(world.clock.now_s)
    said = read_notice(world.settings.home)
    assert said is not None
    assert said["running"] is False


def test_stopping_gives_everything_back(world: World) -> None:
    world.see(problem())
    world.life.trial_s = 10.0
    world.run(60, until=lambda: bool(world.life.orders))
    world.daemon.stop(world.clock.now_s)
    assert not world.life.alive
    assert world.left() == (1, 0, 0, 0)


@pytest.mark.parametrize("leave", [False, True])
def test_a_worker_that_was_sent_away_during_a_turn_is_gone_after_it(world: World, leave: bool) -> None:
    """Others may have left again by the next look: the worker was told to end, so its lease is given back."""
    world.see(problem())
    world.life.trial_s = 10.0
    world.run(60, until=lambda: bool(world.life.orders))
    now_s = world.clock.pass_s(0.3)
    world.monitor.others = lambda at_s: 0.0 if leave else 1.0
    world.daemon.mind(now_s, leave=leave)
    assert world.life.ends == ["told"]
    world.monitor.others = lambda at_s: 0.0
    world.daemon.turn(world.clock.pass_s(0.1))
    assert not world.life.alive and world.left() == (1, 0, 0, 0)
    world.life.trial_s = 0.2
    world.run(60, until=lambda: problem() in world.solved())
    assert len(world.life.orders) == 2 and world.solved() == {problem()}


def a_day(world: World, hours: float) -> None:
    """Others come and go, programs show new problems, backends crash and hang, all at random."""
    rng = random.Random(11)
    busy_until_s = next_s = 0.0
    asked: set[Problem] = set()
    end_s = world.clock.now_s + hours * 3600
    world.life.crashes = lambda p, c: c.backend == "bad" and p.n % 7 == 0
    world.life.hangs = lambda p, c: c.backend == "slow" and p.n % 11 == 0
    world.life.trial_s = 0.4
    world.monitor.others = lambda now_s: 1.0 if now_s < busy_until_s else rng.uniform(0, 0.09)
    clear_since_s = world.clock.now_s
    while world.clock.now_s < end_s:
        now_s = world.clock.now_s
        if now_s >= next_s:
            next_s = now_s + rng.expovariate(1 / 240)
            if rng.random() < 0.5:
                busy_until_s = now_s + rng.expovariate(1 / 60)
            fresh = [problem(rng.randrange(64, 4096)) for _ in range(rng.randrange(4))]
            asked.update(fresh)
            world.see(*fresh)
        orders = len(world.life.orders)
        world.daemon.turn(now_s)
        if now_s < busy_until_s:
            clear_since_s = busy_until_s
        if len(world.life.orders) > orders:
            assert now_s - clear_since_s >= 9.0, "tuning began on a device that was not clear for long enough"
        if now_s < busy_until_s and world.life.alive:
            assert now_s - world.clock.now_s <= 0.5, "the worker stayed on a busy device"
        world.clock.pass_s(0.1 if world.life.alive else 1.0)
    world.monitor.others = lambda now_s: 0.0
    world.run(7200, until=lambda: world.daemon.is_finished(world.clock.now_s))
    assert world.solved() == asked
    assert sorted(map(str, world.life.found)) == sorted(map(str, asked)), "something finished was tuned again"
    assert world.store.check() == []


@pytest.mark.long
def test_hours_of_daemon_life_end_with_everything_tuned_once(world: World) -> None:
    a_day(world, 1.0)


@pytest.mark.soak
def test_a_day_of_daemon_life_ends_with_everything_tuned_once(world: World) -> None:
    a_day(world, 24)


def test_a_family_of_small_problems_is_not_put_off_for_ever(world: World) -> None:
    world.see(*(problem(n, m=64) for n in range(64, 104)), calls=1000)
    small = Problem(m=1, n=8, k=8, family="batched", batch=2)
    world.see(small, calls=1)
    world.run(60, until=lambda: small in world.solved())
    assert len(world.solved()) <= 12
