"""Candidates with planted times and results, in place of the backends' own."""

from __future__ import annotations

import planted_kernels as planted
from planted_kernels import Planted

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Environment, Solution, cpu_device
from gemmtuned.daemon.child import last_check
from gemmtuned.daemon.child.search import tune_modes
from gemmtuned.daemon.protocol.options import SearchOptions
from gemmtuned.daemon.protocol.wire import Trial
from gemmtuned.kernels import backends as registry
from gemmtuned.kernels.backends import BACKENDS

PROBLEM = Problem(m=4, n=16, k=32, dtype="fp32", threads=1)


class Table:
    """A registry of torch and planted backends, and a search over it under a made-up clock."""

    def __init__(self, monkeypatch) -> None:
        self.monkeypatch = monkeypatch
        self.backends = {"torch": BACKENDS["torch"]}
        self.reports: list[Trial] = []
        monkeypatch.setattr(registry, "BACKENDS", self.backends)
        monkeypatch.setattr(last_check, "OFTEN_S", 0.02)
        monkeypatch.setattr(last_check, "THREADS_S", 0.02)
        monkeypatch.setattr("gemmtuned.daemon.child.search.BACKENDS", self.backends)

    def plant(self, name: str, kernel=planted.right) -> Planted:
        self.backends[name] = Planted(name, kernel)
        return self.backends[name]

    def tune(self, clock, members=(PROBLEM,), covers="exact", target=None, skip=(), seed=1, **options) -> Solution:
        environment = Environment(cpu_device(), dict.fromkeys(self.backends, "1"))
        self.reports.clear()
        return tune_modes(
            members, covers, target or members[0], environment, mode="eager", skip=skip, emit=self.reports.append,
            clock=clock, seed=seed, options=SearchOptions(**options),
        )[0]  # fmt: skip

    def phases(self, name: str) -> list[tuple[str, str]]:
        return [(r.phase, r.outcome) for r in self.reports if r.candidate.backend == name]
