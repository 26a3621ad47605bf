"""`gemmtuned untuned`: what waits to be tuned."""

from __future__ import annotations

import time

from gemmtuned.commands.options import Json, Limit, settings
from gemmtuned.reports.render import show
from gemmtuned.reports.source import no_database, of_database
from gemmtuned.reports.unseen import unseen_notes
from gemmtuned.reports.untuned import report
from gemmtuned.reports.why import why_nothing


def untuned(limit: Limit = 50, as_json: Json = False) -> None:
    """What waits to be tuned, worth most first.

    Problems that were called and have no verdict where they were called: queued, being tuned (leased), or failed.
    """
    here = settings()
    if not here.db.exists():
        show(no_database("untuned", here, "rows", total=0, states={}, recorded=0), as_json=as_json)
        return
    from gemmtuned.db import queries

    recorded = sum(row["problems"] for row in queries.environments(here.db))
    unseen = [] if recorded else [*why_nothing(here), *unseen_notes(queries.sessions(here.db))]
    answer = report(queries.untuned(here.db), limit=limit, now_s=time.time(), recorded=recorded, unseen=unseen)
    show(of_database(answer, here), as_json=as_json)
