"""`gemmtuned explain`: why a GEMM runs what it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gemmtuned.commands import completing
from gemmtuned.commands.options import Json, chosen, problems, seen, settings, threads_option, whole_number
from gemmtuned.configs.padding import COVERS
from gemmtuned.configs.problem import DTYPES, FAMILIES, LAYOUTS, MAX_DIM, WEIGHT_STATES, Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.db.ask import kept_open
from gemmtuned.reports.ask import LONGEST_S
from gemmtuned.reports.explain import MOST, matching, report
from gemmtuned.reports.problem_list import Shape, shape_or_problem
from gemmtuned.reports.render import Report, show
from gemmtuned.reports.source import no_database, of_database
from gemmtuned.reports.unraced import unfit_of, unraced_of


def explain(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="M N K | PROBLEM",
            autocompletion=completing.problems,
            help="8 2048 512, 8x2048x512, or as reports spell it.",
        ),
    ],
    family: Annotated[str | None, chosen(FAMILIES, metavar="NAME", help="dense, batched ...")] = None,
    dtype: Annotated[str | None, chosen(tuple(DTYPES), metavar="NAME", help="bf16, fp32 ...")] = None,
    out_dtype: Annotated[str | None, chosen(tuple(DTYPES), metavar="NAME", help="The same, of the result.")] = None,
    bias: Annotated[bool | None, typer.Option(help="With a bias vector, or without.")] = None,
    layout: Annotated[str | None, chosen(LAYOUTS, metavar="NAME", help="nt is linear's.")] = None,
    weight_state: Annotated[str | None, chosen(WEIGHT_STATES, metavar="NAME", help=", ".join(WEIGHT_STATES))] = None,
    threads: Annotated[int | None, threads_option("CPU threads of the calling process.")] = None,
    batch: Annotated[
        int | None, typer.Option(parser=whole_number(1, MAX_DIM), metavar="N", help="Products in one call.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Why a problem runs what it runs.

    Shows the look-up step by step (exact M, padded M, stock torch) and what is being done about a miss. With M N K,
    every problem of that shape that was seen is explained; the options narrow it down.
    """
    options: dict[str, Any] = {
        "family": family, "dtype": dtype, "out_dtype": out_dtype, "bias": bias, "layout": layout,
        "weight_state": weight_state, "threads": threads, "batch": batch,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    exact, shape = _asked(what, given)
    here = settings()
    if not here.db.exists():
        show(no_database("explain", here, "rows", "hints", problems=[]), as_json=as_json)
        return
    with kept_open(here.db):
        answer, is_known = _answer(here, exact, shape, given, " ".join(what))
    show(answer, as_json=as_json)
    if not is_known:
        raise typer.Exit(1)


def _answer(
    here: Settings, exact: str, shape: dict[str, Any], given: dict[str, Any], asked: str
) -> tuple[Report, bool]:
    """What is shown, and whether any of it was seen."""
    from gemmtuned.db import queries
    from gemmtuned.db.other_threads import tuned_with

    found = problems([exact], here) if exact else matching(seen(here, Shape(**shape)), given)
    steps = [(problem, queries.explain(here.db, problem)) for problem in found]
    hints = [row for problem in found[:MOST] for row in queries.hints(here.db, problem)]
    unseen = [problem for problem, rows in steps if not rows]
    filed = {str(p.filed(covers)) for p in unseen for covers in COVERS}
    solutions = queries.solutions(here.db, problems=filed) if unseen else []
    missed = [problem for problem, rows in steps[:MOST] if not any(row["chosen"] for row in rows)]
    elsewhere = {problem: tuned_with(here.db, problem) for problem in missed}
    more = [
        *unraced_of(found[:MOST], queries.unraced(here.db, since_s=LONGEST_S)),
        *unfit_of(found[:MOST], queries.unfit(here.db, since_s=LONGEST_S)),
    ]
    answer = report(steps, solutions, hints, elsewhere, more, asked=asked)
    return of_database(answer, here), any(rows for _, rows in steps)


def _asked(what: list[str], given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(the problem's spelling, {}) or ("", m, n and k)."""
    asked = shape_or_problem(what)
    if len(asked) != 1:
        raise typer.BadParameter("expected one shape (M N K) or one problem, for example bf16:8x2048x1024,threads=2")
    if isinstance(asked[0], Shape):
        return "", asked[0]._asdict()
    if given:
        raise typer.BadParameter(f"{', '.join(given)}: a problem's spelling says it already")
    Problem.parse(asked[0])
    return asked[0], {}
