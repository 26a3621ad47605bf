"""`gemmtuned untuned`: what waits to be tuned."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated

from gemmtuned.commands import of_fleet
from gemmtuned.commands.of_fleet import Fleet, Url
from gemmtuned.commands.options import Json, Limit, Run, chosen, settings
from gemmtuned.reports import grouped
from gemmtuned.reports.render import show
from gemmtuned.reports.source import no_database, of_database
from gemmtuned.reports.unseen import unseen_notes
from gemmtuned.reports.untuned import report
from gemmtuned.reports.why_nothing import why_nothing


def untuned(
    by: Annotated[str, chosen(("problem", "layer"), metavar="problem|layer", help="One row for each.")] = "problem",
    run: Run = None,
    limit: Limit = 50,
    fleet: Fleet = False,
    url: Url = "",
    as_json: Json = False,
) -> None:
    """What waits to be tuned, worth most first.

    Problems that were called and have no verdict where they were called: queued, being tuned (leased), or failed.
    --fleet: what any host that shares waits for, by its worth to all of them; claimed: some host tunes it.
    """
    if fleet:
        of_fleet.refuse({"--by layer": by == "layer", "--run": run is not None})
        from gemmtuned.reports import fleet as of_all

        reports = of_fleet.read_reports(url)
        key = reports.trust.key
        found = of_all.untuned(reports.seen, reports.objects, limit=limit, now_s=time.time(), key=key)
        show(reports.report(found), as_json=as_json)
        return
    of_fleet.refuse_url(url)
    here = settings()
    if not here.db.exists():
        show(no_database("untuned", here, "rows", total=0, states={}, recorded=0), as_json=as_json)
        return
    from gemmtuned.db import queries
    from gemmtuned.db.of_runs import called_by

    recorded = sum(row["problems"] for row in queries.environments(here.db))
    unseen = [] if recorded else [*why_nothing(here), *unseen_notes(queries.sessions(here.db))]
    rows = queries.untuned(here.db)
    if run is not None:
        called = called_by(here.db, run)
        rows = [row for row in rows if row["problem"] in called]
    shown = limit if by == "problem" else 0
    answer = report(rows, limit=shown, now_s=time.time(), recorded=recorded, unseen=unseen)
    if run is not None and rows:
        answer = replace(answer, notes=[*answer.notes, "calls and times are those of all programs"])
    if by == "layer":
        answer = grouped.untuned(rows, answer, limit=limit)
    show(of_database(answer, here), as_json=as_json)
