"""Where `gemmtuned tune` has its problems from: the command line, a file, a model, what waits, or built in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import typer

from gemmtuned.commands.options import seen, settings
from gemmtuned.commands.tune_options import dtype as dtype_name
from gemmtuned.commands.tune_options import sizes
from gemmtuned.configs.aiter_untuned import Untuned
from gemmtuned.configs.errors import ProblemError, TableError
from gemmtuned.configs.formats import read_any, tunableop
from gemmtuned.configs.hint import Imported
from gemmtuned.configs.model_shapes import NSETS, Plan, plan, problems, read_config
from gemmtuned.configs.padding import COVERS
from gemmtuned.configs.problem import Problem, as_by_default, known_problems
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.tunable import can_tune
from gemmtuned.reports.explain import matching
from gemmtuned.reports.problem_list import Shape, read_list, shape_or_problem, spelled
from gemmtuned.reports.render import complain, several

# Those of AITER's guide to tuning the atomic kernel: every (N, K) at every M
BUILT_IN_M: Final = (16, 32, 64, 128, 256, 512, 2048, 4096)
BUILT_IN_NK: Final = ((1024, 1024), (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
MOST_STRANGE: Final = 3  # problems that were never called, a line each,
MOST_ALIKE: Final = 3  # with so many that were beside it


@dataclass
class Wanted:
    """Problems, each once and in order; derived: how the shapes of a model came about; notes: for the reader.

    never_called: nothing of the kind that was asked for was ever called here.
    """

    problems: list[Problem] = field(default_factory=list)
    derived: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    never_called: bool = False

    @property
    def keys(self) -> dict[str, int]:
        """How many look-up keys these are, as they stand and padded by AITER's two rules, and how many to measure.

        units: what is tuned as one: a fine bucket with more than three sizes, else each size by itself (db/leases.py).
        """
        keys = {f"{covers}_keys": len({p.filed(covers) for p in self.problems}) for covers in COVERS}
        sizes = Counter(p.filed("fine") for p in self.problems)
        return {**keys, "units": sum(1 if count > 3 else count for count in sizes.values())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a source takes where it says nothing itself.

    dtype: None is bf16, or the model's own.  gpu: whether problems without threads are for one.
    given: those columns of a problem that somebody named.
    """

    dtype: str | None
    out_dtype: str | None
    threads: int
    all_bias: bool
    gpu: bool = False
    given: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, found: Sequence[Problem]) -> list[Problem]:
        """The output dtype where a problem names none other than its own, and its twin with a bias."""
        out = [replace(p, out_dtype=self.out_dtype) if self.out_dtype and p.out_dtype == p.dtype else p for p in found]
        if self.all_bias:
            out = [twin for p in out for twin in (replace(p, bias=False), replace(p, bias=p.family == "dense"))]
        return out

    @property
    def kind(self) -> str:
        """What of a problem somebody named: `dtype bf16, threads 2`."""
        return ", ".join(f"{_option(name)} {value}" for name, value in self.given.items())

    def fits(self, problem: Problem) -> bool:
        """Whether it is of that kind."""
        return all(getattr(problem, name) == value for name, value in self.given.items())

    def as_called(self, found: Sequence[Problem]) -> list[Problem]:
        """Problems of a source that knows no math mode, as programs call them by torch's defaults."""
        return [as_by_default(p, gpu=self.gpu and not p.threads) for p in found]


