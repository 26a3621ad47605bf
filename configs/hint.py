"""A hint: what a row of somebody's table says, in our words where we have them, and as it stood where we do not.

Hints come from other environments.  They are seeds for the search, never run unmeasured.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Final

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import MAX_CONFIG, Candidate, Solution

MAX_ROW: Final = 65_536  # characters of `row`


PLAIN: Final[dict[str, Any]] = {"threads": 0, "math_mode": "ieee", "deterministic": False}


_plain_of: Final = attrgetter(*PLAIN)
_PLAIN: Final = tuple(PLAIN.values())


def plain_case(problem: Problem) -> Problem:
    """What tables tell a problem by: they say nothing of threads, math mode and determinism."""
    if _plain_of(problem) == _PLAIN:
        return problem
    return replace(problem, **PLAIN)


@dataclass(slots=True, kw_only=True)
class Hint:
    """One row of an imported file; it does not change, and is not frozen because 100,000 of them are made at once.

    format, family: of the file, in the file's own words.  kind: `tuned` (names a best candidate) or `untuned`.
    line: of a CSV; of other files the number of the entry.  row: all it says, as JSON.
    problem, candidate: None where ours cannot express it; a candidate's backend may be one we do not have.
    arch, units: `gfx942` and 304 where the row tells, else "" and 0.  us: None without a valid time.
    solution: for files of our own, the whole of it.
    """

    format: str
    family: str
    kind: str
    source: str
    line: int
    row: str
    problem: Problem | None = None
    candidate: Candidate | None = None
    arch: str = ""
    units: int = 0
    us: float | None = None
    solution: Solution | None = None


@dataclass(slots=True, kw_only=True)
class Imported:
    """One file as it was read: rows = len(hints) + rejected.

    reasons: one a rejected row, the first thousand.  kept: why rows that were taken in are no problem of ours, counted:
    they stand in the store as they are.  notes: what a reader should know and that is no fault of a row.
    """

    path: str
    format: str
    family: str
    kind: str
    hints: list[Hint] = field(default_factory=list)
    rejected: int = 0
    reasons: list[str] = field(default_factory=list)
    kept: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    @property
    def used(self) -> int:
        """Rows that became a problem of ours: seeds for a search, or to be tuned."""
        return len(self.hints) - self.kept.total()

    def add(
        self,
        line: int,
        row: Mapping[str, Any] | str,
        *,
        candidate: Candidate | None = None,
        why: str = "",
        **fields: Any,
    ) -> None:
        """Keep a row, or reject one that is longer than can be kept. why: for one without a problem, the reason.

        row: its columns, or their JSON with sorted names.
        """
        text = row if isinstance(row, str) else json.dumps(row, sort_keys=True, separators=(",", ":"))
        config = candidate.config if candidate else ""
        for what, length, most in (("row", len(text), MAX_ROW), ("config", len(config), MAX_CONFIG)):
            if length > most:
                self.reject(f"{self.path} line {line}: a {what} of {length} characters, at most {most} are kept")
                return
        if fields.get("problem") is None:
            self.kept[why or "no problem of gemmtuned's"] += 1
        self.hints.append(
            Hint(
                format=self.format, family=self.family, kind=fields.pop("kind", self.kind), source=self.path, line=line,
                row=text, candidate=candidate, **fields,
            )
        )  # fmt: skip

    def reject(self, reason: str) -> None:
        """Leave a row out."""
        self.rejected += 1
        if len(self.reasons) < 1000:
            self.reasons.append(reason)
