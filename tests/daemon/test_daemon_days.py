"""Days of a GPU in an office, in seconds: people, bursts, MPS, a lost card, a new driver, a clock that jumps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fake_gpu import MIB, Card
from fakes import Clock
from gpu_machine import Machine

HOUR, DAY = 3600.0, 86_400.0
IDLE_S = 10.0  # the daemon's default


class Office:
    """What people and the machine do to the card, by hours since midnight of the first day."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self.machine = machine
        self.card = machine.cards[0]
        self.rng = random.Random(seed)
        self.began_s = machine.clock.now_s
        self.passed_s = 8 * HOUR  # true time: the wall clock may jump
        self.next_s = 0.0
        self.guest_until_s = -1.0
        self.bursts = False
        self.disturbed_s = 0.0  # when the card was last not to be used
        self.seen = 0

    def is_open(self) -> bool:
        return 9 <= self.passed_s % DAY / HOUR < 18

    def step(self, seconds: float) -> None:
        self.passed_s += seconds
        self.machine.clock.pass_s(seconds)
        if self.passed_s >= self.next_s:
            self.next_s = self.passed_s + self.rng.expovariate(1 / 400)
            if self.is_open() and self.rng.random() < 0.6:
                self.guest_until_s = self.passed_s + self.rng.expovariate(1 / 300)
                self.bursts = self.rng.random() < 0.5
            if self.is_open():
                fresh = self.rng.randrange(4)
                self.seen += fresh
                self.machine.see_more(fresh)
        here = [p for p in self.card.programs if p.pid == 500]
        if self.passed_s < self.guest_until_s:
            guest = here[0] if here else self.card.start(500, held=2000 * MIB)
            guest.share = 0.1 * (self.rng.random() < 0.3) if self.bursts else 0.7
        elif here:
            self.card.end(here[0])
        lost = 13 * HOUR < self.passed_s < 13.5 * HOUR
        self.machine.mps = 10 * HOUR < self.passed_s < 11 * HOUR
        self.machine.lose(lost)
        if lost or self.machine.mps or self.passed_s < self.guest_until_s:
            self.disturbed_s = self.passed_s


def live(folder: Path, seed: int, until_s: float) -> None:
    """From eight in the morning of the first day on, with what must hold at every turn and at the end."""
    clock = Clock()
    machine = Machine(folder, clock, [Card(view=("all", "none")[seed % 2])], locks=folder, quiet=True, recheck=True)
    machine.life.trial_s = 0.5
    machine.life.crashes = lambda p, c: c.backend == "bad" and p.n % 13 == 0
    machine.life.hangs = lambda p, c: c.backend == "slow" and p.n % 29 == 0
    office = Office(machine, seed)
    late_s = 0.0
    upgraded = jumped = False
    before_upgrade = 0
    while office.passed_s < until_s:
        orders = len(machine.life.orders)
        machine.turn()
        undisturbed_s = office.passed_s - office.disturbed_s
        if len(machine.life.orders) > orders:
            assert undisturbed_s >= IDLE_S - 1, "tuning began on a card that was not clear for long enough"
        late_s = late_s + 0.1 if machine.life.alive and undisturbed_s == 0.0 else 0.0
        assert late_s <= 0.5, "our worker stayed on a card that others wanted"
        office.step(0.1 if machine.life.alive else 0.4 if machine.card_clears() else 4.0)
        if not jumped and office.passed_s > 12 * HOUR:
            jumped = True
            clock.pass_s(-2 * HOUR)
        if not upgraded and office.passed_s > 19 * HOUR:
            upgraded = True
            machine.daemon.stop(clock.now_s)
            before_upgrade = len(machine.store.solutions.published()[1])
            machine.cards[0].more["driver"] = "590.2"
            machine.start()
            raced = len(machine.life.found)
            again = set(machine.life.found)
    solved = machine.store.solutions.published()[1]
    assert len(solved) == office.seen > 50
    assert before_upgrade > 20
    after = machine.life.found[raced:]
    assert again <= set(after), "not all were raced again under the new driver"
    assert len(machine.life.found[:raced]) == len(again), "something was tuned twice with nothing changed"
    assert machine.store.check() == []
    left = machine.store.leases.remaining(machine.environment, now_s=clock.now_s)
    assert (left.leased, left.failed) == (0, 0)
    machine.daemon.stop(clock.now_s)
    machine.store.close()


@pytest.mark.long
@pytest.mark.parametrize("seed", [1])
def test_a_day_in_an_office(tmp_path: Path, seed: int) -> None:
    live(tmp_path, seed, 28 * HOUR)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 8))
def test_three_days_in_an_office(tmp_path: Path, seed: int) -> None:
    live(tmp_path, seed, 3 * DAY)