def from_words(words: Sequence[str], defaults: Defaults, devices: Collection[str]) -> list[Problem]:
    """The problems that the command line names; a shape alone stands for what was seen of it on these devices.

    As far as an option says of what kind they are to be; the one of the defaults when there is none.
    """
    found: list[Problem] = []
    strange: list[str] = []
    asked = shape_or_problem(words)
    here = settings() if asked else None
    if here is not None and not here.db.exists():  # nothing was ever called: there is nothing to say of that
        here = None
    for word in asked:
        one = _named(word, defaults)
        shape = Shape(one.m, one.n, one.k)
        rows = [row for row in seen(here, shape) if row["device"] in devices] if here else []
        if isinstance(word, str):
            known, named = matching(rows, shape._asdict()), [one]
        else:
            known = matching(rows, {**shape._asdict(), **defaults.given})
            named = known or defaults.as_called([one])
        if here is not None and named[0] not in known:
            strange.append(_never_called(named[0], matching(rows, shape._asdict())))
        found += named if isinstance(word, str) else defaults.apply(named)
    for line in strange[:MOST_STRANGE]:
        complain(line)
    if strange[MOST_STRANGE:]:
        complain(f"{len(strange) - MOST_STRANGE} more of those named were never called here")
    return list(dict.fromkeys(found))


def _named(word: Shape | str, defaults: Defaults) -> Problem:
    """The problem of this spelling; of a shape what it stands for where it was never called."""
    if isinstance(word, str):
        return spelled(word, threads=defaults.threads, gpu=defaults.gpu)
    return Problem(m=word.m, n=word.n, k=word.k, dtype=defaults.dtype or "bf16", threads=defaults.threads)


def _never_called(problem: Problem, alike: Sequence[Problem]) -> str:
    """Said before minutes of work. alike: what was called or tuned of the same M, N and K."""
    said = f"{problem} was never called here"
    if alike:
        more = f" and {len(alike) - MOST_ALIKE} more" if len(alike) > MOST_ALIKE else ""
        known = "is known" if len(alike) == 1 else "are known"  # called, or tuned without a call
        return f"{said}, but {', '.join(map(str, alike[:MOST_ALIKE]))}{more} {known}"
    return f"{said}, nor was anything of this M, N and K: it is tuned as it is named"


def from_file(file: Path, defaults: Defaults, *, skip: bool) -> list[Problem]:
    """The problems of a file: a plain list, an AITER table, or whatever `gemmtuned import` reads.

    Raises TableError when it cannot be read, ProblemError for its first bad row unless bad rows are skipped.
    """
    stdin = str(file) == "-"
    try:
        with open(0 if stdin else file, encoding="utf-8-sig", errors="replace", closefd=not stdin) as lines:
            text = lines.read()
    except OSError as err:
        raise TableError(f"{file}: cannot be read ({err.strerror or err})") from err
    name = "stdin" if stdin else file.name
    if tunableop.is_ours(text[:4096]):
        found = _untuned(tunableop.read_lines(text.splitlines(keepends=True), name=name), defaults)
    elif text.lstrip().startswith(("{", "[")) and not stdin:
        found = _untuned(read_any(file), defaults)
    else:
        found = read_list(
            text.splitlines(keepends=True), name=name, dtype=defaults.dtype or "bf16", threads=defaults.threads,
            gpu=defaults.gpu,
        )  # fmt: skip
    if found.complaints and not skip:
        bad, good = len(found.complaints), len(found.problems)
        way = f"--skip-bad-rows tunes the {several(good, 'problem')} of the others" if good else "no row is good"
        raise ProblemError(f"{found.complaints[0]}. Bad rows in all: {bad}; {way}")
    for complaint in found.complaints:
        complain(f"{complaint}: skipped")
    return defaults.apply(found.problems)


def _untuned(found: Imported, defaults: Defaults) -> Untuned:
    """The problems of another tool's file; a row without one of ours is a complaint, as a bad row is."""
    known = [hint.problem for hint in found.hints if hint.problem is not None]
    complaints = [
        *found.reasons,
        *(f"{found.path}: {several(number, 'row')}: {why}" for why, number in found.kept.items()),
    ]
    asked = [replace(p, threads=p.threads or defaults.threads) for p in dict.fromkeys(known)]
    tuned = defaults.as_called([p for p in asked if can_tune(p)])
    left = [p for p in asked if not can_tune(p)]
    if left:
        complaints.append(f"{found.path}: {several(len(left), 'problem')} cannot be tuned yet, for example {left[0]}")
    return Untuned(tuple(dict.fromkeys(tuned)), tuple(complaints))


