"""Calls of engines' operators that run the engine's own kernel, since the solution was not raced beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from gemmtuned.configs.beside import ENGINES
from gemmtuned.reports.render import Row, several

UNRACED_FIX: Final = "run the daemon in the environment that the engine is installed in"


def unraced_notes(rows: Sequence[Row]) -> list[str]:
    """One line for each operator; rows of the view `unraced`."""
    problems = Counter(operator for row in rows for operator in row["operators"].split())
    return [
        f"{operator} runs its own kernel for {several(number, 'problem')} that {'has' if number == 1 else 'have'} a "
        f"faster one than torch's: {'it was' if number == 1 else 'they were'} not raced beside {_whose(operator)}. "
        "A daemon that runs where that is installed races them"
        for operator, number in sorted(problems.items())
    ]


def unraced_of(problem: str, rows: Iterable[Row]) -> list[str]:
    """The same of one problem."""
    names = sorted({operator for row in rows if row["problem"] == problem for operator in row["operators"].split()})
    return [
        f"{problem}: calls of {operator} run its own kernel, for the solution was not raced beside {_whose(operator)}: "
        f"{UNRACED_FIX}"
        for operator in names
    ]


def _whose(operator: str) -> str:
    """The package of an operator; another version may have reported one that this one does not know."""
    engine = ENGINES.get(operator)
    return f"that of {engine.packages[0]}" if engine is not None else "its kernel"
