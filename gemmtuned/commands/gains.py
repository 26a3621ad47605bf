"""`gemmtuned gains`: what tuning has gained."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from gemmtuned.commands import of_fleet
from gemmtuned.commands.of_fleet import Fleet, Url
from gemmtuned.commands.options import Json, Limit, Run, chosen, settings
from gemmtuned.reports.render import show
from gemmtuned.reports.source import no_database


def gains(
    every: Annotated[
        bool, typer.Option("--all", help="Also where torch's own is best, and what was withdrawn or replaced.")
    ] = False,
    unused: Annotated[
        bool, typer.Option("--unused", help="Only what no program has looked up for a day or more.")
    ] = False,
    by: Annotated[str, chosen(("solution", "layer"), metavar="solution|layer", help="One row for each.")] = "solution",
    run: Run = None,
    limit: Limit = 50,
    fleet: Fleet = False,
    url: Url = "",
    as_json: Json = False,
) -> None:
    """What was gained, solution by solution.

    Each one's time beside torch's own, as measured when it was tuned, and the GEMM time its calls have saved since.
    --fleet: of all hosts that share: who found it, how much their figures differ, and whose card is slow.
    """
    if fleet:
        of_fleet.refuse({"--unused": unused, "--by layer": by == "layer", "--run": run is not None})
        from gemmtuned.reports import fleet as of_all

        reports = of_fleet.read_reports(url)
        show(reports.report(of_all.gains(reports.seen, every=every, limit=limit, now_s=time.time())), as_json=as_json)
        return
    of_fleet.refuse_url(url)
    here = settings()
    if not here.db.exists():
        show(no_database("gains", here, "rows", saved_us=0.0, faster=0, default_best=0, unused=0), as_json=as_json)
        return
    from gemmtuned.reports import ask

    show(ask.gains(here, by=by, run=run, limit=limit, every=every, unused=unused), as_json=as_json)
