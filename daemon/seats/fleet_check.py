"""Another host's result, checked by our own worker: raced against torch through the whole gate, and nothing beside it.

Only what wins here is installed, with the times and errors measured here; so no row of a stranger is ever published.
That costs one candidate where a search costs dozens.  What loses is refused, and the unit is searched as if nobody had
sent anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gemmtuned.configs.solution import DEFAULT_BACKEND, Candidate, Solution
from gemmtuned.daemon.protocol.wire import Trial

if TYPE_CHECKING:
    from gemmtuned.db.fleet import ForeignResult
    from gemmtuned.db.store import Work


@dataclass
class Check:
    """One result at its check. work: the lease it is checked under."""

    work: Work
    result: ForeignResult
    _said: dict[Candidate, str] = field(default_factory=dict)

    @classmethod
    def of(cls, work: Work, results: Sequence[ForeignResult]) -> Check | None:
        """The check of the first of these; None when there is none."""
        return next((cls(work, one) for one in results if one.solutions), None)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """What it names, beside torch's default, which always is raced."""
        named = dict.fromkeys(solution.candidate for solution in self.result.solutions)
        return tuple(one for one in named if one.backend != DEFAULT_BACKEND)

    def note(self, trial: Trial) -> None:
        """Remember how a candidate fared."""
        self._said[trial.candidate] = " ".join(filter(None, (trial.outcome, trial.note)))

    def against(self, found: Solution) -> str:
        """Why the verdict found here is not the one that was sent; "" when it is."""
        sent = next((one for one in self.result.solutions if one.mode == found.mode), self.result.solutions[0])
        if found.candidate == sent.candidate:
            return ""
        how = self._said.get(sent.candidate, "not tried")
        return f"{sent.candidate} does not win here ({how}): {found.candidate} does"
