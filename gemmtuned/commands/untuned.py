"""`gemmtuned untuned`: what waits to be tuned."""

from __future__ import annotations

import time

from gemmtuned.commands.options import Json, Limit, settings
from gemmtuned.reports.render import show
from gemmtuned.reports.source import no_database, of_database
from gemmtuned.reports.untuned import report


def untuned(limit: Limit = 50, as_json: Json = False) -> None:
    """What waits to be tuned, worth most first.

    Problems that were called and have no verdict where they were called: queued, being tuned (leased), or failed.
    """
    here = settings()
    if not here.db.exists():
        show(no_database("untuned", here, "rows", total=0, states={}), as_json=as_json)
        return
    from gemmtuned.db import queries

    answer = report(queries.untuned(here.db), limit=limit, now_s=time.time())
    show(of_database(answer, here), as_json=as_json)
