"""Options and arguments that several commands share, and how their text is read."""

from __future__ import annotations

import ast
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gemmtuned.arguments import Command
from gemmtuned.commands import completing
from gemmtuned.commands.log_lines import LogLines
from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.nearest_word import did_you_mean
from gemmtuned.configs.numbers import decimal, signed
from gemmtuned.configs.open_files import limit_reached
from gemmtuned.configs.problem import MAX_THREADS, Problem
from gemmtuned.configs.settings import Settings, child_env
from gemmtuned.configs.spelling import SPELLED

if TYPE_CHECKING:
    from gemmtuned.reports.problem_list import Shape

_UNITS_S: Final = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_SPAN: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([a-z]*)")
# key=value, as log lines have them: the value is quoted as repr() does, or runs to the next key
_PAIR: Final = re.compile(
    r"""\b([a-z_][a-z0-9_]*)=('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|.*?)(?=\s+[a-z_][a-z0-9_]*=|\s*$)""", re.S
)
_EVER_S: Final = 3e9  # 95 years
MOST_ROWS: Final = 1_000_000_000
LEVELS: Final = ("debug", "info", "warning", "error")


def seconds(text: str) -> float:
    """`90`, `45m`, `24h`, `7d` as seconds; a usage error for anything else."""
    match = _SPAN.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS_S or float(match[1]) == 0:
        raise typer.BadParameter(f"{text!r} is not a span of time: write 45m, 24h or 7d")
    span_s = float(match[1]) * _UNITS_S[match[2]]
    if span_s > _EVER_S:
        raise typer.BadParameter(f"{text!r} is longer than anything was counted: write 45m, 24h or 7d")
    return span_s


def one_of(text: str, allowed: tuple[str, ...]) -> str:
    """Text if it is allowed, else a usage error that lists what is."""
    if text not in allowed:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(allowed)}{did_you_mean(text, allowed)}")
    return text


def choice(allowed: tuple[str, ...]) -> Callable[[str], str]:
    """A reader of an option that takes one of these words."""

    def read(text: str) -> str:
        return one_of(text, allowed)

    return read


def chosen(allowed: Collection[str], *names: str, **how: Any) -> Any:
    """An option that takes one of these words, which the shell completes. how: as typer.Option has it."""
    words = tuple(allowed)
    return typer.Option(*names, parser=choice(words), autocompletion=beginning(words), **how)


