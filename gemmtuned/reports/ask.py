"""The reports that `gemmtuned.coverage()` and `gemmtuned.gains()` ask for, as the commands of these names make them."""

from __future__ import annotations

import time
from pathlib import Path

from gemmtuned.db import queries
from gemmtuned.reports import coverage as by_share
from gemmtuned.reports import gains as by_solution
from gemmtuned.reports import layers
from gemmtuned.reports.notebook import Answer


def coverage(database: Path, *, by: str, since_s: float, weight: str) -> Answer:
    """Raises SettingError for a word it does not know, StoreError when the database cannot be read."""
    if by == "layer":
        return Answer(layers.report(queries.served(database, since_s=since_s), since_s=since_s))
    rows = queries.coverage(database, by=by, since_s=since_s, weight=weight)
    return Answer(by_share.report(rows, by=by, weight=weight, since_s=since_s))


def gains(database: Path, *, limit: int) -> Answer:
    """Raises StoreError when the database cannot be read."""
    rows = queries.solutions(database, live=False)
    return Answer(by_solution.report(rows, every=False, limit=limit, now_us=round(time.time() * 1e6)))
