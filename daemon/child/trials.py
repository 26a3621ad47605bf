"""CHILD side: what the parent gets of each candidate's trials."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.protocol.wire import COMPILING, MAY_COMPILE, RACING, Trial
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.other_packages import GUESTS

Emit = Callable[[Trial], None]


@dataclass(frozen=True, slots=True)
class Trials:
    """problem: under which they are reported."""

    problem: Problem
    emit: Emit

    def compiling(self, candidate: Candidate) -> None:
        """It is being compiled."""
        self.emit(Trial(self.problem, candidate, "start", None, None, "ok", COMPILING, now_us()))

    def start(self, candidate: Candidate) -> int:
        """It is tried from now on, which is what is returned: if the worker dies, it died of this one."""
        started = now_us()
        note = MAY_COMPILE if getattr(BACKENDS.get(candidate.backend), "compiles", False) else ""
        self.emit(Trial(self.problem, candidate, "start", None, None, "ok", note, started))
        return started

    def lacking(self, is_asked_for: Callable[[str], bool] = lambda backend: True) -> None:
        """Report backends of other packages that run the problem, and whose import fell short of something passing.

        is_asked_for: whether the search would try candidates of this backend.
        """
        for name, why in filter(lambda one: is_asked_for(one[0]), tuple(GUESTS.lacking.items())):
            suits = getattr(BACKENDS.get(name), "suits", None)
            if suits is not None and GUESTS.ask(name, f"backend {name}", "", partial(suits, self.problem), False):
                self.report(Candidate(name), "screen", "refused", now_us(), note=why)

    def racing(self, candidate: Candidate) -> None:
        """It races with another candidate: if the worker dies, it died of one of the two."""
        self.emit(Trial(self.problem, candidate, "start", None, None, "ok", RACING, now_us()))

    def report(
        self,
        candidate: Candidate,
        phase: str,
        outcome: str,
        started_us: int,
        *,
        us: float | None = None,
        err: float | None = None,
        note: str = "",
        err_ratio: float | None = None,
    ) -> None:
        """What a trial gave."""
        self.emit(Trial(self.problem, candidate, phase, us, err, outcome, note, started_us, err_ratio))


def now_us() -> int:
    """UTC microseconds."""
    return time.time_ns() // 1000
