"""A flusher whose counts are made by hand, and how many of them have reached its store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hooked import LINEAR, Home
from store_cases import NEW

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.sighting import Session, Sighting
from gemmtuned.configs.solution import Environment
from gemmtuned.db.lockfile import LockFile
from gemmtuned.hooks import phase
from gemmtuned.hooks.flush import Flusher
from gemmtuned.kernels.device import device_at


class Counted:
    """A flusher over counts made by hand."""

    def __init__(self, home: Path, **settings: Any) -> None:
        self.waiting: list[Sighting] = []
        self.aside: list[Sighting] = []
        values = {"capture": True, "home": home, "db": home / "tune.db", "config_dir": home / "configs", **settings}
        self.settings = Settings(cache=home / "cache", run="test", **values)
        self.ticks = 0
        self.compiled: list[tuple[Problem, str, str]] = []  # given at every flush
        self.flusher = Flusher(
            self.settings, drain=self.drain, set_aside=self.set_aside, environment=self.environment,
            session=self.session, tick=self.tick, keep=self.settings.capture, compiled=lambda: self.compiled,
        )  # fmt: skip

    def environment(self, place: str) -> Environment:
        if place != "cpu":
            device_at(place)  # raises
        return NEW

    def drain(self) -> Iterator[Sighting]:
        self.set_aside(phase.current())
        while self.aside:
            yield self.aside.pop()

    def set_aside(self, ends: str) -> None:
        while self.waiting:
            self.aside.append(replace(self.waiting.pop(), phase=ends))

    def session(self) -> Session:
        return Session(host="h", pid=1, started_us=1, run="test", path="native", generation=0, calls=self.flusher.calls)

    def tick(self) -> None:
        self.ticks += 1

    def call(self, calls: int = 1, m: int = 4, place: str = "cpu") -> None:
        self.waiting.append(Sighting(LINEAR.with_m(m), "miss", calls, place=place))

    def lock(self) -> LockFile:
        """The store's lock, as another program would hold it."""
        lock = LockFile(self.settings.locks / "tune.db.lock")
        assert lock.acquire(1.0)
        return lock


def stored(counted: Counted) -> int:
    return Home(counted.settings.home, counted.settings.cache).calls()
