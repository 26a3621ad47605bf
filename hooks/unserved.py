"""Calls of problems that have a solution, and that it did not serve, for one of two reasons.

Either the call was one of an engine's operator, and the solution was not raced beside that engine's kernel; or the
solution's kernel does not take these operands (their strides, their addresses).  The native hook notes both with the
counts: one bit for each operator, and the lowest bit for operands.  What it noted is reported to the daemon once for
each problem, operator and table, since the next table may have a solution that serves.

A call may have been made before the table in use came, and then says nothing about this table.  So the table is asked
first whether it has such a solution.  The report names the generation of the table, since the store may already have a
better solution that this program has not taken up.
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

MOST: Final = 4096  # reports that are remembered, so as not to be repeated
Note = tuple[Problem, str, str, int]  # problem, engine's operator, place, generation of the table


class Unserved:
    """Reports that were not taken yet, each once per table."""

    def __init__(self) -> None:
        self._new: dict[Note, None] = {}
        self._reported: set[int] = set()  # hashes, which cost the garbage collector nothing
        self._generation = 0

    def note(self, sighting: Sighting, table: Table) -> None:
        """Note what a sighting says. table: the one in use."""
        if table.generation != self._generation:
            self._reported, self._generation = set(), table.generation
        for at, operator in enumerate((OPERANDS, *OPERATORS)):
            if not sighting.unserved >> at & 1:
                continue
            report = sighting.problem, operator, sighting.place, table.generation
            if len(self._reported) < MOST and hash(report) not in self._reported:
                self._reported.add(hash(report))
                if _waits(at, sighting, table):
                    self._new[report] = None

    def take(self) -> Iterator[Note]:
        """The reports that came since the last time."""
        while self._new:
            yield self._new.popitem()[0]


def _waits(number: int, sighting: Sighting, table: Table) -> bool:
    """Whether the table has a solution for this problem that has never been raced beside the operator's kernel.

    number: of the operator, from 1 on.  0, for operands: whether the table has a kernel for the problem at all.
    """
    solution = table.find(sighting.problem, "graph" if sighting.graph else "eager", sighting.place)[1]
    if solution is None or solution.backend == DEFAULT_BACKEND:
        return False
    if not number:
        return True
    return not engines_of(solution) & (1 << number | 1 << FIRST_OF_GOOD + number)


def engines_of(solution: Solution) -> int:
    """The bits of `Engines` in hooks/native/routes.h: how the solution's races with engines' kernels have ended."""
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
