"""`gemmtuned coverage`: how much of the traffic is tuned."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Final

import typer

from gemmtuned.commands import of_fleet
from gemmtuned.commands.of_fleet import Fleet, Url
from gemmtuned.commands.options import Json, Run, Since, chosen, number, settings, whole_number
from gemmtuned.configs.settings import Settings
from gemmtuned.reports.coverage import GROUPS, SHOWN, WEIGHTS
from gemmtuned.reports.render import Report, complain, percent, show
from gemmtuned.reports.source import no_database
from gemmtuned.reports.why_nothing import why_nothing, why_off

_DAY_S: Final = 86_400.0
By = Annotated[
    str,
    chosen(
        (*GROUPS, "layer", "host"),
        metavar="|".join((*GROUPS, "layer", "host")),
        help="One row for each; a layer is an N and K with all its M; host: with --fleet.",
    ),
]
SomeRows = Annotated[
    int | None,
    typer.Option(
        parser=whole_number(), metavar="N", help=f"Rows to show; 0 for all. Without it {SHOWN}, with --json all."
    ),
]


def coverage(
    by: By = "family",
    weight: Annotated[str, chosen(WEIGHTS, metavar="|".join(WEIGHTS), help="Share of what.")] = "time",
    since: Since = "24h",  # type: ignore[assignment]
    limit: SomeRows = None,
    run: Run = None,
    fail_under: Annotated[
        float | None,
        typer.Option(
            parser=number(0, 100), metavar="PERCENT", help="End with 1 where less than this is covered: for CI."
        ),
    ] = None,
    fleet: Fleet = False,
    url: Url = "",
    as_json: Json = False,
) -> None:
    """How much of the traffic is tuned.

    Covered now joins today's tables to the calls of the last --since; observed is what the look-ups gave when the calls
    were made. They differ while a program has not been called since something was tuned.
    --fleet: of all hosts that share, by --by host, device, family or problem.
    """
    if fleet:
        of_fleet.refuse({
            "--by run": by == "run", "--by layer": by == "layer", "--run": run is not None,
            "--weight flops": weight == "flops", "--since": since != _DAY_S,
        })  # fmt: skip
        _end(_of_fleet(url, by, weight, limit, as_json=as_json), fail_under)
        return
    of_fleet.refuse_url(url)
    if by == "host":
        raise typer.BadParameter("--by host is for --fleet")
    if by == "layer" and weight != "time":
        raise typer.BadParameter(f"--weight {weight} is not for --by layer, which weighs by time")
    _end(_of_this_host(by, weight, since, limit, run, as_json=as_json), fail_under)


def _of_this_host(
    by: str, weight: str, since: float, limit: int | None, run: str | None, *, as_json: bool
) -> float | None:
    """The share that is covered, of this host's database."""
    here = settings()
    if not here.db.exists():
        show(_without_database(here, by, weight, since), as_json=as_json)
        return 0.0
    from gemmtuned.reports import ask

    shown = limit if limit is not None or as_json else SHOWN
    answer = ask.coverage(here, by=by, since_s=since, weight=weight, run=run, limit=shown or None)
    show(answer, as_json=as_json)
    share: float | None = answer.facts["total"]["covered_share"]
    return share


def _of_fleet(url: str, by: str, weight: str, limit: int | None, *, as_json: bool) -> float | None:
    """The share that is covered, of all hosts that share."""
    from gemmtuned.reports import fleet

    reports = of_fleet.read_reports(url)
    shown = limit if limit is not None or as_json else SHOWN
    answer = fleet.coverage(reports.seen, by=by, weight=weight, limit=shown, now_s=time.time())
    show(reports.report(answer), as_json=as_json)
    share: float | None = answer.facts["total"]["covered_share"]
    return share


def _end(share: float | None, fail_under: float | None) -> None:
    """End with 1 where less than --fail-under percent is covered; what was not called at all is not covered."""
    if fail_under is not None and 100.0 * (share or 0.0) < fail_under:
        complain(f"{percent(share or 0.0)} is covered, less than --fail-under {fail_under:g}")
        raise typer.Exit(1)


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
        "engine_paths": [],
        "dropped_calls": {},
        "unraced": [],
        "unfit": [],
    }
    answer = no_database("coverage", here, "rows", **facts)
    return replace(answer, lines=[*(why_off(here) or why_nothing(here)), *answer.lines])
