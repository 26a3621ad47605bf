from __future__ import annotations

import json
import logging
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from fakes import DEVICE, ENVIRONMENT, NEWER, Clock, FakeMonitor, Life, solution
from hooked import wait_for
from store_cases import new_file

from gemmtuned.configs.errors import StoreBusy, StoreError, WorkerKilled
from gemmtuned.configs.manifest import read_manifest
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Candidate, Environment
from gemmtuned.daemon.seats import work_queue
from gemmtuned.daemon.seats.request import Request
from gemmtuned.daemon.seats.work_queue import WorkQueue, is_dead, outlived_boot, owner_name
from gemmtuned.daemon.service import service
from gemmtuned.daemon.service.rules import PAUSED
from gemmtuned.daemon.service.service import Daemon
from gemmtuned.daemon.status_file import Notice, read_notice, write_notice
from gemmtuned.db import faults as store_faults
from gemmtuned.db import queries
from gemmtuned.db.store import Store


@dataclass
class World:
    """A daemon in faked time, with the real store."""

    settings: Settings
    clock: Clock
    store: Store
    monitor: FakeMonitor
    life: Life
    daemon: Daemon

    def see(self, *problems: Problem, environment: Environment = ENVIRONMENT, calls: int = 10) -> None:
        sightings = [Sighting(p, "miss", calls) for p in problems]
        self.store.sightings.add("serve", environment, sightings, now_s=self.clock.now_s)

    def run(self, seconds: float, *, until: Callable[[], bool] | None = None, step_s: float = 0.0) -> float:
        """Let the daemon live for so long; returns how long it took until `until`.

        step_s: longer turns while there is no worker.
        """
        start_s = self.clock.now_s
        while self.clock.now_s < start_s + seconds:
            self.daemon.turn(self.clock.now_s)
            took_s = self.clock.now_s - start_s
            self.clock.pass_s(self.daemon.pause_s if self.life.alive else max(self.daemon.pause_s, step_s))
            if until is not None and until():
                return took_s
        return seconds

    def solved(self) -> set[Problem]:
        return {s.problem for s in self.store.solutions.published()[1]}

    def busy_from(self, start_s: float, end_s: float = float("inf")) -> None:
        self.monitor.others = lambda now_s: 1.0 if start_s <= now_s < end_s else 0.0

    def left(self) -> tuple[int, int, int, int]:
        left = self.store.leases.remaining(ENVIRONMENT, now_s=self.clock.now_s)
        return left.queued, left.leased, left.waiting, left.failed


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    settings = Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)})
    clock = Clock()
    store = Store(new_file(settings.db), locks=settings.locks)
    monitor = FakeMonitor()
    life = Life(clock)
    daemon = Daemon(settings, store, [monitor], life.make, now_s=clock.now_s)
    yield World(settings, clock, store, monitor, life, daemon)
    store.close()


def problem(n: int = 64, m: int = 8) -> Problem:
    return Problem(m=m, n=n, k=64)


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
    backends = {row["backend"] for row in _rows(world, "SELECT backend FROM trials")}
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


def test_a_hang_costs_one_candidate(world: World) -> None:
    world.see(problem())
    world.life.hangs = lambda p, c: c.backend == "bad"
    world.run(90, until=lambda: bool(world.solved()))
    assert len(world.life.orders) == 2
    assert world.life.orders[1].skip == (Candidate("bad"),)
    found = _rows(world, "SELECT outcome, note FROM trials WHERE backend = 'bad'")
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
    assert not _rows(world, "SELECT 1 FROM trials WHERE outcome = 'crash'")
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
    outcomes = _rows(world, "SELECT n, outcome FROM trials WHERE backend = 'bad' ORDER BY n")
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
    assert "answered for" in _rows(world, "SELECT reason FROM work")[0]["reason"]


def test_problems_of_another_environment_are_not_tuned_and_status_says_so(world: World) -> None:
    world.see(problem())
    world.see(problem(), problem(65), environment=NEWER)
    world.run(60)
    assert {s.stamp for s in world.store.solutions.published()[1]} == {"1"}
    assert [o.target for o in world.life.orders] == [problem()]
    notice = read_notice(world.settings.home)
    assert notice is not None
    assert [(e["environment"], e["problems"]) for e in notice["elsewhere"]] == [(NEWER.key, 2)]
    assert world.daemon.is_finished(world.clock.now_s)


def test_an_upgrade_under_a_running_daemon_gives_the_lease_back(world: World) -> None:
    world.see(problem())
    world.run(200)
    world.see(problem(65))
    world.see(problem(66), environment=NEWER)
    world.life.environment = NEWER
    world.run(30)
    solved = {(s.problem.n, s.stamp) for s in world.store.solutions.published()[1]}
    assert {n for n, _ in solved} == {64, 66}
    assert world.left() == (1, 0, 0, 0)


