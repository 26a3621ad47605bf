"""`gemmtuned import`: keep what other tools' tables say, as seeds for the search and as problems to tune."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gemmtuned.commands.options import DryRun, Json, chosen, default_threads, settings, threads_option
from gemmtuned.configs.aiter_headers import FAMILIES
from gemmtuned.configs.errors import ProblemError, TableError
from gemmtuned.configs.formats import read_any, rows_in
from gemmtuned.configs.formats.model import MODEL, is_model, read_model
from gemmtuned.configs.hint import Imported
from gemmtuned.configs.manifest import MANIFEST, check_owner
from gemmtuned.configs.problem import Problem, as_by_default
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import LIVE_STATES, Environment, Solution, cpu_device
from gemmtuned.configs.tunable import can_tune, is_mxfp4
from gemmtuned.reports.render import Column, Report, Table, complain, count, several, show

MOST_REASONS: Final = 5  # in the text form
_COLUMNS: Final = (
    Column("path", "file", right=False),
    Column("format", "format", right=False),
    Column("family", "family", right=False),
    Column("kind", "kind", right=False),
    Column("rows", "rows", count),
    Column("imported", "imported", count),
    Column("used", "used", count),
    Column("refused", "refused", count),
    Column("reasons", "", lambda reasons: reasons[0] if reasons else "", right=False),
)


def import_(
    file: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE...]", help="Files or folders; default: those that AITER_CONFIG_* name."),
    ] = None,
    family: Annotated[
        str | None,
        chosen(tuple(FAMILIES), metavar="NAME", help="Family of AITER tables that do not say it."),
    ] = None,
    ignore_column: Annotated[
        list[str] | None,
        typer.Option("--ignore-column", metavar="NAME", help="A column of yours that does not decide the product."),
    ] = None,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Leave bad rows out and go on.")] = False,
    queue: Annotated[bool, typer.Option(help="Have the problems of untuned tables tuned.")] = True,
    use: Annotated[
        bool, typer.Option(help="Use what gemmtuned measured on this kind of CPU with these versions, once checked.")
    ] = True,
    threads: Annotated[
        int | None, threads_option("CPU threads of those problems; default: as many as torch takes.")
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Keep what other tools' tables say.

    AITER's tables (tuned and untuned, every family) and Triton tile files, TunableOp results, vLLM's and SGLang's
    tile configs, Inductor lookup tables, and folders of gemmtuned's own; of a model's folder it tells the weights.
    Every row is used, or refused with a reason; a table with a column that could decide what the product is and that
    nobody knows is refused as a whole. What they name as best was measured elsewhere: it is tried first when its
    problem is tuned here, and not run before; what gemmtuned itself measured on this kind of CPU is used once it is
    checked (--no-use: never). Importing a file again replaces its rows. A file that cannot be read costs that file; a
    bad row stops all, unless --skip-bad-rows. Ends with 1 in both cases.
    """
    here = settings()
    with _no_collections():
        found, unread = _read(_wanted(file or (), family, here), ignore_column or ())
        bad = sum(one.rejected for one in found)
        stopped = bool(bad) and not skip_bad_rows
        keep = not dry_run and bool(found) and not stopped
        back = _take_back(here) if keep else 0
        queued = (
            _keep(found, here, queue=queue, threads=default_threads() if threads is None else threads) if keep else 0
        )
        used, refused = _use(found, here) if keep and use else (0, {})
    rows = [_row(one, one.reasons, refused=stopped) for one in found] + unread
    facts = {
        "dry_run": dry_run, "kept": keep, "queued": queued, "used": used, "not_used": refused, "taken_back": back
    }  # fmt: skip
    notes = _notes(found, dry_run=dry_run and not stopped, kept=keep, queued=queued)
    notes += _more_notes(found, back, used, refused)
    # on stderr, as every error; the table for people has what is no error, the first row that was skipped
    skipped = [row if row["rejected"] and not stopped else {**row, "reasons": []} for row in rows[: len(found)]]
    if found or as_json:
        table = Table("files", _COLUMNS, rows if as_json else skipped)
        show(Report("import", [table], facts, notes=notes), as_json=as_json)
    for error in (*(str(row["reasons"][0]) for row in unread), *(_bad_rows(found, bad) if stopped else ())):
        complain(error)
    if unread or stopped:
        raise typer.Exit(1)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Switch the garbage collector off: rows form no cycles, and each collection would go through all of them."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _wanted(given: Sequence[Path], family: str | None, here: Settings) -> list[tuple[Path, str | None]]:
    """Files, each with its family if that is known. A usage error where neither command nor variables name one."""
    wanted = [(path, family) for one in given for path in _tables(one)]
    wanted = wanted or [(path, table.family) for table in here.tables for path in table.paths]
    if not wanted:
        raise typer.BadParameter("no file given, and no AITER_CONFIG_* variable names one")
    return wanted


