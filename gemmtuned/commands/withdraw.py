"""`gemmtuned withdraw`: take solutions out of use, in running programs too."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from gemmtuned.commands.options import DryRun, Json, ProblemTexts, named, never_seen, settings
from gemmtuned.reports.render import Column, Report, Table, factor, show
from gemmtuned.reports.source import curator, left_undone, put_in_use


def withdraw(
    problem: ProblemTexts,
    dry_run: DryRun = False,
    reason: Annotated[str, typer.Option(help="Why: kept in the database.")] = "by hand",
    as_json: Json = False,
) -> None:
    """Take solutions out of use.

    Programs that run go back to stock torch for these problems. They stay untuned until `gemmtuned retune PROBLEM`
    (or `tune`, which does it at once).
    Ends with 1 when none of the problems has a solution.
    """
    now_s = time.time()
    here = settings()
    wanted = named(problem, here)
    with curator(here) as store:
        unseen = never_seen(problem, here)
        taken = store.solutions.withdraw(wanted, reason=reason, now_s=now_s, dry_run=dry_run)
        generation, late = store.solutions.generation(), False
        if not dry_run:
            generation, late = put_in_use(store, here, f"{len(taken)} withdrawn")
    rows = [{"problem": str(s.problem), **s.to_row(), "speedup": s.baseline_us / s.us} for s in taken]
    columns = (
        Column("problem", "problem", right=False),
        Column("covers", "for", right=False),
        Column("backend", "backend", right=False),
        Column("speedup", "gain given up", factor),
    )
    verb = "would be withdrawn" if dry_run else f"withdrawn in generation {generation}"
    names = ", ".join(map(str, wanted)) or " ".join(problem)
    show(
        Report(
            "withdraw",
            [Table("rows", columns, rows, empty=f"No solution in use for {names}: see gemmtuned gains.")],
            facts={"dry_run": dry_run, "generation": generation},
            notes=[*([f"{len(rows)} {verb}"] if rows else left_undone(generation) if late else []), *unseen],
        ),
        as_json=as_json,
    )
    if not taken and not late:
        raise typer.Exit(1)
