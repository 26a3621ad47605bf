"""Another host's result is checked by our own worker: its kernel is raced against torch's and passes the whole gate.

Only what wins here is installed, with the times and errors measured here; so no row of another host is ever published
as it came.  A check costs one candidate where a search costs dozens.  A result that loses is refused, and the unit is
searched as if nobody had sent anything.

A result may also say that torch's own is best.  That names no kernel to race, and a host that is wrong about it would
keep all others from a faster one.  So the worker races the fastest candidates of that host's trials, and the first few
of our own: the result is accepted when all of them lose to torch's here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.solution import DEFAULT_BACKEND, Candidate, Solution
from gemmtuned.daemon.protocol.options import SearchOptions
from gemmtuned.daemon.protocol.wire import Trial

if TYPE_CHECKING:
    from gemmtuned.db.fleet import ForeignResult
    from gemmtuned.db.store import Work

OWN: Final = 8  # candidates of our own that are raced before "torch's own is best" is accepted
NEAR: Final = 1.05  # a gain below this, where torch was best elsewhere, is how two cards differ: no new search for it


@dataclass
class Check:
    """One result while it is checked. work: the leased unit."""

    work: Work
    result: ForeignResult
    _outcomes: dict[Candidate, str] = field(default_factory=dict)

    @classmethod
    def of(cls, work: Work, results: Sequence[ForeignResult]) -> Check | None:
        """The check of the first of these results that holds a solution; None when none does."""
        return next((cls(work, one) for one in results if one.solutions), None)

    def options(self, options: SearchOptions) -> SearchOptions:
        """`options`, changed so that the worker tries the candidates that were sent, beside torch's own.

        Where the result says that torch is best, in one mode or in all: also the fastest trials that were sent, and OWN
        of our own candidates.
        """
        named = dict.fromkeys(one.candidate for one in self.result.solutions if one.backend != DEFAULT_BACKEND)
        if all(one.backend != DEFAULT_BACKEND for one in self.result.solutions):
            return replace(options, only=tuple(named), seeds=tuple(named))
        seeds = tuple({**named, **dict.fromkeys((*self.result.seeds, *options.seeds))})
        return replace(options, seeds=seeds, first=len(seeds) + OWN)

    def note(self, trial: Trial) -> None:
        """Remember how a candidate fared."""
        self._outcomes[trial.candidate] = " ".join(filter(None, (trial.outcome, trial.note)))

    def refusal(self, found: Sequence[Solution]) -> str:
        """Why the verdicts found here, one per mode, contradict those that were sent; "" when they do not."""
        return next(filter(None, map(self._refusal, found)), "")

    def _refusal(self, found: Solution) -> str:
        sent = next((one for one in self.result.solutions if one.mode == found.mode), self.result.solutions[0])
        if found.candidate == sent.candidate:
            return ""
        if sent.backend == DEFAULT_BACKEND:
            gain = found.baseline_us / found.us
            return "" if gain < NEAR else f"torch's own is not best here: {found.candidate} is {gain:.2f}x as fast"
        how = self._outcomes.get(sent.candidate, "not tried")
        return f"{sent.candidate} does not win here ({how}): {found.candidate} does"