@dataclass(frozen=True, slots=True, kw_only=True)
class OfModel:
    """How a model is split and which M it sees. nsets, vision_nsets: None is the usual, of towers none."""

    tp: int = 1
    ep: int = 1
    nsets: str | None = None
    vision_nsets: str | None = None
    batch_size: int | None = None
    unfused: bool = False
    transformers: bool = False

    @property
    def is_usual(self) -> bool:
        """Whether nothing was said that goes with a model alone."""
        return replace(self, batch_size=None) == OfModel()


def from_model(folder: Path, defaults: Defaults, how: OfModel) -> Wanted:
    """The problems of a model's linear layers, and one line for each on how it was derived."""
    config = read_config(folder)
    planned = _planned(config, how)
    dtype = defaults.dtype or dtype_name(planned.dtype or "bf16")
    weights = planned.weights
    if defaults.dtype is not None:  # somebody says what its weights are: as such they can be tuned
        weights = [replace(weight, dtype="", scale="") for weight in weights]
    times = how.batch_size or 1
    ms = [m * times for m in (NSETS if how.nsets is None else sizes(how.nsets))]
    patches = [m * times for m in sizes(how.vision_nsets)] if how.vision_nsets else []
    found = problems(weights, ms, dtype=dtype, threads=defaults.threads, vision_ms=patches)
    wanted = Wanted(defaults.apply(defaults.as_called(found)))
    towers = [weight for weight in weights if weight.sees]
    for weight in weights:
        unseen = f"its M is the {weight.sees}: --vision-nsets says which" if weight in towers and not patches else ""
        row = {
            "name": weight.name, "n": weight.n, "k": weight.k, "batch": weight.batch, "bias": weight.bias,
            "layers": weight.count, "experts": weight.experts, "part": weight.part or None,
            "dtype": weight.dtype or dtype, "scale": weight.scale or None, "why": weight.why,
            "left_out": weight.left_out or unseen or None,
        }  # fmt: skip
        wanted.derived.append(row)
    tuned = sum(1 for row in wanted.derived if not row["left_out"])
    wanted.notes.append(
        f"{tuned} of {several(len(weights), 'shape')} of {folder} at M = {', '.join(map(str, ms))}, {dtype}"
    )
    if not (defaults.dtype or planned.dtype):
        wanted.notes.append(f"config.json tells no dtype: taken as {dtype}, --dtype says another")
    wanted.notes += planned.notes
    return wanted


def _planned(config: Mapping[str, Any], how: OfModel) -> Plan:
    if not how.transformers:
        return plan(config, tp=how.tp, fused=not how.unfused, ep=how.ep)
    from gemmtuned.kernels.from_transformers import built

    return built(config, tp=how.tp, ep=how.ep)


def waiting(here: Settings, devices: Collection[str], *, again: bool, defaults: Defaults) -> Wanted:
    """What waits to be tuned on these devices (their keys), most expensive first; again: all that was called, too.

    As far as an option says of what kind they are to be: a dtype, an output dtype, a number of threads.
    """
    from gemmtuned.db import queries

    if not here.db.exists():
        return Wanted()
    called = [row for row in queries.called(here.db) if row["device"] in devices]
    rows = called if again else _queued(queries.untuned(here.db))
    waits = known_problems(row for row in rows if row["device"] in devices)
    found = [p for p in waits if defaults.fits(p)]
    if defaults.given and not found:
        return _none_of_a_kind(known_problems(called), len(waits), defaults)
    if defaults.all_bias:
        found = list(dict.fromkeys(defaults.apply(found)))
    more = " or were called" if again else ""
    of, kind = (f" of {len(waits)}", f", {defaults.kind}") if defaults.given else ("", "")
    note = f"no shapes given, so the {len(found)}{of} that wait to be tuned here{more}{kind}"
    return Wanted(found, notes=[f"{note} (gemmtuned untuned lists what waits)"] if waits else [])


