"""What a run for a fleet gave, wherever it ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gemmtuned.fleet.bench import Answer
from gemmtuned.fleet.demand import Wanted

Tell = Callable[[int, int, str], None]  # (done, total, what is at work)


@dataclass
class Ran:
    """See the module.

    done: (unit, answer, where).  left: units without one, and why.  lost: what went wrong on the way.  unpublished:
    answers that could not be brought to the URL.  code: 130 or 143 when it was interrupted.
    """

    done: list[tuple[Wanted, Answer, str]] = field(default_factory=list)
    left: list[tuple[Wanted, str]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unpublished: int = 0
    code: int = 0
