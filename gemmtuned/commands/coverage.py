"""`gemmtuned coverage`: how much of the traffic is tuned."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from gemmtuned.commands.options import MOST_ROWS, Json, Since, choice, settings
from gemmtuned.configs.settings import Settings
from gemmtuned.reports import layers
from gemmtuned.reports.coverage import GROUPS, SHOWN, WEIGHTS, report
from gemmtuned.reports.phases import phase_notes
from gemmtuned.reports.published import notes, standing
from gemmtuned.reports.render import Report, show
from gemmtuned.reports.source import no_database, of_database
from gemmtuned.reports.threads import threads_notes
from gemmtuned.reports.why import why_nothing, why_off
from gemmtuned.reports.without import without_notes


def coverage(
    by: Annotated[
        str,
        typer.Option(
            parser=choice((*GROUPS, "layer")),
            metavar="|".join((*GROUPS, "layer")),
            help="One row for each; a layer is an N and K with all its M.",
        ),
    ] = "family",
    weight: Annotated[
        str, typer.Option(parser=choice(WEIGHTS), metavar="|".join(WEIGHTS), help="Share of what.")
    ] = "time",
    since: Since = "24h",  # type: ignore[assignment]
    limit: Annotated[
        int | None,
        typer.Option(min=0, max=MOST_ROWS, help=f"Rows to show; 0 for all. Without it {SHOWN}, with --json all."),
    ] = None,
    as_json: Json = False,
) -> None:
    """How much of the traffic is tuned.

    Covered now joins today's tables to the calls of the last --since; observed is what the look-ups gave when the calls
    were made. They differ while a program has not been called since something was tuned.
    """
    here = settings()
    if not here.db.exists():
        show(_without_database(here, by, weight, since), as_json=as_json)
        return
    from gemmtuned.db import queries
    from gemmtuned.db.other_threads import other_threads
    from gemmtuned.db.phases import phases

    warnings = [*notes(standing(here)), *without_notes(here.home)]
    warnings += threads_notes(other_threads(here.db, since_s=since))
    apart = phases(here.db, since_s=since)
    warnings += phase_notes(apart, since)
    off = why_off(here)
    compiled, frozen = queries.compiled(here.db, since_s=since), queries.frozen(here.db, since_s=since)
    if by == "layer":
        served = queries.served(here.db, since_s=since)
        answer = layers.report(served, since_s=since, compiled=compiled, frozen=frozen, notes=warnings)
        show(of_database(replace(answer, lines=[*off, *answer.lines]), here), as_json=as_json)
        return
    rows = queries.coverage(here.db, by=by, since_s=since, weight=weight)
    shown = limit if limit is not None or as_json else SHOWN
    answer = report(
        rows,
        limit=shown or None,
        by=by,
        weight=weight,
        since_s=since,
        compiled=compiled,
        frozen=frozen,
        warnings=warnings,
    )
    answer = replace(answer, facts={**answer.facts, "phases": [dict(row) for row in apart]})
    off = off or ([] if rows else why_nothing(here))
    show(of_database(replace(answer, lines=[*off, *answer.lines]), here), as_json=as_json)


def _without_database(here: Settings, by: str, weight: str, since_s: float) -> Report:
    """The answer while no program has recorded anything, with every key that it has later."""
    facts = {
        "by": by,
        "weight": weight,
        "since_s": since_s,
        "total": None,
        "compiled_problems": 0,
        "compiled_cpp_problems": 0,
        "frozen_problems": 0,
        "phases": [],
    }
    answer = no_database("coverage", here, "rows", **facts)
    return replace(answer, lines=[*(why_off(here) or why_nothing(here)), *answer.lines])
