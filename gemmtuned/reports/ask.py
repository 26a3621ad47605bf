"""The reports `coverage` and `gains` of one database, as the commands and the functions of these names show them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec

from gemmtuned.configs.errors import SettingError
from gemmtuned.configs.nearest_word import did_you_mean
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import LIVE_STATES
from gemmtuned.db import queries
from gemmtuned.db.ask import kept_open
from gemmtuned.db.of_runs import called_by, filed_for, own_time
from gemmtuned.db.other_threads import other_threads
from gemmtuned.db.phases import phases
from gemmtuned.reports import coverage as by_share
from gemmtuned.reports import gains as by_solution
from gemmtuned.reports import grouped, layers
from gemmtuned.reports.on_probation import without_notes
from gemmtuned.reports.own_time import with_own_time
from gemmtuned.reports.phases import phase_notes
from gemmtuned.reports.published import notes, standing
from gemmtuned.reports.render import Report, Row
from gemmtuned.reports.source import of_database
from gemmtuned.reports.threads import threads_notes
from gemmtuned.reports.unraced import unfit_notes, unraced_notes
from gemmtuned.reports.unseen import dropped_calls, dropped_notes, engine_paths, unseen_notes
from gemmtuned.reports.why_nothing import why_nothing, why_off

BY: Final = (*by_share.GROUPS, "layer")
LONGEST_S: Final = 3e9  # 95 years
GAINS_BY: Final = ("solution", "layer")
P = ParamSpec("P")


def _of_one_connection(
    report: Callable[Concatenate[Settings, P], Report],
) -> Callable[Concatenate[Settings, P], Report]:
    """A report that asks many questions."""

    @wraps(report)
    def asked(here: Settings, /, *how: P.args, **named: P.kwargs) -> Report:
        with kept_open(here.db):
            return report(here, *how, **named)

    return asked


@_of_one_connection
def coverage(
    here: Settings, *, by: str, since_s: float, weight: str = "time", run: str | None = None, limit: int | None = None
) -> Report:
    """How much of the traffic of the last since_s seconds is tuned, one row for each `by`; run: of this label alone.

    limit: rows to show, None for all.  Raises SettingError for a word or a label that it does not know, StoreError when
    the database cannot be read.
    """
    _known("by", by, BY)
    _known("weight", weight, by_share.WEIGHTS)
    seconds_back(since_s)
    if by == "layer" and weight != "time":
        raise SettingError(f"weight {weight!r}: layers are weighed by their time alone")
    if run is not None:
        called_by(here.db, run)  # a label that there is not is an error, not an empty table
    apart = phases(here.db, since_s=since_s)
    compiled, frozen = queries.compiled(here.db, since_s=since_s), queries.frozen(here.db, since_s=since_s)
    since_us = (time.time() - since_s) * 1e6
    engines = engine_paths(sessions := queries.sessions(here.db), since_us=since_us)
    dropped = dropped_calls(sessions, since_us=since_us)
    warnings = [*_warnings(here, since_s, run), *phase_notes(apart, since_s), *dropped_notes(dropped)]
    unraced = queries.unraced(here.db, since_s=since_s)
    unfit = queries.unfit(here.db, since_s=since_s)
    warnings += [*map(str, engines), *unraced_notes(unraced), *unfit_notes(unfit)]
    if by == "layer":
        rows = queries.served(here.db, since_s=since_s, run=run)
        answer = layers.report(rows, since_s=since_s, compiled=compiled, frozen=frozen, notes=warnings, limit=limit)
    else:
        rows = queries.coverage(here.db, by=by, since_s=since_s, weight=weight, run=run)
        if by == "run":
            rows = with_own_time(rows, own_time(here.db, since_s=since_s))
        how: dict[str, Any] = {"by": by, "weight": weight, "since_s": since_s, "limit": limit}
        answer = by_share.report(rows, **how, compiled=compiled, frozen=frozen, warnings=warnings)
    off = why_off(here) or ([] if rows else _nothing(here, sessions, since_s))
    facts = {
        "phases": [dict(row) for row in apart],
        "engine_paths": [paths.facts for paths in engines],
        "dropped_calls": dropped,
        "unraced": unraced,
        "unfit": unfit,
    }
    return of_database(replace(answer, facts={**answer.facts, **facts}, lines=[*off, *answer.lines]), here)


@_of_one_connection
def gains(
    here: Settings,
    *,
    by: str = "solution",
    run: str | None = None,
    limit: int = 0,
    every: bool = False,
    unused: bool = False,
) -> Report:
    """What was gained, one row for each solution or layer; run: of what programs of this label call.

    limit: rows to show, 0 for all.  every, unused: as of reports.gains.  Raises SettingError for a word or a label that
    it does not know, StoreError when the database cannot be read.
    """
    _known("by", by, GAINS_BY)
    if not isinstance(limit, int) or limit < 0:
        raise SettingError(f"limit: {limit!r} is not a number of rows: 0 for all")
    rows = queries.solutions(here.db, live=False)
    if run is not None:
        wanted = filed_for(called_by(here.db, run))
        rows = [row for row in rows if (row["problem"], row["covers"]) in wanted]
    answer = by_solution.report(rows, every=every, limit=limit, now_us=time.time_ns() // 1000, unused=unused)
    if by == "layer":
        answer = grouped.gains([row for row in rows if row["state"] in LIVE_STATES], answer, limit=limit)
    said = ["calls and time saved are those of all programs"] if run is not None and rows else []
    return of_database(replace(answer, notes=[*answer.notes, *said, *without_notes(here.home)]), here)


def seconds_back(since_s: float) -> None:
    """Raise SettingError where this is no number of seconds that traffic can be looked at back."""
    if not isinstance(since_s, int | float) or not 0 < since_s < LONGEST_S:
        raise SettingError(f"since_s: {since_s!r} is not a number of seconds above 0 (a week is 604800)")


def _known(name: str, word: str, words: Sequence[str]) -> None:
    if word not in words:
        raise SettingError(f"{name}: {word!r} is not one of {', '.join(words)}{did_you_mean(word, tuple(words))}")


def _warnings(here: Settings, since_s: float, run: str | None) -> list[str]:
    """Why today's tables are not what programs use."""
    apart = threads_notes(other_threads(here.db, since_s=since_s, run=run))
    return [*notes(standing(here)), *without_notes(here.home), *apart]


def _nothing(here: Settings, sessions: Sequence[Row], since_s: float) -> list[str]:
    """What is said of a window in which nothing was recorded."""
    return [*why_nothing(here), *unseen_notes(sessions, since_us=(time.time() - since_s) * 1e6)]