def beginning(words: Sequence[str]) -> Callable[[str], list[str]]:
    """What the shell is offered of these words."""

    def offered(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return offered


def level(text: str) -> str:
    """A logging level's name."""
    return one_of(text.lower(), LEVELS)


def whole_number(least: int = 0, most: int = MOST_ROWS) -> Callable[[str | int], int]:
    """A reader of an option that takes a whole number from least to most."""

    def read(text: str | int) -> int:  # an int is the option's default
        value = signed(str(text))
        if value is None or not least <= value <= most:
            raise typer.BadParameter(f"{str(text)[:40]!r} is not a whole number from {least} to {most}")
        return value

    return read


def threads_option(text: str) -> Any:
    """An option that takes a number of CPU threads. text: its help."""
    return typer.Option(parser=whole_number(0, MAX_THREADS), metavar="N", help=text)


def number(least: float = 0.0, most: float = 1e9) -> Callable[[str | float], float]:
    """A reader of an option that takes a decimal number from least to most."""

    def read(text: str | float) -> float:
        value = decimal(str(text))
        if value is None or not least <= value <= most:
            raise typer.BadParameter(f"{str(text)[:40]!r} is not a number from {least:g} to {most:g}")
        return value

    return read


def default_threads() -> int:
    """The CPU threads that torch takes by default: the physical cores this process may use."""
    import psutil

    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        usable = os.cpu_count() or 1
    return min(usable, psutil.cpu_count(logical=False) or usable)


def start_logging(name: str, form: str = "text") -> None:
    """Send the log lines of `gemmtuned.*` to stderr, one event a line, from this level up; as `text` or `json`."""
    handler = LogLines()
    handler.setFormatter(_JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("gemmtuned")
    logger.handlers[:] = [handler]
    logger.setLevel(name.upper())
    logger.propagate = False


class _JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, event, and the event's key=value pairs as fields of their own."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        first = _PAIR.search(text)
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "event": (text[: first.start()] if first else text).strip(),
            "logger": record.name,
        }
        for pair in _PAIR.finditer(text):
            line.setdefault(pair[1], _value(pair[2]))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _value(text: str) -> object:
    """A value of a log line: numbers and quoted text as what they are."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def problems(texts: list[str], here: Settings) -> list[Problem]:
    """The problems that arguments name, each once. Raises ProblemError.

    One that the database has not got as it is spelled stands for those it has that differ in threads, math mode
    and determinism alone, as far as the argument says nothing of these: who types 8x64x64 means the one there is.
    """
    from gemmtuned.configs.hint import PLAIN
    from gemmtuned.db import queries

    found: dict[Problem, None] = {}
    for text in texts:
        asked = Problem.parse(text)
        near = queries.spelled_like(here.db, asked) if here.db.exists() else []
        said = [name for name in PLAIN if f",{SPELLED[name]}=" in text]
        near = [one for one in near if all(getattr(one, name) == getattr(asked, name) for name in said)]
        found |= dict.fromkeys([asked] if asked in near or not near else near)
    return list(found)


def named(words: Sequence[str], here: Settings) -> list[Problem]:
    """The problems that these words name, each once; of a shape those that were seen. Raises ProblemError."""
    from gemmtuned.reports.explain import matching
    from gemmtuned.reports.problem_list import shape_or_problem

    asked = shape_or_problem(words)
    found: list[Problem] = []
    for word in asked:
        found += problems([word], here) if isinstance(word, str) else matching(seen(here, word), {})
    return list(dict.fromkeys(found))


def never_seen(words: Sequence[str], here: Settings) -> list[str]:
    """A note for each shape or problem named here that no program called and nothing is filed for: mistyped, mostly."""
    from gemmtuned.reports.explain import matching
    from gemmtuned.reports.problem_list import Shape, shape_or_problem

    notes: list[str] = []
    for word in shape_or_problem(words):
        meant = problems([word], here) if isinstance(word, str) else []
        shapes = [Shape(one.m, one.n, one.k) for one in meant] if isinstance(word, str) else [word]
        known = {one for shape in shapes for one in matching(seen(here, shape), {})}
        if not (known.intersection(meant) if meant else known):
            name = word if isinstance(word, str) else " ".join(map(str, word))
            notes.append(f"{name} was never seen here: gemmtuned untuned and gemmtuned gains --all list what was")
    return notes


class ShapeCommand(Command):
    """A command that takes shapes: a size below 0 is a wrong one, and no option that it does not know."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click does, after a look at the numbers."""
        from gemmtuned.reports.problem_list import is_below_0

        takes_value = {name for param in self.params if not getattr(param, "is_flag", True) for name in param.opts}
        for before, arg in zip(["", *args], args, strict=False):
            if arg == "--":
                break
            if is_below_0(arg) and before not in takes_value:
                raise typer.BadParameter(f"{arg}: M, N and K are 1 or more", ctx=ctx)
        return super().parse_args(ctx, args)


def seen(here: Settings, shape: Shape | None = None) -> list[dict[str, Any]]:
    """Rows of all problems that were called, wait or have a solution, or of those of this shape; with device."""
    from gemmtuned.db import queries

    return queries.seen(here.db, shape) if here.db.exists() else []


def settings(*, without: Collection[str] = ()) -> Settings:
    """The settings of this process, as if it did not have the variables `without`.

    Raises SettingError that names the wrong variables, StoreError for a home closed to us.
    """
    here = Settings.from_env(child_env(**dict.fromkeys(without)))
    try:
        here.db.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # for each command to say
    except OSError as err:
        full = limit_reached(err)
        if full:
            raise StoreError(f"{here.db}: {full}") from err
        raise StoreError(f"{here.db}: {err.strerror}. Set GEMMTUNED_HOME to a folder of your own") from err
    return here


Json = Annotated[bool, typer.Option("--json", help="Print JSON: versioned, without colour or progress.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
Run = Annotated[
    str | None,
    typer.Option(
        "--run",
        autocompletion=completing.runs,
        metavar="LABEL",
        help="Only what programs of this label called (GEMMTUNED_RUN).",
    ),
]
Limit = Annotated[int, typer.Option(parser=whole_number(), metavar="N", help="Rows to show; 0 for all.")]
Since = Annotated[float, typer.Option(parser=seconds, metavar="SPAN", help="Traffic of this long: 45m, 24h, 7d.")]
LogFormat = Annotated[str, chosen(("text", "json"), metavar="FORM", help="Log lines as text or json.")]
LogLevel = Annotated[
    str,
    typer.Option(parser=level, autocompletion=beginning(LEVELS), metavar="LEVEL", help=f"One of {', '.join(LEVELS)}."),
]
ProblemTexts = Annotated[
    list[str],
    typer.Argument(
        metavar="M N K | PROBLEM",
        autocompletion=completing.problems,
        help="8 2048 512, 8x2048x512 (all problems of that shape that were seen), or as reports spell one: "
        "bf16:8x2048x1024+bias,threads=2",
    ),
]
