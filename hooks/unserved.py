"""Calls of engines' operators that a solution could serve, had it been raced beside the engine's own kernel.

The native hook notes them with the counts, a bit for each operator.  The daemon is told once for each problem and
operator with each table, since the next table may have such a solution.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.beside import BACKENDS, ENGINES, FIRST_OF_GOOD, OPERATORS, standing
from gemmtuned.configs.problem import Problem
from gemmtuned.hooks.dispatch import installed_version

if TYPE_CHECKING:
    from gemmtuned.configs.sighting import Sighting
    from gemmtuned.configs.solution import Solution

MOST: Final = 4096  # that are remembered
_Note = tuple[Problem, str, str]


class Unserved:
    """What was noted and not told yet: (problem, operator, place)."""

    def __init__(self) -> None:
        self._new: dict[_Note, None] = {}
        self._told: set[int] = set()  # hashes: the collector counts none of them
        self._generation = 0

    def note(self, sighting: Sighting, generation: int) -> None:
        """Note what a sighting says. generation: of the table in use."""
        if generation != self._generation:
            self._told, self._generation = set(), generation
        for operator in (name for at, name in enumerate(OPERATORS, 1) if sighting.unserved >> at & 1):
            one = sighting.problem, operator, sighting.place
            if len(self._told) < MOST and hash(one) not in self._told:
                self._told.add(hash(one))
                self._new[one] = None

    def take(self) -> Iterator[_Note]:
        """What came since the last time."""
        while self._new:
            yield self._new.popitem()[0]


def engines_of(solution: Solution) -> int:
    """The bits of `Engines` in hooks/native/routes.h: in whose operators' place the solution may run here."""
    if not solution.beside and solution.backend not in BACKENDS:
        return 0
    bits = 0
    for at, operator in enumerate(OPERATORS, 1):
        found = standing(operator, solution.backend, solution.beside, _version_of(operator))
        if found.raced:
            bits |= 1 << (at if found.won else FIRST_OF_GOOD + at)
    return bits


@cache
def _version_of(operator: str) -> str | None:
    """The version of the package of an engine's operator in this process; None where it has none."""
    return next(filter(None, map(installed_version, ENGINES[operator].packages)), None)