def _read(
    wanted: Sequence[tuple[Path, str | None]], ignore: Sequence[str]
) -> tuple[list[Imported], list[dict[str, Any]]]:
    """(the content of the files, a report row for each file that cannot be read, all of whose rows are refused)."""
    found: list[Imported] = []
    unread: list[dict[str, Any]] = []
    for path, family in wanted:
        try:
            found.append(read_model(path) if is_model(path) else read_any(path, family=family, ignore=ignore))
        except (TableError, ProblemError) as err:  # noqa: PERF203  one bad file costs that file
            unread.append(
                _row(Imported(path=str(path), format="", family="", kind="", rejected=rows_in(path)), [str(err)])
            )
    return found, unread


def _more_notes(found: Sequence[Imported], back: int, used: int, refused: Mapping[str, int]) -> Iterator[str]:
    """back: solutions that the database got back; used: in use after a spot check; refused: the others, by why."""
    if back:
        yield f"taken back into the database: {several(back, 'solution')} that the published tables have"
    if used:
        yield f"in use after a spot check: {several(used, 'solution')} of this kind of CPU and these versions"
    yield from (f"{number} not used: {reason}" for reason, number in refused.items())
    yield from (note for one in found for note in one.notes)


def _bad_rows(found: Sequence[Imported], bad: int) -> Iterator[str]:
    """A message for the first bad row of each file; the last one says how many there are and what to do."""
    *others, last = (one.reasons[0] for one in found if one.reasons)
    good = sum(len(one.hints) for one in found)
    how = f"--skip-bad-rows imports the other {several(good, 'row')}" if good else "no row is good"
    yield from others
    yield f"{last}. Bad rows in all: {bad}; {how}"


def _tables(path: Path) -> list[Path]:
    """The files and models in a folder and its folders; any other path itself, as a folder with published tables."""
    if not path.is_dir() or (path / MANIFEST).exists() or is_model(path):
        return [path]
    found: list[Path] = []
    for one in sorted(path.iterdir()):
        if one.name.startswith("."):  # export keeps hidden notes
            continue
        if one.is_dir():
            found += [inner for inner in _tables(one) if inner != one or is_model(one) or (one / MANIFEST).exists()]
        elif one.suffix in (".csv", ".json"):
            found.append(one)
    return found or [path]


def _row(one: Imported, reasons: Sequence[str], *, refused: bool = False) -> dict[str, Any]:
    """One file's row of the report. refused: a bad row stopped the import, so nothing was imported.

    `used` rows are problems of ours.  The `refused` ones are either `rejected`, each with its reason, or `kept` in the
    store as they are, counted by reason.
    """
    rows = len(one.hints) + one.rejected
    return {
        "path": one.path, "format": one.format or None, "family": one.family or None, "kind": one.kind or None,
        "rows": rows, "imported": 0 if refused else len(one.hints), "rejected": one.rejected, "used": one.used,
        "refused": rows - one.used, "kept": dict(one.kept), "reasons": list(reasons), "notes": list(one.notes),
    }  # fmt: skip


def _notes(found: Sequence[Imported], *, dry_run: bool, kept: bool, queued: int) -> list[str]:
    hints = [hint for one in found if one.format != MODEL for hint in one.hints]
    seeds = sum(hint.kind == "tuned" and hint.problem is not None for hint in hints)
    asked = len({hint.problem for hint in hints if hint.kind == "untuned" and hint.problem is not None})
    what = f"{several(seeds, 'seed')} for the search, {several(asked, 'problem')} to tune"
    if not kept and not dry_run:
        return [f"Nothing kept. {several(len(hints), 'row')} could be: {what}"]
    verb = "would be kept" if dry_run else "kept"
    notes = [f"{several(len(hints), 'row')} {verb}: {what}"]
    later = {hint.problem for hint in hints if hint.kind == "untuned" and hint.problem and not can_tune(hint.problem)}
    if kept and asked:
        wait = f"; {len(later)} more of families it cannot tune yet kept" if later else ""
        notes.append(f"{several(queued, 'distinct problem')} queued for gemmtuned daemon{wait}")
    without: Counter[str] = Counter()
    for one in found:
        without.update(one.kept)
    notes += [f"{number} kept as they stand: {reason}" for reason, number in without.most_common(MOST_REASONS)]
    if len(without) > MOST_REASONS:
        notes.append(f"... and for {len(without) - MOST_REASONS} other reasons (--json has them all)")
    models = [one for one in found if one.format == MODEL]
    if models:
        weights = sum(len(one.hints) for one in models)
        ways = "gemmtuned tune --model-dir tunes them"
        notes.append(f"{several(weights, 'weight')} of {several(len(models), 'model')} listed and not kept: {ways}")
    return notes


