"""A daemon on faked GPUs in faked time, with the real store and the real rules of attribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fake_gpu import CONTEXT, Card, FakeSampler
from fakes import Clock, Life

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Environment
from gemmtuned.daemon.device.attribution import OwnUse
from gemmtuned.daemon.device.gpus import GpuMonitor
from gemmtuned.daemon.device.idle import Reading
from gemmtuned.daemon.service.service import Daemon
from gemmtuned.daemon.status_file import read_notice
from gemmtuned.db.store import Store


class Watched(GpuMonitor):
    """Shows our worker on the card as a driver would: a context once it has said hello, full use at an order."""

    def __init__(self, card: Card, **options: Any) -> None:
        super().__init__(FakeSampler(card), card.facts(), **{"mps": lambda: False, **options})  # type: ignore[arg-type]
        self.card = card

    def read(self, now_s: float, own: OwnUse | None = None) -> Reading:
        self.card.programs = [p for p in self.card.programs if p.pid < 10_000]
        if own is not None and own.memory_bytes is not None:
            self.card.start(own.pid, held=CONTEXT + own.memory_bytes, share=0.9 if own.working else 0.0)
        return super().read(now_s, own)


class Machine:
    """A daemon on some cards."""

    def __init__(self, folder: Path, clock: Clock, cards: list[Card], *, locks: Path, **options: Any) -> None:
        self.settings = Settings.from_env({"GEMMTUNED_HOME": str(folder), "GEMMTUNED_DEVICE_LOCKS": str(locks)})
        self.clock = clock
        self.cards = cards
        self.store = Store(self.settings.db, locks=self.settings.locks)
        self.mps = False
        self.known = 0
        self.by_device: dict[str, int] = {}
        device = Watched(cards[0]).device
        self.environment = Environment(device, {"torch": "1", "slow": "1", "fast": "1", "bad": "1"})
        self.life = Life(clock, environment=self.environment)
        self.options = options
        self.start()

    def start(self) -> None:
        """A new daemon, which looks at the cards anew."""
        self.monitors = [Watched(card, mps=lambda: self.mps) for card in self.cards]
        make = self.life.make

        def counted(device: str) -> Any:
            self.by_device[device] = self.by_device.get(device, 0) + 1
            worker = make(device)
            worker.memory_bytes = None
            return worker

        self.daemon = Daemon(
            self.settings, self.store, self.monitors, counted, now_s=self.clock.now_s, **self.options
        )  # fmt: skip
        self.daemon.resume(self.clock.now_s)

    def see(self, count: int, *, begin: int = 0) -> None:
        sightings = [Sighting(Problem(m=8, n=64 + i, k=64, threads=0), "miss", 10) for i in range(begin, count)]
        self.store.sightings.add("serve", self.environment, sightings, now_s=self.clock.now_s)

    def see_more(self, count: int) -> None:
        """Problems nobody has seen before."""
        self.known += count
        self.see(self.known, begin=self.known - count)

    def lose(self, gone: bool) -> None:
        """The driver no longer lists the cards, or does again."""
        for monitor, card in zip(self.monitors, self.cards, strict=True):
            monitor._sampler.cards = () if gone else (card,)  # type: ignore[attr-defined]

    def card_clears(self) -> bool:
        """Whether a device is about to count as idle, and work waits: what comes next takes parts of a second."""
        return any(seat._view.idleness.state != "busy" and not seat.out_of_work for seat in self.daemon.seats)

    def turn(self) -> None:
        for worker in self.life.alive:  # what the real worker says with its first word
            if worker.environment is not None and worker.memory_bytes is None:
                worker.memory_bytes = 0
        self.daemon.turn(self.clock.now_s)

    def run(self, seconds: float) -> None:
        end_s = self.clock.now_s + seconds
        while self.clock.now_s < end_s:
            self.turn()
            self.clock.pass_s(0.1)

    def reason(self) -> str:
        notice = read_notice(self.settings.home)
        assert notice is not None
        return str(notice["reason"])
