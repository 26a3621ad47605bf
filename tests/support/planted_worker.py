"""The real search with the kernels of planted_wrong.py among its candidates, for a real worker: `Worker(search=...)`.

Each problem of WRONG has one candidate beside torch: the kernel that is wrong in its way.  Times are made up, so that
each of them wins every race unless it is seen to be wrong; calls are really made, and looked at as ever.  A problem
that is none of theirs has a candidate that is right, which shows that such times do get a kernel published.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device, Environment
from gemmtuned.daemon.child import measure, search
from gemmtuned.daemon.child.measure import Arm
from gemmtuned.daemon.child.worker_main import device_of
from gemmtuned.kernels import backends
from gemmtuned.kernels.backends.base import Kernel, StatelessKernel

sys.path.insert(0, str(Path(__file__).parent))  # loaded by path, in a worker
from planted_base import right
from planted_wrong import WRONG

NAME = "planted"
KERNELS = {(problem.n, problem.k): wrong for wrong in WRONG for problem in wrong.problems}


class _Planted:
    name = NAME

    def __init__(self) -> None:
        self.made: dict[Candidate, Kernel] = {}

    order = 90

    def stamps(self, device: Device) -> dict[str, str]:
        return {self.name: "1"}

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        wrong = KERNELS.get((problem.n, problem.k))
        yield Candidate.of(NAME, way=f"{wrong.kind}: {wrong.name}" if wrong else "right")

    def prepare(self, candidate: Candidate, problem: Problem) -> Kernel:
        if candidate not in self.made:
            ways = {Candidate.of(NAME, way=f"{wrong.kind}: {wrong.name}"): wrong for wrong in WRONG}
            self.made[candidate] = ways[candidate].kernel() if candidate in ways else StatelessKernel(right)
        return self.made[candidate]


class _MadeUpTimes(measure.WallClock):
    """Runs every call, looks at results as ever, and tells times that make planted kernels win."""

    flops = 0

    def us(self, arm: Arm, copies: Sequence[int]) -> float:
        super().us(arm, copies)
        planted = arm.name.startswith(NAME)
        return (20 + self.flops / 3e4) * (0.5 if planted else 1.0) * random.uniform(0.99, 1.01)

    def waited_s(self) -> float | None:
        return None  # and the machine may be in use


for _name in set(backends.BACKENDS) - {"torch"}:
    del backends.BACKENDS[_name]
backends.BACKENDS[NAME] = _Planted()  # type: ignore[assignment]
search.clock_for = lambda device: _MadeUpTimes()  # type: ignore[assignment]


def environment(device: str) -> Environment:
    return backends.environment(device_of(device))


def tune(members: Sequence[Problem], *args: Any, **options: Any) -> Any:
    _MadeUpTimes.flops = members[0].flops
    return search.tune_modes(members, *args, **options)