def _take_back(here: Settings) -> int:
    """Restore published solutions that the database lacks; returns how many."""
    from gemmtuned.daemon.publishing.publish import take_back
    from gemmtuned.db.store import Store

    store = Store(here.db, locks=here.locks)
    try:
        before = len(store.solutions.published()[1])
        take_back(store, here.config_dir, here.locks, now_s=time.time())
        return max(len(store.solutions.published()[1]) - before, 0)
    finally:
        store.close()


def _keep(found: Sequence[Imported], here: Settings, *, queue: bool, threads: int) -> int:
    """Store the rows; returns how many problems were queued."""
    from gemmtuned.db.store import Store

    store = Store(here.db, locks=here.locks)
    now_s = time.time()
    try:
        found = [one for one in found if one.format != MODEL]
        for one in found:
            store.hints.add(one.hints, source=str(Path(one.path).absolute()), now_s=now_s)
        wanted = [hint.problem for one in found for hint in one.hints if hint.kind == "untuned" and hint.problem]
        wanted = list(dict.fromkeys(problem for problem in wanted if can_tune(problem)))
        if not queue or not wanted:
            return 0
        queued: set[Problem] = set()
        for environment in store.hints.known_environments() or _here():
            called = [problem for problem in wanted if _is_called(problem, environment)]
            store.leases.ask_for((_asked(p, environment, threads) for p in called), environment, now_s=now_s)
            queued.update(called)
        return len(queued)
    finally:
        store.close()


def _use(found: Sequence[Imported], here: Settings) -> tuple[int, dict[str, int]]:
    """Publish solutions of ours that hold on this machine's CPU; (how many, why others of this device were not)."""
    device = cpu_device()
    refused: Counter[str] = Counter()
    solutions: dict[Solution, None] = {}
    for one in found:
        ours = [hint.solution for hint in one.hints if hint.solution is not None]
        mine = [s for s in ours if s.device == device.key and not s.launch and s.state in LIVE_STATES]
        try:
            if mine:
                check_owner(Path(one.path))  # others could else claim any gain
        except TableError as err:
            refused[f"{err}, and import it again"] += len(mine)
        else:
            solutions |= dict.fromkeys(mine)
    if not solutions:
        return 0, dict(refused)
    from gemmtuned.commands.spot_checking import spot_checks
    from gemmtuned.daemon.publishing.publish import publish
    from gemmtuned.db.store import Store
    from gemmtuned.kernels.backends import environment

    there = environment(device)
    store = Store(here.db, locks=here.locks)
    try:
        known = {(s.problem, s.covers, s.mode) for s in store.solutions.published([device.key])[1]}
        fit = []
        for solution in solutions:
            if not there.accepts(solution.backend, solution.stamp):
                refused[f"backend {solution.backend} is of another version ({solution.stamp})"] += 1
            elif (solution.problem, solution.covers, solution.mode) in known:
                refused["this machine has a verdict of its own"] += 1
            else:
                fit.append(solution)
        reasons = spot_checks(fit) if fit else []
        refused.update(reason for reason in reasons if reason)
        good = [solution for solution, reason in zip(fit, reasons, strict=True) if not reason]
        if good:
            now_s = time.time()
            store.solutions.install(None, good, environment=there, now_s=now_s)
            publish(store, here.config_dir, here.locks, now_s=now_s)
        return len(good), dict(refused)
    finally:
        store.close()


def _is_called(problem: Problem, environment: Environment) -> bool:
    """On CPUs operands of 4 bits are turned into 16-bit floats, and what programs call is a dense product of those.

    A mixture of experts with such weights is a call of its own there, too.
    """
    of_codes = problem.family == "weight_only" or is_mxfp4(problem)
    return environment.device.kind != "cpu" or not of_codes


def _asked(problem: Problem, environment: Environment, threads: int) -> Problem:
    """The problem as a program would call it there by torch's defaults."""
    if environment.device.kind == "cpu":
        return replace(problem, threads=threads)
    return as_by_default(problem, gpu=True)


def _here() -> list[Environment]:
    """This machine's own, when neither program nor daemon was seen yet."""
    from gemmtuned.kernels.backends import environment
    from gemmtuned.kernels.device import best_device

    return [environment(best_device())]
