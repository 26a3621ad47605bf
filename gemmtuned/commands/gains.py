"""`gemmtuned gains`: what tuning has gained."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated

import typer

from gemmtuned.commands.options import Json, Limit, settings
from gemmtuned.reports.gains import report
from gemmtuned.reports.render import show
from gemmtuned.reports.source import no_database, of_database
from gemmtuned.reports.without import without_notes


def gains(
    every: Annotated[
        bool, typer.Option("--all", help="Also where torch's own is best, and what was withdrawn or replaced.")
    ] = False,
    unused: Annotated[
        bool, typer.Option("--unused", help="Only what no program has looked up for a day or more.")
    ] = False,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """What was gained, solution by solution.

    Each one's time beside torch's own, as measured when it was tuned, and the GEMM time its calls have saved since.
    """
    here = settings()
    if not here.db.exists():
        show(no_database("gains", here, "rows", saved_us=0.0, faster=0, default_best=0, unused=0), as_json=as_json)
        return
    from gemmtuned.db import queries

    rows = queries.solutions(here.db, live=False)
    answer = report(rows, every=every, limit=limit, now_us=time.time_ns() // 1000, unused=unused)
    answer = replace(answer, notes=[*answer.notes, *without_notes(here.home)])
    show(of_database(answer, here), as_json=as_json)
