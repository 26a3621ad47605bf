"""`gemmtuned pin`, `forget`, `retune`, `rollback`: what the operator makes of solutions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from gemmtuned.commands.options import DryRun, Json, ProblemTexts, named, never_seen, settings, whole_number
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import Solution
from gemmtuned.reports.render import Column, Report, Table, age, count, factor, several, show
from gemmtuned.reports.source import curator, left_undone, no_database, put_in_use, writer

_COLUMNS = (
    Column("problem", "problem", right=False),
    Column("covers", "for", right=False),
    Column("mode", "mode", right=False),
    Column("route", "runs", right=False),
    Column("speedup", "gain", factor),
)


_FORGIVEN = "failures or withdrawals"


def pin(
    problem: ProblemTexts,
    off: Annotated[bool, typer.Option("--off", help="No longer: later verdicts may replace it again.")] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Keep the solutions of these problems, whatever is found.

    Ends with 1 when there is nothing to change.
    """
    here = settings()
    wanted = named(problem, here)
    with curator(here) as store:
        unseen = never_seen(problem, here)
        found = store.curation.pin(wanted, now_s=time.time(), off=off, dry_run=dry_run)
        done = f"{len(found)} {'unpinned' if off else 'pinned'}"
        generation, late = (store.solutions.generation(), False) if dry_run else put_in_use(store, here, done)
    what = f"{'would be ' if dry_run else ''}{'unpinned' if off else 'pinned'}"
    is_so = "not pinned" if off else "pinned already"
    empty = f"Nothing to change: {is_so}, or no solution in use. `gemmtuned explain PROBLEM` says which."
    facts = {"dry_run": dry_run, "generation": generation}
    notes = [f"{len(found)} {what}"] if found else left_undone(generation) if late else []
    notes += unseen
    show(Report("pin", [Table("rows", _COLUMNS, _rows(found), empty=empty)], facts, notes=notes), as_json=as_json)
    if not found and not late:
        raise typer.Exit(1)


def forget(problem: ProblemTexts, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Drop all about these problems, as if never seen.

    Their solutions, traffic, trials and failures go. Programs that run go back to stock torch for them. One that calls
    them again brings them back as new.
    """
    here = settings()
    wanted = named(problem, here)
    with curator(here) as store:
        unseen = never_seen(problem, here)
        found, dropped = store.curation.forget(wanted, now_s=time.time(), dry_run=dry_run)
        done = f"{len(found)} withdrawn and forgotten"
        generation, late = (store.solutions.generation(), False) if dry_run else put_in_use(store, here, done)
    would = "would be " if dry_run else ""
    facts = {"dry_run": dry_run, "generation": generation, "dropped_rows": dropped}
    gone = f"{several(len(found), 'solution')} {would}withdrawn"
    notes = [f"{gone}, {several(dropped, 'row')} of traffic and trials {would}dropped"]
    late = late and not found
    notes += [*(left_undone(generation) if late else []), *unseen]
    show(Report("forget", [Table("rows", _COLUMNS, _rows(found))], facts, notes=notes), as_json=as_json)
    if not found and not dropped and not late:
        raise typer.Exit(1)


def retune(problem: ProblemTexts, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Have the daemon tune these problems again, before all else.

    What is in use stays until the new verdict; failures and withdrawals by hand are forgiven. `gemmtuned daemon --once`
    does it, too; `gemmtuned tune --all` does it now, in the foreground. Ends with 1 when none of them is known.
    """
    here = settings()
    wanted = named(problem, here)
    with writer(here) as store:
        unseen = never_seen(problem, here)
        asked = store.recheck.ask_again(wanted, dry_run=dry_run)
        forgiven = store.resume.retry_now(wanted, dry_run=dry_run)
        queued = store.resume.ask_for_seen(wanted, now_s=time.time(), dry_run=dry_run)
    would = "would" if dry_run else "will"
    notes = [
        f"{several(asked, 'solution')} {would} be raced again, {several(forgiven, 'failure or withdrawal', _FORGIVEN)} "
        f"forgiven, {several(queued, 'problem')} without a solution asked for",
        *unseen,
    ]
    facts = {"dry_run": dry_run, "solutions": asked, "forgiven": forgiven, "asked_for": queued}
    show(Report("retune", [], facts, notes=notes), as_json=as_json)
    if not asked and not forgiven and not queued:
        raise typer.Exit(1)


def rollback(
    generation: Annotated[
        int | None,
        typer.Option(
            "--generation", parser=whole_number(), metavar="N", help="Which; without it the newest ones are listed."
        ),
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Publish what an earlier generation had.

    It becomes a new generation, which programs take up like any other. Problems that had no solution then stay with
    stock torch until `gemmtuned retune` or `tune`; what was pinned stays. `gemmtuned rollback --generation N --dry-run`
    shows what would change; without a number it lists the newest generations, when they came and what they brought.
    """
    here = settings()
    if generation is None:
        _list_generations(here, as_json=as_json)
        return
    with curator(here) as store:
        done = store.curation.roll_back(generation, now_s=time.time(), dry_run=dry_run)
        now = store.solutions.generation() if dry_run else put_in_use(store, here, f"rolled back to {generation}")[0]
    rows = [
        {**row, "change": change}
        for change, solutions in (("goes", done.gone), ("comes back", done.back))
        for row in _rows(solutions)
    ]
    columns = (Column("change", "", right=False), *_COLUMNS)
    facts = {"dry_run": dry_run, "to": generation, "generation": now}
    notes = [f"{len(done.gone)} go, {len(done.back)} come back" + ("" if dry_run else f": generation {now}")]
    empty = f"Nothing has changed since generation {generation}."
    show(Report("rollback", [Table("rows", columns, rows, empty=empty)], facts, notes=notes), as_json=as_json)


def _list_generations(here: Settings, *, as_json: bool) -> None:
    """The newest publications."""
    if not here.db.exists():
        show(no_database("rollback", here, "rows"), as_json=as_json)
        return
    from gemmtuned.db import queries

    now_s = time.time()
    columns = (
        Column("generation", "generation"),
        Column("published_us", "published", lambda us: age(now_s - us / 1e6)),
        Column("installed", "verdicts in", count),
        Column("retired", "out", count),
        Column("note", "note", right=False),
    )
    table = Table("rows", columns, queries.publications(here.db, limit=50), empty="Nothing is published yet.")
    show(Report("rollback", [table], facts={"database": str(here.db)}), as_json=as_json)


def _rows(found: Sequence[Solution]) -> list[dict[str, object]]:
    return [
        {
            **s.to_row(),
            "problem": str(s.problem),
            "route": str(s.candidate),
            "speedup": s.baseline_us / s.us,
        }
        for s in found
    ]