@pytest.mark.parametrize("place", [".", "configs"])
def test_a_home_that_cannot_be_looked_at_for_a_while_ends_no_daemon(world: World, place: str) -> None:
    """Closed to it, on a disk that does not answer: each call of stat fails, here by a link to a name too long."""
    world.see(problem())
    world.run(60)
    world.see(problem(65))
    folder = world.settings.home / place
    aside = world.settings.home.with_name("aside")
    folder.rename(aside)
    folder.symlink_to("x" * 300)
    try:
        world.run(60)
    finally:
        folder.unlink()
        aside.rename(folder)
    assert world.daemon.trouble

    world.run(120)
    assert world.daemon.trouble == "" and world.solved() == {problem(), problem(65)}
    manifest = read_manifest(world.settings.config_dir)
    assert manifest is not None and sum(file.rows for file in manifest.files) == 2


@pytest.mark.parametrize("jump_s", [8 * 3600.0, -86_400.0], ids=["the machine slept", "the clock was set back"])
def test_time_that_nobody_waited_is_no_time_without_an_idle_device(world: World, jump_s: float) -> None:
    """`daemon --wait-s 600` of a laptop that was shut for a night, or of one whose clock was wrong at first."""
    world.see(problem())
    world.busy_from(0.0)
    world.run(60)
    world.clock.pass_s(jump_s)
    world.run(60)
    assert world.clock.now_s - world.daemon.last_used_s == pytest.approx(120, abs=2)


