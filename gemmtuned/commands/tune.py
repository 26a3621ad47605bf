"""`gemmtuned tune`: tune problems now, in the foreground."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemmtuned.commands.options import (
    DryRun,
    Json,
    LogLevel,
    choice,
    default_threads,
    problems,
    settings,
    start_logging,
)
from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.problem import DTYPES, Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.reports.problem_list import read_list
from gemmtuned.reports.progress import progress
from gemmtuned.reports.render import Column, Report, Table, complain, duration, factor, show, small

if TYPE_CHECKING:
    from gemmtuned.daemon.main import Tuned

_COLUMNS = (
    Column("problem", "problem", right=False),
    Column("route", "runs", right=False),
    Column("baseline_us", "torch", duration),
    Column("us", "now", duration),
    Column("speedup", "gain", factor),
    Column("err", "error", small),
    Column("why", "", lambda why: why or "", right=False),
)


def tune(
    problem: Annotated[
        list[str] | None, typer.Argument(metavar="[PROBLEM...]", help="For example fp32:8x2048x1024,threads=2")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "-i",
            "--input",
            exists=True,
            dir_okay=False,
            readable=True,
            allow_dash=True,
            metavar="FILE",
            help="A problem a line, # begins a comment; or an AITER untuned table (header M,N,K,...). - is stdin.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(parser=choice(tuple(DTYPES)), metavar="NAME", help="For rows of a table that name none.")
    ] = "bf16",
    threads: Annotated[
        int | None, typer.Option(min=0, help="For the rows of a table: CPU threads; default: as many as torch takes.")
    ] = None,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Leave bad rows out and go on.")] = False,
    idle: Annotated[bool, typer.Option("--idle", help="Wait for an idle device, as the daemon does.")] = False,
    dry_run: DryRun = False,
    log_level: LogLevel = "warning",
    as_json: Json = False,
) -> None:
    """Tune problems now, in the foreground.

    Publishes what is found; programs that run take it up at once. Also tries again what failed or was withdrawn.
    Ends with 1 when a problem could not be tuned.
    """  # fmt: skip
    start_logging(log_level)
    wanted = problems(problem or [])
    if file is not None:
        wanted += _read(file, dtype, default_threads() if threads is None else threads, skip=skip_bad_rows)
        wanted = list(dict.fromkeys(wanted))
    if not wanted:
        raise typer.BadParameter("no problem given: name some, or a file that holds some with -i")
    if dry_run:
        rows = [{"problem": str(one)} for one in wanted]
        facts = {"dry_run": True, "failed": 0}
        show(
            Report("tune", [Table("rows", _COLUMNS[:1], rows)], facts, notes=[f"{len(rows)} to tune"]), as_json=as_json
        )
        return
    from gemmtuned.daemon.main import tune_now
    from gemmtuned.daemon.request import Request

    with progress(quiet=as_json) as tell:
        done = tune_now(Request(problems=wanted), settings(), idle=idle, progress=tell)
    show(_report(wanted, done), as_json=as_json)
    if done.code or done.failed:
        raise typer.Exit(done.code or 1)


def _read(file: Path, dtype: str, threads: int, *, skip: bool) -> list[Problem]:
    """The problems of a file. Raises ProblemError for its first bad row unless bad rows are skipped."""
    stdin = str(file) == "-"
    text = sys.stdin.read() if stdin else file.read_text(encoding="utf-8-sig", errors="replace")
    found = read_list(text.splitlines(), name="stdin" if stdin else file.name, dtype=dtype, threads=threads)
    if found.complaints and not skip:
        more = f"{len(found.complaints) - 1} more bad rows; " if len(found.complaints) > 1 else ""
        others = len(found.problems)
        raise ProblemError(f"{found.complaints[0]}. {more}use --skip-bad-rows to tune the other {others} problems")
    for complaint in found.complaints:
        complain(f"{complaint}: skipped")
    return list(found.problems)


def _report(wanted: list[Problem], done: Tuned) -> Report:
    rows: list[dict[str, Any]] = []
    for problem in wanted:
        solution = done.solutions.get(problem)
        if solution is None:
            rows.append({"problem": str(problem), "why": done.failed.get(problem, "not tuned")})
            continue
        route = str(Candidate(solution.backend, solution.config))
        why = "torch's own is best" if solution.state == "default_best" else ""
        speedup = solution.baseline_us / solution.us
        rows.append({**solution.to_row(), "problem": str(problem), "route": route, "speedup": speedup, "why": why})
    facts = {"dry_run": False, "failed": len(done.failed)}
    notes = [f"{len(done.solutions)} of {len(wanted)} have a verdict"]
    return Report("tune", [Table("rows", _COLUMNS, rows)], facts, notes=notes)
