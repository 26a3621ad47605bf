"""`gemmtuned tune`: tune problems now, in the foreground; takes the flags of AITER's tuners too."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from gemmtuned.commands import tune_options as t
from gemmtuned.commands.aiter_flags import META
from gemmtuned.commands.named_file import target_of
from gemmtuned.commands.options import DryRun, Json, LogLevel, default_threads, settings, start_logging
from gemmtuned.commands.tune_sources import Defaults, OfModel, Wanted, decided, from_words, gather, waiting
from gemmtuned.configs.aiter_rows import family_of
from gemmtuned.configs.errors import TableError, TryLater
from gemmtuned.configs.solution import CROWDED, Device, Solution
from gemmtuned.configs.tunable import why_not
from gemmtuned.hooks.dispatch import NATIVE_CODES
from gemmtuned.reports.progress import progress
from gemmtuned.reports.render import TIMES, Column, Report, Table, complain, percent, several, show, small
from gemmtuned.reports.tuned_files import Profile, TunedTable, table_family

if TYPE_CHECKING:
    from gemmtuned.configs.problem import Problem
    from gemmtuned.daemon.device.devices import Monitor
    from gemmtuned.daemon.protocol.options import SearchOptions
    from gemmtuned.daemon.protocol.wire import Trial
    from gemmtuned.daemon.service.check import Checked
    from gemmtuned.daemon.service.main import Tuned

PUT_OFF: Final = "put off"  # why is below the table, once
_PLAN = (Column("problem", "problem", right=False),)
_DONE = (
    *_PLAN,
    Column("route", "runs", right=False),
    *TIMES,
    Column("err", "error", small),
    Column("why", "", lambda why: PUT_OFF if (why or "").startswith(PUT_OFF) else why or "", right=False),
)
_CHECKED = (
    *_PLAN,
    Column("route", "runs", right=False),
    Column("state", "is", right=False),
    *TIMES,
    Column("err_ratio", "mismatch", percent),
    Column("why", "", lambda why: why or "", right=False),
)
MOST_UNTRIED: Final = 10  # problems of an interrupted run with a line each; more are one line
_SHAPES = (
    Column("name", "layer", right=False),
    Column("n", "N"),
    Column("k", "K"),
    Column("layers", "in layers"),
    Column("why", "because of", right=False),
    Column("left_out", "", lambda why: f"left out: {why}" if why else "", right=False),
)


def tune(
    context: typer.Context,
    problem: t.Problems = None,
    file: t.Input = None,
    model_dir: t.ModelDir = None,
    tp: t.Tp = 1,
    nsets: t.Nsets = None,
    batch_size: t.BatchSize = None,
    unfused: t.Unfused = False,
    ep: t.Ep = 1,
    vision_nsets: t.VisionNsets = None,
    from_transformers: t.FromTransformers = False,
    dtype: t.Dtype = None,
    out_dtype: t.OutDtype = None,
    all_bias: t.AllBias = False,
    threads: t.Threads = None,
    skip_bad_rows: t.SkipBadRows = False,
    again: t.All = False,
    libtype: t.Libtype = None,
    space: t.Space = None,
    iters: t.Iters = None,
    warmup: t.Warmup = 2,
    timeout: t.Timeout = None,
    err_ratio: t.ErrRatio = None,
    atol: t.Atol = None,
    rtol: t.Rtol = None,
    min_improvement_pct: t.MinImprovement = None,
    mp: t.Mp = None,
    idle: t.Idle = False,
    output: t.Output = None,
    profile_file: t.ProfileFile = None,
    sort: t.Sort = False,
    run_config: t.RunConfig = None,
    dry_run: DryRun = False,
    verbose: t.Verbose = False,
    log_level: LogLevel = "warning",
    as_json: Json = False,
) -> None:
    """Tune problems now, in the foreground.

    Safe to interrupt: every finished shape is already published, and running programs use it at once. It does not wait
    for other programs and may slow them; what they would spoil is put off (--idle waits for a free device). Without
    problems it takes those in the queue that fit --dtype, --out-dtype and --threads, or 40 built-in ones if it is
    empty, and tries again what failed or was withdrawn. AITER's flags are taken in AITER's spelling. Ends with 1 when a
    problem could not be tuned or none of that kind was ever called, with 75 when one was put off.
    """
    from gemmtuned.daemon.device.devices import find_monitors

    start_logging("debug" if verbose else log_level)
    monitors = find_monitors()
    keys = {m.device.key for m in monitors}
    said = {"dtype": dtype, "out_dtype": out_dtype, "threads": threads}
    given = {name: value for name, value in said.items() if value is not None}
    gpu = any(m.device.kind != "cpu" for m in monitors)
    if threads is None:
        threads = 0 if gpu else default_threads()
    defaults = Defaults(dtype=dtype, out_dtype=out_dtype, threads=threads, all_bias=all_bias, gpu=gpu, given=given)
    named = from_words(problem or (), defaults, keys)
    options, notes = _search_options(
        libtype, space, iters, warmup, err_ratio, atol, rtol, min_improvement_pct
    )  # fmt: skip
    for note in (*context.meta.get(META, ()), *notes):
        complain(note)
    if run_config is not None and file is None and not named and model_dir is None:
        file = Path(run_config) if run_config else output
    how = OfModel(
        tp=tp, ep=ep, nsets=nsets, vision_nsets=vision_nsets, batch_size=batch_size, unfused=unfused,
        transformers=from_transformers,
    )  # fmt: skip
    wanted = gather(
        named, defaults, file=file, model=model_dir, how=how, skip_bad_rows=skip_bad_rows,
        waits=lambda: waiting(settings(), keys, again=again or run_config is not None, defaults=defaults),
    )  # fmt: skip
    asked = bool(named or file or model_dir)
    if not wanted.problems and asked and not wanted.derived:
        raise typer.BadParameter("no problem given: name some, or a file that holds some with -i")
    if dry_run or not wanted.problems:
        before = 0 if again or run_config is not None else decided(settings(), keys, wanted.problems)
        show(_plan(wanted, before, dry_run=dry_run), as_json=as_json)
        if (asked or wanted.never_called) and not dry_run:  # asked: all that the model runs is left out
            raise typer.Exit(1)
        return
    shares = _shares(monitors, wanted.problems, mp)
    if not asked:  # said before minutes of work
        complain(" ".join(wanted.notes))
        if not as_json:
            wanted = replace(wanted, notes=[])
    if run_config is not None:
        _check(wanted, run_config, dtype or "bf16", options, shares, timeout, as_json=as_json)
        return
    files = _Files(output, profile_file, wanted.problems, sort=sort)
    from gemmtuned.daemon.seats.request import Request
    from gemmtuned.daemon.service.main import Tuned, tune_now

    _say_paused(idle)
    done = Tuned()
    for devices, share in shares:
        request = Request(
            problems=share, options=options, again=again, timeout_s=timeout, on_trial=files.note, on_found=files.found
        )
        with progress(quiet=as_json, lines=True) as tell:
            done = done.and_then(tune_now(request, settings(), idle=idle, progress=tell, monitors=devices))
        if done.code:
            break
    files.finish(done)
    show(_report(wanted, done, files.notes), as_json=as_json)
    if done.trouble:
        complain(f"{done.trouble}; what was found is in the database, and not in use before: gemmtuned db publish")
    if done.code or done.failed or files.trouble or done.trouble:
        raise typer.Exit(done.code or 1)
    if done.put_off:
        raise typer.Exit(TryLater.exit_code)


def _say_paused(idle: bool) -> None:
    """Somebody may have paused the tuning of this home for a reason."""
    from gemmtuned.daemon.service.rules import Rules

    paused = Rules().why_not(time.time(), settings().home)
    if paused:
        what = "this run waits" if idle else "the daemon rests, this run does not"
        complain(f"{paused}: {what} (gemmtuned resume ends the pause)")


def _search_options(
    libtype: list[str] | None,
    space: list[str] | None,
    iters: int | None,
    warmup: int,
    err_ratio: float | None,
    atol: float | None,
    rtol: float | None,
    min_improvement_pct: float | None,
) -> tuple[SearchOptions, list[str]]:
    from gemmtuned.daemon.protocol.options import DEFAULTS, SearchOptions

    backends, notes = t.libraries(libtype or [], tuple(NATIVE_CODES))
    values, more = t.space(space or [])
    if err_ratio is None and (atol is not None or rtol is not None):
        err_ratio = 0.0  # the Triton guide's tolerances: no element may be outside
    gain = DEFAULTS.min_gain if min_improvement_pct is None else 1 + min_improvement_pct / 100
    options = SearchOptions(
        backends=backends, space=values, iters=iters, warmup=warmup, err_ratio=err_ratio, atol=atol, rtol=rtol,
        min_gain=gain,
    )  # fmt: skip
    return options, notes + more


_Share = tuple[list["Monitor"], list["Problem"]]


def _shares(monitors: Sequence[Monitor], wanted: Sequence[Problem], most: int | None) -> list[_Share]:
    """Where these problems run: without threads on GPUs, which come first, with threads on CPUs; `most` of each."""
    gpus = [m for m in monitors if m.device.kind != "cpu"]
    cpus = [m for m in monitors if m.device.kind == "cpu"]
    on_gpu = [p for p in wanted if gpus and not p.threads]
    on_cpu = [p for p in wanted if p.threads or not gpus]
    shares = [(devices[:most], problems) for devices, problems in ((gpus, on_gpu), (cpus, on_cpu)) if problems]
    there = max(len(devices) for devices, _ in shares)
    if most is not None and most > there:
        complain(f"--mp {most}: there {'is 1 device' if there == 1 else f'are {there} devices'} for these problems")
    return shares


class _Files:
    """What -o and -o2 name, written after each shape. A disk that refuses is reported once and ends no tuning."""

    def __init__(self, output: Path | None, profile: Path | None, wanted: Sequence[Problem], *, sort: bool) -> None:
        self.trouble = ""
        output, profile = (None if path is None else target_of(path, settings()) for path in (output, profile))
        self._table = TunedTable(output, table_family(wanted), sort=sort) if output is not None else None
        self._profile = Profile(profile)

    def note(self, trial: Trial, device: Device) -> None:
        self._profile.add(trial, device)

    def found(self, found: Sequence[Solution], device: Device) -> None:
        if self._table is not None:
            self._table.add(found[0], device, err_ratio=self._profile.err_ratio(found[0]))
        self._write()

    def finish(self, done: Tuned) -> None:
        """Add what had a verdict before; what this run gave is there already."""
        for solution in done.solutions.values():
            device = done.devices.get(solution.device)
            if self._table is not None and device is not None and not self._table.holds(solution, device):
                self._table.add(solution, device)
        self._write()
        if self._table is not None and not self.trouble:
            try:
                self._table.finish()
            except TableError as err:
                self.trouble = str(err)
                complain(f"{err}; the database and the published tables hold what is found")

    @property
    def notes(self) -> list[str]:
        """What the tables could not hold."""
        left_out = [*self._table.left_out] if self._table is not None else []
        if not left_out:
            return []
        other, do = family_of(left_out[0]), "does" if len(left_out) == 1 else "do"
        why = "AITER has no column for it" if other is None else f"it is of AITER's family {other.name}"
        return [f"{len(left_out)} {do} not fit that table, for example {left_out[0]}: {why}"]

    def _write(self) -> None:
        try:
            if self._table is not None:
                self._table.write()
            self._profile.write()
        except TableError as err:
            if not self.trouble:
                complain(f"{err}; the database and the published tables hold what is found")
            self.trouble = str(err)


def _plan(wanted: Wanted, before: int, *, dry_run: bool) -> Report:
    """before: how many have a verdict, which stands as long as the versions do."""
    rows = [{"problem": str(one)} for one in wanted.problems]
    tables = [Table("shapes", _SHAPES, wanted.derived)] if wanted.derived else []
    keys = wanted.keys
    note = (
        f"{len(rows)} to tune, in {several(keys['units'], 'unit')} of work; look-up keys: {keys['exact_keys']} exact, "
        f"{keys['fine_keys']} fine, {keys['coarse_keys']} coarse"
    )
    if before:
        note += f"; {before} of them have a verdict, measured again with --all or other versions"
    facts = {"dry_run": dry_run, "failed": 0, "decided": before, **keys}
    never = [problem for problem in wanted.problems if why_not(problem)]
    said = [f"{len(never)} of them cannot be tuned, for example {never[0]}: {why_not(never[0])}"] if never else []
    return Report("tune", [*tables, Table("rows", _PLAN, rows)], facts, notes=[*wanted.notes, note, *said])


def _report(wanted: Wanted, done: Tuned, notes: list[str]) -> Report:
    rows: list[dict[str, Any]] = []
    for problem in wanted.problems:
        solution = done.solutions.get(problem)
        if solution is None:
            later = done.put_off.get(problem)
            why = f"{PUT_OFF}: {later}" if later else done.failed.get(problem, "not tuned")
            rows.append({"problem": str(problem), "why": why})
            continue
        route = str(solution.candidate)
        why = "torch's own is best" if solution.state == "default_best" else ""
        if problem in done.earlier:
            why = ", ".join(filter(None, (why, "measured before")))
        if problem in done.unpublished:
            why += " of what was asked for: not published"
        speedup = solution.baseline_us / solution.us
        rows.append({**solution.to_row(), "problem": str(problem), "route": route, "speedup": speedup, "why": why})
    facts = {"dry_run": False, "failed": len(done.failed), "put_off": len(done.put_off)}
    tables = [Table("shapes", _SHAPES, wanted.derived)] if wanted.derived else []
    counted = set(map(str, done.untried)) if len(done.untried) > MOST_UNTRIED else set()
    tables.append(Table("rows", _DONE, [row for row in rows if row["problem"] not in counted]))
    if counted:
        alike = [row for row in rows if row["problem"] in counted]
        tables.append(Table("rows", _DONE, alike, instead=f"{len(alike)} more: {alike[0]['why']}"))
    if done.others > CROWDED:
        notes = [
            *notes,
            f"others used up to {done.others:.0%} of the device meanwhile: on a quiet one times are surer"
            + (f", and a daemon that finds it so measures {done.crowded} of them again" if done.crowded else ""),
        ]
    if done.put_off:
        notes = [
            *notes,
            *_reasons(done.put_off.values()),
            "nothing is decided about what was put off, and it stays to be tuned. Run it again when nothing else uses "
            "the device, or with --idle, which waits for that",
        ]
    said = f"{len(done.solutions)} of {len(wanted.problems)} have a verdict"
    if done.earlier:
        said += f", {len(done.earlier)} from before (--all measures them again)"
    return Report("tune", tables, facts, notes=[*wanted.notes, *notes, said])


def _reasons(messages: Iterable[str]) -> Iterator[str]:
    """Why some were put off, each reason once with how many: those that differ in figures alone are one."""
    alike: dict[str, list[str]] = {}
    for reason in messages:
        alike.setdefault(re.sub(r"[0-9.]+", "0", reason), []).append(reason)
    for reasons in alike.values():
        yield f"{len(reasons)} put off: {reasons[0]}"


def _check(
    wanted: Wanted,
    run_config: str,
    dtype: str,
    options: SearchOptions,
    shares: Sequence[_Share],
    timeout: float | None,
    *,
    as_json: bool,
) -> None:
    from gemmtuned.daemon.seats.left_out import Pieces
    from gemmtuned.daemon.seats.worker import Deadlines, Worker
    from gemmtuned.daemon.service.check import check
    from gemmtuned.reports.chosen import of_table, published

    total = len(wanted.problems)
    rows: list[dict[str, Any]] = []
    failed = later = 0
    deadlines = Deadlines(timeout_s=timeout)

    def each() -> Iterator[Checked]:
        for devices, asked in shares:
            chosen = of_table(Path(run_config), asked, dtype=dtype) if run_config else published(settings(), asked)
            make = partial(Worker, devices[0].id, nice=0, deadlines=deadlines, pieces=Pieces.of(settings()))
            yield from check(chosen, options, make)

    with progress(quiet=as_json, lines=True) as tell:
        for found in each():
            tell(len(rows) + 1, total, str(found.problem))
            failed += not found.is_good
            later += found.state == "put off"
            speedup = found.baseline_us / found.us if found.us and found.baseline_us else None
            rows.append({
                "problem": str(found.problem), "route": str(found.candidate), "state": found.state, "us": found.us,
                "baseline_us": found.baseline_us, "speedup": speedup, "err": found.err, "err_ratio": found.err_ratio,
                "why": found.note,
            })  # fmt: skip
    facts = {"dry_run": False, "failed": failed, "put_off": later, "checked": len(rows) - later}
    notes = [*wanted.notes, f"{len(rows) - later} checked, {failed} must not be used; nothing was changed"]
    if later:
        notes.append(f"{later} put off: run it again when nothing else uses the device")
    show(Report("tune", [Table("rows", _CHECKED, rows)], facts, notes=notes), as_json=as_json)
    if failed or later:
        raise typer.Exit(1 if failed else TryLater.exit_code)
