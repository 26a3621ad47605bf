"""Calls that a solution is there for and does not serve, for one of two reasons.

An engine's operator is called, beside whose kernel the solution was not raced; or its kernel does not take the operands
(how they lie, where they begin).  The native hook notes both with the counts, a bit for each operator, and the lowest
one for operands.  The daemon is told once for each problem and operator with each table, since the next table may have
such a solution.  A call that was made before the table in use came says nothing of it: what that table has is asked
first, and told with its generation, since the store may already have a solution that is not in use here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.engine_races import BACKENDS, ENGINES, FIRST_OF_GOOD, OPERANDS, OPERATORS, standing
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import DEFAULT_BACKEND
from gemmtuned.hooks.dispatch import Table, installed_version

if TYPE_CHECKING:
    from gemmtuned.configs.sighting import Sighting
    from gemmtuned.configs.solution import Solution

MOST: Final = 4096  # that are remembered
Note = tuple[Problem, str, str, int]  # problem, engine's operator, place, generation of the table


class Unserved:
    """What was noted and not told yet."""

    def __init__(self) -> None:
        self._new: dict[Note, None] = {}
        self._told: set[int] = set()  # hashes: the collector counts none of them
        self._generation = 0

    def note(self, sighting: Sighting, table: Table) -> None:
        """Note what a sighting says. table: that in use."""
        if table.generation != self._generation:
            self._told, self._generation = set(), table.generation
        for at, operator in enumerate((OPERANDS, *OPERATORS)):
            if not sighting.unserved >> at & 1:
                continue
            one = sighting.problem, operator, sighting.place, table.generation
            if len(self._told) < MOST and hash(one) not in self._told:
                self._told.add(hash(one))
                if _waits(at, sighting, table):
                    self._new[one] = None

    def take(self) -> Iterator[Note]:
        """What came since the last time."""
        while self._new:
            yield self._new.popitem()[0]


def _waits(number: int, sighting: Sighting, table: Table) -> bool:
    """Whether the operator with this number finds a solution here that may not serve it, and that it might lose to.

    0: whether there is any solution for such operands.
    """
    solution = table.find(sighting.problem, "graph" if sighting.graph else "eager", sighting.place)[1]
    if solution is None or solution.backend == DEFAULT_BACKEND:
        return False
    if not number:
        return True
    return not engines_of(solution) & (1 << number | 1 << FIRST_OF_GOOD + number)


def engines_of(solution: Solution) -> int:
    """The bits of `Engines` in hooks/native/routes.h: instead of whose operators the solution may run here."""
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
