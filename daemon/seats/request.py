"""What somebody in the foreground asked to have tuned now, and what has come of it so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.few_cpus import too_few
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device, Solution
from gemmtuned.configs.tunable import why_not
from gemmtuned.daemon.protocol.options import SearchOptions
from gemmtuned.db.abilities import reason

if TYPE_CHECKING:
    from gemmtuned.daemon.protocol.wire import Trial

HOPELESS: Final = 5  # after this many in a row that could not be timed the rest is not tried


@dataclass(kw_only=True)
class Request:
    """One run of tuning in the foreground, shared by the queues of all devices.

    again: also what has a verdict already.  timeout_s: how long one candidate may take; None is the worker's own limit.
    on_trial, on_found: called once the store holds it, so whatever they write is never ahead of it.

    found: verdicts of this run; unpublished: those that are none for others; crowded: those measured beside others,
    which a daemon measures again.  settled: what it has come to an end with.
    refused: why these cannot be tuned here, which it has come to an end with from the start.
    put_off: why no times could be taken now; nothing is stored of these.  After HOPELESS in a row all that is left is.
    rejected: where a candidate was outside the tolerance that was asked for.  too_slow: candidates that ran into
    timeout_s, left out for the rest of this run only: somebody with more patience may try them again.
    """

    problems: Sequence[Problem]
    options: SearchOptions = field(default_factory=SearchOptions)
    again: bool = False
    timeout_s: float | None = None
    on_trial: Callable[[Trial, Device], object] = lambda trial, device: None
    on_found: Callable[[Sequence[Solution], Device], object] = lambda found, device: None
    found: dict[Problem, Solution] = field(default_factory=dict)
    settled: set[Problem] = field(default_factory=set)
    put_off: dict[Problem, str] = field(default_factory=dict)
    rejected: set[Problem] = field(default_factory=set)
    unpublished: set[Problem] = field(default_factory=set)
    crowded: set[Problem] = field(default_factory=set)
    too_slow: set[tuple[Problem, Candidate]] = field(default_factory=set)
    refused: dict[Problem, str] = field(init=False)
    _in_a_row: int = 0  # put off

    def __post_init__(self) -> None:
        self.refused = {p: reason(p) for p in self.problems if why_not(p) or too_few(p)}
        self.settled.update(self.refused)

    def open(self) -> list[Problem]:
        """The problems that this run has not come to an end with."""
        return [p for p in self.problems if p not in self.settled]

    def left_out(self, members: Sequence[Problem]) -> bool:
        """Whether a search without limits might have chosen what was not tried, or not taken, at these sizes."""
        slow = any(problem in members for problem, _ in self.too_slow)
        return self.options.is_restricted or slow or any(problem in members for problem in self.rejected)

    def settle(
        self, problem: Problem, covers: str, solution: Solution | None, *, published: bool = True, put_off: str = ""
    ) -> None:
        """This unit of work is done with, for all of its problems; solution: its verdict, if it has one."""
        for asked in self.problems:
            if asked.filed(covers) == problem:
                self.settled.add(asked)
                if put_off:
                    self.put_off[asked] = put_off
                if solution is not None:
                    self.found[asked] = solution
                    self.put_off.pop(asked, None)
                    if not published:
                        self.unpublished.add(asked)
        self._in_a_row = self._in_a_row + 1 if put_off else 0
        if self._in_a_row == HOPELESS:
            left = self.open()
            self.settled.update(left)
            self.put_off |= dict.fromkeys(left, f"not tried, since {HOPELESS} in a row were put off")
