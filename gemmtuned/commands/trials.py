"""`gemmtuned trials`: what was tried."""

from __future__ import annotations

import time
from itertools import chain
from typing import Annotated

import typer

from gemmtuned.commands import completing
from gemmtuned.commands.options import Json, Limit, Run, named, settings
from gemmtuned.reports.render import show
from gemmtuned.reports.source import no_database, of_database
from gemmtuned.reports.trials import report


def trials(
    problem: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="M N K | PROBLEM",
            autocompletion=completing.problems,
            help="Only of these: shapes, or problems as reports spell them.",
        ),
    ] = None,
    run: Run = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """What was measured, newest first."""
    here = settings()
    only = named(problem, here) if problem else [None]
    name = (", ".join(map(str, only)) or " ".join(problem)) if problem else None
    if not here.db.exists():
        show(no_database("trials", here, "rows", problem=name), as_json=as_json)
        return
    from gemmtuned.db import queries
    from gemmtuned.db.of_runs import called_by

    most = limit + 1 if limit else None  # one more than shown: then there are more
    called = None if run is None else called_by(here.db, run)
    found = [queries.trials(here.db, problem=one, limit=None if called else most) for one in only]
    if called is not None:
        found = [[row for row in rows if row["problem"] in called] for rows in found]
    rows = sorted(chain.from_iterable(found), key=lambda row: -row["started"])[:most]
    show(of_database(report(rows, problem=name, limit=limit, now_s=time.time()), here), as_json=as_json)
