"""Calls that a solution is there for and does not serve.

Of engines' operators, which run the engine's own kernel, since the solution was not raced beside it; and with operands
that its kernel does not take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from gemmtuned.configs.engine_races import ENGINES, peers_of
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.reports.render import Row, several

UNRACED_FIX: Final = "run the daemon in the environment that the engine is installed in"
_OLDER_FIX: Final = "run the daemon in the environment of the program"


def unfit_notes(rows: Sequence[Row]) -> list[str]:
    """What is to be said of problems in the view `unfit`."""
    if not rows:
        return []
    problems = sorted({row["problem"] for row in rows})
    its = "its" if len(problems) == 1 else "their"
    return [
        f"{several(len(problems), 'problem is', 'problems are')} called with operands, too, that {its} solution's "
        f"kernel does not take (how they lie, where they begin): those calls run without it. For example {problems[0]}"
    ]


def unfit_of(problems: Iterable[Problem], rows: Iterable[Row]) -> list[str]:
    """The same of each of these problems."""
    asked = set(map(str, problems))
    return [
        f"{row['problem']}: programs call it with operands, too, that {Candidate(row['backend'], row['config'])} does "
        "not take: X or W lies with gaps, or begins where its kernel cannot read; those calls run without it"
        for row in rows
        if row["problem"] in asked
    ]


def unraced_notes(rows: Sequence[Row]) -> list[str]:
    """One line for each operator and reason; rows of the view `unraced`."""
    return [f"{found}. {_way_out(fix)}" if fix else found for found, fix in unraced_found(rows)]


def unraced_found(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The same as (what was found, how to mend it); the latter is "" where nothing is to be done."""
    problems = Counter((operator, *_reason(operator, row)) for row in rows for operator in row["operators"].split())
    return [
        (
            f"{operator} runs its own kernel for {several(number, 'problem')} that {'has' if number == 1 else 'have'} "
            f"a faster one than torch's: {'it was' if number == 1 else 'they were'} {reason}",
            fix,
        )
        for (operator, reason, fix), number in sorted(problems.items())
    ]


def unraced_of(problems: Iterable[Problem], rows: Iterable[Row]) -> list[str]:
    """The same of each of these problems."""
    asked = set(map(str, problems))
    found = {
        (row["problem"], operator, *_reason(operator, row))
        for row in rows
        if row["problem"] in asked
        for operator in row["operators"].split()
    }
    return [
        f"{problem}: calls of {operator} run its own kernel, for the solution was {reason}"
        + (f": {fix}" if fix else "")
        for problem, operator, reason, fix in sorted(found)
    ]


def _reason(operator: str, row: Row) -> tuple[str, str]:
    """Beside what the solution was raced or not, and how to mend it.

    Another version may have reported an operator that this one does not know.
    """
    engine = ENGINES.get(operator)
    if engine is None:
        return "not raced beside its kernel", UNRACED_FIX
    package, peers = engine.packages[0], peers_of(row["beside"])
    here = [peers[name] for name in engine.backends if name in peers]
    raced = sorted({peer.version for peer in here if peer.low is not None})
    if raced:
        return f"raced beside that of {package} {' and '.join(raced)}, and the program has another one", _OLDER_FIX
    if here:
        return f"raced where that of {package} {here[0].version} does not run this problem", ""
    return f"not raced beside that of {package}", UNRACED_FIX


def _way_out(fix: str) -> str:
    where = "that is installed" if fix == UNRACED_FIX else "the program runs"
    return f"A daemon that runs where {where} races them"