def test_after_an_upgrade_of_torch_a_resting_daemon_tunes_what_programs_call_then(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last worker had the old torch, and nothing waits for that: only what waits for the new one starts another."""
    site = tmp_path / "site"
    (site / "torch-1.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(site))
    world.see(problem())
    world.run(200)
    world.see(problem(65), environment=NEWER)
    world.run(200)
    assert world.life.started == 1, "nothing has changed here: those are for a daemon elsewhere"

    (site / "torch-1.dist-info").rename(site / "torch-2.dist-info")
    world.life.environment = NEWER
    world.run(200)
    assert {(s.problem.n, s.stamp) for s in world.store.solutions.published()[1]} == {(64, "1"), (65, "2")}
    assert world.life.started == 2


def test_an_engine_that_is_installed_under_a_resting_daemon_has_what_waits_for_it_raced(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose package turns out to be broken is looked at once, and has no worker started again and again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    world.daemon = Daemon(
        world.settings, world.store, [world.monitor], world.life.make, now_s=world.clock.now_s, recheck=True
    )
    world.see(problem())
    world.run(200)
    world.store.sightings.add_wanted(ENVIRONMENT, [(problem(), "_C::cutlass_scaled_mm")], now_s=world.clock.now_s)
    world.run(200)
    assert world.life.started == 1

    metadata = tmp_path / "vllm-0.32.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    world.run(400)
    assert world.life.started == 2 and len(world.life.orders) == 1

    metadata.parent.rename(tmp_path / "vllm-0.32.1.dist-info")
    world.life.environment = replace(ENVIRONMENT, stamps={**ENVIRONMENT.stamps, "vllm_cutlass": "0.32.1"})
    world.run(200)
    assert world.life.started == 3 and len(world.life.orders) == 2


def test_a_worker_of_before_an_upgrade_takes_no_further_problem(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has imported what is no longer there, and would import the rest from what is."""
    monkeypatch.syspath_prepend(str(tmp_path))
    world.see(problem(), problem(65), problem(66))
    world.run(60, until=lambda: len(world.solved()) == 1)  # and the second has begun
    (tmp_path / "engine-2.dist-info").mkdir()
    world.run(60, until=lambda: len(world.solved()) == 3)
    assert world.life.started == 2 and len(world.life.orders) == 3

    (tmp_path / "engine-2.dist-info").rmdir()  # as an upgrade begins: it lies there half, and no worker could start
    world.see(problem(67), problem(68))
    world.run(60, until=lambda: len(world.solved()) == 5)
    assert world.life.started == 2 and len(world.life.orders) == 5


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


def test_leases_of_dead_daemons_are_free_at_once_and_uncounted(world: World) -> None:
    world.see(problem())
    host, _, started = owner_name().split(":")
    dead = f"{host}:4194303:{started}"  # the largest number a process can have
    for _ in range(10):
        assert world.store.leases.lease_next(dead, ENVIRONMENT, now_s=world.clock.now_s, hold_s=1e6) is not None
        assert world.left() == (0, 1, 0, 0)
        world.daemon.resume(world.clock.now_s)
        assert world.left() == (1, 0, 0, 0)


def test_an_owner_that_was_killed_is_dead_before_anybody_waited_for_it() -> None:
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    host, _, started = owner_name().split(":")
    start = Path(f"/proc/{killed.pid}/stat").read_text().rpartition(")")[2].split()[19]
    boot, _, namespace = started.split(".")
    owner = f"{host}:{killed.pid}:{boot}.{start}.{namespace}"
    try:
        assert not is_dead(owner)
    finally:
        killed.kill()
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(owner)
    killed.communicate()


def test_a_daemon_whose_process_cannot_be_looked_at_runs_for_as_long_as_it_speaks(tmp_path: Path) -> None:
    host, pid, rest = owner_name().split(":")
    boot, start, namespace = rest.split(".")
    elsewhere = f"{host}:4194303:{boot}.{start}.{int(namespace) + 1}"
    older = f"{host}:4194303:{boot}.{start}"  # of a version that named no namespace
    for owner, silent_s, runs in (
        (owner_name(), 3600.0, True), (f"{host}:4194303:{boot}.{start}.{namespace}", 0.0, False),
        (elsewhere, 0.0, True), (elsewhere, 60.0, False), (older, 0.0, True), (older, 60.0, False),
        (f"another-host:{pid}:{boot}.{start}.{namespace}", 60.0, False),
    ):  # fmt: skip
        said = Notice(
            owner=owner, pid=1, started_s=0.0, updated_s=time.time() - silent_s, state="tuning", reason="",
            generation=0, solved=0,
        )  # fmt: skip
        write_notice(tmp_path, said)
        told = read_notice(tmp_path)
        assert told is not None and told["running"] is runs, (owner, silent_s)


def test_an_owner_is_dead_only_when_its_process_is_gone_or_the_machine_started_anew() -> None:
    host, pid, started = owner_name().split(":")
    boot, start, namespace = started.split(".")
    assert namespace.isdigit()
    assert not is_dead(f"{host}:{pid}:{boot}.{start}.{namespace}")
    assert is_dead(f"{host}:{pid}:{boot}.{int(start) - 1}.{namespace}"), "the number was given to another process"
    assert is_dead(f"{host}:{pid}:00000000.{start}.{namespace}")
    assert is_dead(f"{host}:4194303:{boot}.{start}.{namespace}")
    for elsewhere in (f"{namespace}1", "", "0"):
        assert not is_dead(f"{host}:4194303:{boot}.{start}.{elsewhere}"), "a number of another container"
    assert not is_dead(f"{host}:4194303:{boot}.{start}"), "written by a version before namespaces"
    for unknown in (f"elsewhere:{pid}:{boot}.1", "", "x", "a:b:c", f"{host}:{pid}:"):
        assert not is_dead(unknown)
    assert outlived_boot(f"{host}:1:{boot}.1")
    assert not outlived_boot(f"{host}:1:00000000.1")


def test_where_the_own_namespace_is_not_known_nobody_is_called_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtuned.daemon.seats.work_queue.pid_namespace", lambda: None)
    mine = owner_name()

    assert mine.endswith(".") and not is_dead(mine.replace(f":{os.getpid()}:", ":4194303:"))


def test_a_live_daemon_of_another_container_keeps_its_lease_until_it_lapses(world: World) -> None:
    world.see(problem())
    neighbour = owner_name().replace(f":{os.getpid()}:", ":4194303:") + "1"
    world.store.leases.lease_next(neighbour, ENVIRONMENT, now_s=world.clock.now_s, hold_s=60)

    world.daemon.resume(world.clock.now_s)
    assert world.left() == (0, 1, 0, 0)
    world.clock.now_s += 61
    assert world.left() == (1, 0, 0, 0)


def test_an_attempt_counts_when_the_machine_went_down_with_it(world: World) -> None:
    world.see(problem())
    host, pid, started = owner_name().split(":")
    before_boot = f"{host}:{pid}:00000000.{started.partition('.')[2]}"
    for _ in range(3):
        assert world.store.leases.lease_next(before_boot, ENVIRONMENT, now_s=world.clock.now_s, hold_s=1e6) is not None
        world.daemon.resume(world.clock.now_s)
    assert world.store.leases.lease_next(before_boot, ENVIRONMENT, now_s=world.clock.now_s, hold_s=1e6) is None
    assert world.left() == (0, 0, 0, 1)


def test_leases_of_the_living_and_of_other_hosts_stay(world: World) -> None:
    world.see(problem(64), problem(65))
    world.store.leases.lease_next(world.daemon.owner, ENVIRONMENT, now_s=world.clock.now_s, hold_s=60)
    world.store.leases.lease_next("elsewhere:1:1", ENVIRONMENT, now_s=world.clock.now_s, hold_s=60)
    world.daemon.resume(world.clock.now_s)
    assert world.left() == (0, 2, 0, 0)


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
    assert _rows(world, "SELECT count(*) AS n FROM trials")[0]["n"] == 40


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


def _rows(world: World, sql: str) -> list[dict[str, object]]:
    import sqlite3

    conn = sqlite3.connect(world.settings.db)
    conn.row_factory = sqlite3.Row
    try:
        return [dict(row) for row in conn.execute(sql).fetchall()]
    finally:
        conn.close()


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
    assert [row["others"] for row in _rows(world, "SELECT others FROM solution")] == [pytest.approx(0.75)]

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
    assert [row["others"] for row in _rows(world, live)] == [pytest.approx(0.0)]


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


def test_a_family_of_small_problems_is_not_put_off_for_ever(world: World) -> None:
    world.see(*(problem(n, m=64) for n in range(64, 104)), calls=1000)
    small = Problem(m=1, n=8, k=8, family="batched", batch=2)
    world.see(small, calls=1)
    world.run(60, until=lambda: small in world.solved())
    assert len(world.solved()) <= 12
