"""Another host's result is checked by our own worker: it is raced against torch and goes through the whole gate.

Only what wins here is installed, with the times and errors measured here; so no row of a stranger is ever published.
That costs one candidate where a search costs dozens.  What loses is refused, and the unit is searched as if nobody had
sent anything.

That torch's own is best names nothing to race, and whoever says so wrongly would have others go without a kernel.  It
is believed when the fastest of the trials that came with it, and the first few of our own candidates, lose here too.
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

OWN: Final = 8  # of our own candidates that are raced before it is believed that torch's own is best
NEAR: Final = 1.05  # a smaller gain where torch was best elsewhere is how two cards differ: it is used, not searched


@dataclass
class Check:
    """One result at its check. work: the lease it is checked under."""

    work: Work
    result: ForeignResult
    _said: dict[Candidate, str] = field(default_factory=dict)

    @classmethod
    def of(cls, work: Work, results: Sequence[ForeignResult]) -> Check | None:
        """The check of the first of these that holds a solution; None when there is none."""
        return next((cls(work, one) for one in results if one.solutions), None)

    def options(self, options: SearchOptions) -> SearchOptions:
        """What the worker is to try: what was sent, beside torch's own, which always is raced.

        Where torch is said to be best, in one mode or in all: also the fastest trials that were sent, and OWN of ours.
        """
        named = dict.fromkeys(one.candidate for one in self.result.solutions if one.backend != DEFAULT_BACKEND)
        if all(one.backend != DEFAULT_BACKEND for one in self.result.solutions):
            return replace(options, only=tuple(named), seeds=tuple(named))
        seeds = tuple({**named, **dict.fromkeys((*self.result.seeds, *options.seeds))})
        return replace(options, seeds=seeds, first=len(seeds) + OWN)

    def note(self, trial: Trial) -> None:
        """Remember how a candidate fared."""
        self._said[trial.candidate] = " ".join(filter(None, (trial.outcome, trial.note)))

    def against(self, found: Sequence[Solution]) -> str:
        """Why the verdicts found here, one per mode, are not those that were sent; "" when they are."""
        return next(filter(None, map(self._against, found)), "")

    def _against(self, found: Solution) -> str:
        sent = next((one for one in self.result.solutions if one.mode == found.mode), self.result.solutions[0])
        if found.candidate == sent.candidate:
            return ""
        if sent.backend == DEFAULT_BACKEND:
            gain = found.baseline_us / found.us
            return "" if gain < NEAR else f"torch's own is not best here: {found.candidate} is {gain:.2f}x as fast"
        how = self._said.get(sent.candidate, "not tried")
        return f"{sent.candidate} does not win here ({how}): {found.candidate} does"