def _none_of_a_kind(called: Sequence[Problem], waits: int, defaults: Defaults) -> Wanted:
    """Why nothing of the kind that was asked for waits; empty where nothing was ever called."""
    tried = sum(map(defaults.fits, called))
    if tried:
        said = "the one problem" if tried == 1 else f"all {tried} problems"
        note = (
            f"{said} of {defaults.kind} called here {'has' if tried == 1 else 'have'} been tried: gemmtuned gains and "
        )
        return Wanted(notes=[note + "untuned say with what result, --all tries again"])
    if not called:
        return Wanted()
    there = "; ".join(f"{_option(name)} {_values(called, name)}" for name in defaults.given)
    note = f"no problem of {defaults.kind} was ever called here ({there} were; {waits} wait): name problems, or give "
    return Wanted(notes=[note + "-i FILE or --model-dir DIR"], never_called=True)


def _option(column: str) -> str:
    return column.replace("_", "-")


def _values(called: Sequence[Problem], column: str) -> str:
    """What these problems have in this column: `1, 2`."""
    return ", ".join(map(str, sorted({getattr(problem, column) for problem in called})))


def _queued(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["state"] in ("queued", "leased")]


def decided(here: Settings, devices: Collection[str], wanted: Sequence[Problem]) -> int:
    """How many of these have a verdict on one of these devices, of their own size or of one that covers it."""
    from gemmtuned.db import queries

    if not here.db.exists():
        return 0
    sizes = {p: [(str(p.filed(covers)), covers) for covers in COVERS] for p in wanted}
    rows = queries.solutions(here.db, problems={problem for keys in sizes.values() for problem, _ in keys})
    known = {(row["problem"], row["covers"]) for row in rows if row["device"] in devices}
    return sum(not known.isdisjoint(keys) for keys in sizes.values())


def built_in(defaults: Defaults, *, batch_size: int | None) -> Wanted:
    """Forty shapes for whoever has none of his own."""
    ms = BUILT_IN_M if batch_size is None else (batch_size,)
    dtype = defaults.dtype or "bf16"
    found = [Problem(m=m, n=n, k=k, dtype=dtype, threads=defaults.threads) for n, k in BUILT_IN_NK for m in ms]
    note = (
        f"no shapes given and none waits to be tuned here, so the {len(found)} built-in ones: name problems, or give "
        "-i FILE or --model-dir DIR"
    )
    return Wanted(defaults.apply(defaults.as_called(found)), notes=[note])


def gather(
    named: Sequence[Problem],
    defaults: Defaults,
    *,
    file: Path | None,
    model: Path | None,
    how: OfModel,
    skip_bad_rows: bool,
    waits: Callable[[], Wanted] = Wanted,
) -> Wanted:
    """All that was asked for, each problem once; when nothing was, what waits() gives, else the built-in shapes.

    Where something waits, and nothing of the kind that is asked for, there is nothing to do.  A batch size is that of
    the built-in ones.
    """
    batch_size = how.batch_size
    if model is None and not how.is_usual:
        raise typer.BadParameter(
            "--tp, --ep, --nsets, --vision-nsets, --unfused and --from-transformers go with --model-dir"
        )
    if batch_size is not None and model is None and (named or file is not None):
        complain("--batch-size has no effect: it goes with --model-dir, or with the built-in shapes")
    if not named and file is None and model is None:
        wanted = waits() if batch_size is None else Wanted()
        return wanted if wanted.notes else built_in(defaults, batch_size=batch_size)
    wanted = Wanted(list(named))
    if file is not None:
        wanted.problems += from_file(file, defaults, skip=skip_bad_rows)
    if model is not None:
        of_model = from_model(model, defaults, how)
        wanted.problems += of_model.problems
        wanted.derived, wanted.notes = of_model.derived, of_model.notes
    wanted.problems = list(dict.fromkeys(wanted.problems))
    return wanted
