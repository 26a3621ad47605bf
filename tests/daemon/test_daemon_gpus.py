"""Several GPUs, several daemons, an operator: one worker on every idle GPU and none on any other, in faked time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_gpu import MIB, Card
from fakes import Clock, FakeMonitor
from gpu_machine import Machine

from gemmtuned.daemon.service.rules import PAUSED, Hours, Rules
from gemmtuned.daemon.service.service import Daemon

MakeMachine = Callable[..., Machine]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[MakeMachine]:
    made: list[Machine] = []
    clock = Clock()

    def make(cards: int = 2, home: str = "home", **options: object) -> Machine:
        given = made[0].cards if made else [Card(uuid=f"GPU-{i}", index=i) for i in range(cards)]
        one = Machine(tmp_path / home, clock, given, locks=tmp_path / "locks", **options)
        made.append(one)
        return one

    yield make
    for one in made:
        one.daemon.stop(clock.now_s)
        one.store.close()


def test_of_two_gpus_only_the_idle_one_is_used(machine: MakeMachine) -> None:
    one = machine()
    one.cards[0].start(500, held=30_000 * MIB, share=0.8)
    one.see(20)
    one.run(60)
    assert one.by_device == {"GPU-1": 1}
    assert len(one.store.solutions.published()[1]) == 20
    assert "cuda:0: others hold 30004 MiB" in one.reason()


@pytest.mark.long
def test_two_idle_gpus_solve_almost_twice_as_much(machine: MakeMachine, tmp_path: Path) -> None:
    solved = []
    for cards in (1, 2):
        clock = Clock()
        gpus = [Card(uuid=f"GPU-{i}", index=i) for i in range(cards)]
        one = Machine(tmp_path / str(cards), clock, gpus, locks=tmp_path / f"locks{cards}")
        one.see(400)
        one.run(60)
        solved.append(len(one.store.solutions.published()[1]))
        assert len(set(one.life.found)) == len(one.life.found), "one problem was tuned on both"
        assert one.by_device == {f"GPU-{i}": 1 for i in range(cards)}
        one.daemon.stop(clock.now_s)
        one.store.close()
    assert solved[1] >= 1.8 * solved[0] > 0


@pytest.mark.long
def test_a_gpu_that_others_take_is_left_and_the_other_one_goes_on(machine: MakeMachine) -> None:
    one = machine()
    one.see(2000)
    one.run(20)
    assert len(one.life.alive) == 2
    one.cards[0].start(500, share=0.5)
    one.run(0.5)
    assert [w.pid for w in one.life.alive] == [one.daemon.seats[1].worker.pid]  # type: ignore[union-attr]
    one.run(10)
    assert one.by_device == {"GPU-0": 1, "GPU-1": 1}


@pytest.mark.long
@pytest.mark.parametrize("how", ["guests", "paused", "stopped"])
def test_workers_of_many_gpus_are_all_told_to_go_before_one_is_waited_for(machine: MakeMachine, how: str) -> None:
    one = machine(4)
    one.see(2000)
    one.run(20)
    assert len(one.life.alive) == 4
    one.life.ends.clear()
    if how == "guests":
        for card in one.cards:
            card.start(500, share=0.5)
        one.run(0.5)
    elif how == "paused":
        (one.settings.home / PAUSED).touch()
        one.run(0.1)
    else:
        one.daemon.stop(one.clock.now_s)
    assert one.life.ends == ["told"] * 4 + ["waited for"] * 4


@pytest.mark.long
def test_two_daemons_with_homes_of_their_own_never_share_a_gpu(machine: MakeMachine) -> None:
    one, two = machine(1, "alice"), machine(1, "bob")
    one.see(60)
    two.see(60)
    seen_both = set()
    for _ in range(3000):
        one.turn()
        two.turn()
        assert not (one.life.alive and two.life.alive), "two workers on one GPU"
        seen_both |= {name for name, m in (("alice", one), ("bob", two)) if m.life.alive}
        one.clock.pass_s(0.1)
    assert seen_both == {"alice", "bob"}, "one of them never had its turn"
    assert len(one.store.solutions.published()[1]) == len(two.store.solutions.published()[1]) == 60


def test_nothing_is_tuned_outside_the_hours_and_status_says_so(machine: MakeMachine) -> None:
    minute = [12 * 60]
    one = machine(1, rules=Rules(hours=Hours.parse("22-6"), minute_of=lambda now_s: minute[0]))
    one.see(400)
    one.run(30)
    assert one.by_device == {} and "outside the hours allowed (22-6)" in one.reason()
    minute[0] = 22 * 60
    one.run(10)
    assert one.life.alive
    minute[0] = 6 * 60
    one.run(0.2)
    assert not one.life.alive


def test_a_budget_ends_tuning_for_the_day(machine: MakeMachine) -> None:
    day = [1]
    one = machine(2, rules=Rules(budget_s=10.0, day_of=lambda now_s: day[0]))
    one.see(400)
    one.run(60)
    assert not one.life.alive and "budget of 10 s" in one.reason()
    assert 8 <= len(one.store.solutions.published()[1]) <= 14  # 0.8 s each, 10 s of two devices together
    day[0] = 2
    one.run(5)
    assert one.life.alive


@pytest.mark.long
def test_a_gpu_taken_back_before_anything_is_done_is_asked_for_less_and_less(machine: MakeMachine) -> None:
    one = machine(1)
    one.see(5)
    one.life.trial_s = 30.0
    starts = []
    while len(starts) < 9:
        started = one.life.started
        one.turn()
        if one.life.started > started:
            starts.append(one.clock.now_s)
        working = bool(one.life.alive and one.daemon.seats[0].tuning)
        guests = [p for p in one.cards[0].programs if p.pid == 500]
        if working and not guests:
            one.cards[0].start(500, share=0.5)
        for guest in guests if not one.life.alive else ():
            one.cards[0].end(guest)
        one.clock.pass_s(0.1 if one.life.alive else 0.5)
    gaps = [round(b - a) for a, b in itertools.pairwise(starts)]
    assert gaps[:4] == sorted(gaps[:4])
    assert gaps[0] < 30 and 590 <= gaps[-1] <= 630, gaps


def test_a_crash_on_a_gpu_costs_a_worker_and_no_new_window(machine: MakeMachine) -> None:
    one = machine(1)
    one.see(1)
    one.life.crashes = lambda p, c: c.backend in ("slow", "bad")
    one.run(30)
    assert len(one.store.solutions.published()[1]) == 1
    assert one.by_device == {"GPU-0": 3}


def test_a_gpu_that_is_lost_is_said_and_the_daemon_goes_on(machine: MakeMachine) -> None:
    one = machine()
    one.see(400)
    one.run(20)
    one.monitors[0]._sampler.cards = ()  # type: ignore[attr-defined]
    one.run(5)
    assert "cuda:0: GPU-0 is gone" in one.reason()
    assert len(one.life.alive) == 1


def test_cpu_and_gpu_seats_live_beside_each_other(machine: MakeMachine) -> None:
    one = machine(1)
    monitors = [FakeMonitor(lambda now_s: 1.0), *one.monitors]
    daemon = Daemon(one.settings, one.store, monitors, one.life.make, now_s=one.clock.now_s, owner="x:1:b.1")
    daemon.turn(one.clock.now_s)
    assert [seat.monitor.name for seat in daemon.seats] == ["cpu", "cuda:0"]


@pytest.mark.long
def test_why_nothing_is_tuned_stands_in_the_log_once(machine: MakeMachine, caplog: pytest.LogCaptureFixture) -> None:
    one = machine(cards=1)
    program = one.cards[0].start(500, held=30_000 * MIB, share=0.8)
    one.see(3)
    with caplog.at_level("INFO", logger="gemmtuned.daemon"):
        one.run(8)
        assert "waiting device" not in caplog.text
        one.run(600)
        other = one.cards[0].start(501, held=MIB, share=0.1)  # the same reason with one more name in it
        one.run(600)
        one.cards[0].end(other)
        said = [r.getMessage() for r in caplog.records if "waiting device" in r.getMessage()]
        assert len(said) == 1 and "cuda:0" in said[0] and "others hold 30004 MiB" in said[0]
        assert "what_to_do='" in said[0] and not said[0].endswith("''")
        one.cards[0].end(program)
        one.run(60)
    assert len(one.store.solutions.published()[1]) == 3


@pytest.mark.long
def test_a_problem_that_cannot_be_tuned_just_now_is_put_off_and_never_fails(machine: MakeMachine) -> None:
    one = machine(cards=1)
    one.see(2)
    hot = True
    one.life.not_now = lambda problem: hot
    one.run(300)
    assert 6 <= len(one.life.orders) <= 11 and not one.store.solutions.published()[1]
    hot = False
    one.run(60)
    assert len(one.store.solutions.published()[1]) == 2


def test_a_guest_takes_an_eighth_of_what_is_free_and_never_less_than_it_was_promised() -> None:
    from gemmtuned.daemon.child.worker_cuda import MOST_BYTES, allowed_bytes

    least = 3 << 29
    assert allowed_bytes(4 << 30, least) == least
    assert allowed_bytes(40 << 30, least) == 5 << 30
    assert allowed_bytes(900 << 30, least) == MOST_BYTES
