"""Why a GEMM runs what it runs: the look-up of a problem, step by step, wherever it was seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from gemmtuned.configs.human_units import duration
from gemmtuned.configs.padding import fine_step
from gemmtuned.configs.problem import Problem, known_problems
from gemmtuned.configs.solution import Candidate
from gemmtuned.configs.tunable import why_not
from gemmtuned.db.abilities import reason
from gemmtuned.reports.environments import abridged
from gemmtuned.reports.gains import EVERY_M
from gemmtuned.reports.render import TIMES, Column, Report, Row, Table

MOST: Final = 20  # problems explained at once

_COLUMNS: Final = (
    Column("step", "step", right=False),
    Column("m", "M"),
    Column("route", "runs", right=False),
    *TIMES,
    Column("generation", "generation"),
    Column("state", "state", right=False),
    Column("why", "", right=False),
)
_HINTS: Final = (
    Column("m", "M"),
    Column("route", "named", right=False),
    Column("us", "there", duration),
    Column("arch", "on", right=False),
    Column("source", "file", right=False),
    Column("line", "line"),
)


def matching(seen: Sequence[Row], wanted: dict[str, Any]) -> list[Problem]:
    """The problems of rows with problem columns that have these values, each once."""
    return known_problems(row for row in seen if all(row[name] == value for name, value in wanted.items()))


def report(
    steps: Sequence[tuple[Problem, Sequence[Row]]],
    solutions: Sequence[Row],
    hints: Sequence[Row] = (),
    elsewhere: Mapping[Problem, Sequence[int]] | None = None,
    more: Sequence[str] = (),
    *,
    asked: str,
) -> Report:
    """steps: problem and what queries.explain says of it, [] when it was never seen. solutions: the live ones.

    hints: imported rows for these problems; shown, since one of a library that is not here is never tried.  elsewhere:
    of problems that run stock torch, with how many CPU threads they have a solution.  more: notes.
    """
    tables: list[Table] = []
    lines: list[str] = []
    if not steps:
        lines.append(f"{asked} was never seen: run a program that calls it with GEMMTUNED=1.")
    short = abridged(row["environment"] for _, rows in steps[:MOST] for row in rows)
    for problem, rows in steps[:MOST]:
        if not rows:
            lines.append(_unseen(problem, solutions))
        for environment, group in groupby(rows, key=lambda row: row["environment"]):
            shown = [_row(problem, row) for row in group]
            queue = next((row["why"] for row in shown if row["covers"] == "queue"), "")
            chosen = next((row for row in shown if row["chosen"]), None)
            runs = f"runs {chosen['route']}" if chosen else "runs stock torch"
            table = [row for row in shown if row["covers"] != "queue"]
            title = f"{problem} {runs}. {queue[:1].upper()}{queue[1:]}.\n  in {short[environment]}"
            filed = any(row["route"] for row in table)
            nothing = f"{title}\n  no solution is filed for M = {problem.m} or for what it is rounded up to"
            tables.append(Table("rows", _COLUMNS, table, title=title, instead="" if filed else nothing))
    notes = [f"{len(steps) - MOST} more problems match: name one as reports spell it."] if len(steps) > MOST else []
    notes += more
    for problem, threads in list((elsewhere or {}).items())[:MOST]:
        if threads:
            counts = " and ".join(map(str, threads))
            notes.append(
                f"{problem} has a solution with {counts} thread{'s' * (threads != [1])}: one for {problem.threads} is "
                f"another. Run with that many (OMP_NUM_THREADS), or tune it: gemmtuned tune '{problem}'"
            )
    if any(problem.batch_invariant for problem, _ in steps):
        notes.append(
            "Batch-invariant: asked for by a program that wants a row to have the same bits in every batch; one "
            "solution, proven so, serves every M, and without one torch's own runs."
        )
    if any(not table.instead for table in tables) and not all(problem.batch_invariant for problem, _ in steps):
        notes.append(
            "Looked up in this order: the size itself, then M rounded up to a multiple of 16 (of 32 above 256, 64 "
            "above 1024, 128 above 4096), then to a power of two; up to 16 that is the smaller step."
        )
    seeds = [{**row, "route": str(Candidate(row["backend"], row["config"]))} for row in hints]
    title = "Imported tables name for these sizes or others near them, to be tried first where the library is here:"
    return Report(
        "explain",
        [*(tables or [Table("rows", _COLUMNS, ())]), Table("hints", _HINTS, seeds, title=title)],
        facts={"problems": [str(problem) for problem, _ in steps]},
        lines=lines,
        notes=notes,
    )


def _row(problem: Problem, row: Row) -> dict[str, Any]:
    route = str(Candidate(row["backend"], row["config"])) if row["backend"] else None
    speedup = row["baseline_us"] / row["us"] if row["us"] else None
    return {
        "problem": str(problem), **row, "step": _step(problem, row["covers"]), "route": route, "speedup": speedup,
    }  # fmt: skip


def _step(problem: Problem, covers: str) -> str:
    """What is looked up: `fine` and `coarse` are AITER's words, and the former is the wider one of small M."""
    if problem.batch_invariant:
        return EVERY_M
    if covers == "fine":
        return f"multiple of {fine_step(problem.m)}"
    return "power of two" if covers == "coarse" else covers


def _unseen(problem: Problem, solutions: Sequence[Row]) -> str:
    """A size nobody called may still be served: by a bucket that was proven over all its sizes."""
    for row in solutions:
        filed = matching([row], {})
        if filed and filed[0] == problem.filed(row["covers"]):
            by = Candidate(row["backend"], row["config"])
            sizes = f"M={row['m']}" if row["covers"] == "exact" else f"sizes up to M={row['m']}"
            where = f"proven for {sizes} on {row['device']}"
            return f"{problem} was never seen; it would run {by}, {where}."
    if why_not(problem):
        return f"{problem} was never seen and runs stock torch: {reason(problem)}."
    return f"{problem} was never seen and runs stock torch. gemmtuned tune '{problem}' tunes it now."
