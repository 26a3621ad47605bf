"""Counts of GEMMs that our public ops run where the hook under aten cannot see them: AITER's kernels, fp8 on CPUs.

What ops run through aten is counted there and not here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from gemmtuned.configs.frame_lock import FrameLock
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.processes import own_process
from gemmtuned.configs.sighting import OUTCOMES, Sighting
from gemmtuned.configs.unpatched import builtins
from gemmtuned.hooks.phase import current

__builtins__ = builtins

MAX_PROBLEMS: Final = 65_536
_Key = tuple[Problem, str, str, bool, str]  # problem, place, outcome, graph, phase
_NONE: Final[Counter[_Key]] = Counter()  # nobody adds to it


class OpCounts:
    """Calls by problem and place. A lock is right here: these calls come from Python and cost microseconds anyway."""

    def __init__(self) -> None:
        self.dropped = 0
        self._process = own_process()  # whose calls these are
        self._calls: Counter[_Key] = Counter()
        self._lock = FrameLock()  # a signal's handler may run an op in the middle of one

    def add(self, problem: Problem, place: str, outcome: str = OUTCOMES[0], *, graph: bool = False) -> None:
        """One call; outcome, graph: as of a Sighting. The caller has asked activate.current(), which notices forks."""
        key = problem, place, outcome, graph, current()
        with self._lock:
            if len(self._calls) >= MAX_PROBLEMS and key not in self._calls:
                self.dropped += 1
            else:
                self._calls[key] += 1

    @property
    def has_some(self) -> bool:
        """Whether any came since the last time."""
        return bool(self._calls)

    def drain(self) -> Iterator[Sighting]:
        """All since the last time."""
        for (problem, place, outcome, graph, phase), count in self._taken().items():
            yield Sighting(problem, outcome, count, graph=graph, place=place, phase=phase)

    def _taken(self) -> Counter[_Key]:
        if not self._calls:  # mostly so. Not these themselves: a call may come to them now, and would count twice
            return _NONE
        with self._lock:
            calls, self._calls = self._calls, Counter()
        return calls

    def reset(self) -> None:
        """In a forked child: forget what is the parent's, whose lock may have been held."""
        if self._process == own_process():
            return
        self._lock = FrameLock()
        if self._calls:  # mostly not: to make another would write to more pages, which a child has copied
            self._calls = Counter()
        self.dropped, self._process = 0, own_process()
