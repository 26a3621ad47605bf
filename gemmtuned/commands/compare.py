"""`gemmtuned compare -- CMD`: run a program off, capture only and on, alternated, and say what was gained."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import textwrap
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import IO, Annotated, Final

import typer

from gemmtuned.commands.cpu_of_others import Others
from gemmtuned.commands.native_library import build_before
from gemmtuned.commands.options import Json, number, settings, whole_number
from gemmtuned.commands.run import program
from gemmtuned.configs.errors import GemmtunedError, StoreError
from gemmtuned.configs.numbers import decimal
from gemmtuned.configs.settings import child_env
from gemmtuned.reports.comparison import ARMS, report
from gemmtuned.reports.progress import progress
from gemmtuned.reports.render import clean, complain, show

_SWITCHES: Final = {
    "off": {"GEMMTUNED": "0", "GEMMTUNED_DISPATCH": "0"},
    "capture": {"GEMMTUNED": "1", "GEMMTUNED_DISPATCH": "0"},
    "on": {"GEMMTUNED": "1", "GEMMTUNED_DISPATCH": "1"},
}
_EVER_S: Final = 1e9
SHORT_S: Final = 20.0  # wall time: importing torch is a tenth of it
_TAIL_BYTES: Final = 1 << 20  # at the end of a program's output, where its figure is looked for


class _ProgramFailed(GemmtunedError):
    """The compared program failed, or did not print the figure."""


def _pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text, re.MULTILINE)
    except re.error as err:
        raise typer.BadParameter(f"{text!r} is not a regular expression: {err}") from err
    if pattern.groups != 1:
        raise typer.BadParameter(f"{text!r} has {pattern.groups} groups, expected one around the number")
    return pattern


class _Key:
    """The figure under a key of the last JSON object that the program printed on a line of its own; a.b goes deeper."""

    def __init__(self, path: str) -> None:
        self.pattern = path

    def findall(self, text: str) -> list[str]:
        """As of a regular expression: every value found, in order."""
        found = []
        for line in text.splitlines():
            try:
                value = json.loads(line) if line.lstrip().startswith("{") else None
            except (ValueError, RecursionError):
                continue
            for name in self.pattern.split("."):
                value = value.get(name) if isinstance(value, dict) else None
            if isinstance(value, (int, float, str)):
                found.append(str(value))
        return found


Rounds = Annotated[int, typer.Option(parser=whole_number(1, 1000), metavar="N", help="Runs of each arm.")]
TimeoutS = Annotated[float, typer.Option(parser=number(0.1), metavar="SECONDS", help="Longest a run may take.")]


def compare(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The program, as `run` takes it.")],
    rounds: Rounds = 5,
    figure: Annotated[
        re.Pattern[str] | None,
        typer.Option(
            parser=_pattern,
            metavar="REGEX",
            help="Compare the last number of the output that this matches, its one group, in place of wall time.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The same for a program that prints JSON lines: this key of the last; a.b goes deeper."
        ),
    ] = None,
    lower_is_better: Annotated[bool, typer.Option("--lower-is-better", help="For a figure, as for a time.")] = False,
    timeout_s: TimeoutS = 3600.0,
    warm_up: Annotated[bool, typer.Option(help="One run before the first round, not counted.")] = True,
    as_json: Json = False,
) -> None:
    """Measure what is gained by one of your programs.

    Runs it off, capture only and on, in turns. Says "within noise" when that is all it is. The program's own output
    is kept back, and its calls are in no report. Rounds in which other programs used much of the CPU are left out
    where enough others remain, and it says how busy the machine was. It takes 3 runs a round, and one to warm up.

    Example: gemmtuned compare --figure 'tokens/s: ([0-9.]+)' -- python bench.py
    """
    if figure is not None and key is not None:
        raise typer.BadParameter("--figure and --key both say where the figure is: give one")
    where = _Key(key) if key is not None else figure
    argv = program(command)
    build_before(argv, settings())
    figures: dict[str, list[float]] = {arm: [] for arm in ARMS}
    others: list[float] = []  # for each round the largest share of the machine that others used in one of its runs
    total = rounds * len(ARMS) + warm_up
    if not as_json:
        complain(f"{total} runs of {_short(command)}: {rounds} of each arm{', one to warm up' * warm_up}")
    with ExitStack() as scratch, progress(quiet=as_json, steady=True) as tell:
        counts = scratch.enter_context(tempfile.TemporaryDirectory(prefix="gemmtuned-compare-"))
        if warm_up:
            tell(0, total, "warm-up")
            _run(argv, "on", where, timeout_s, counts)
        for turn in range(rounds):
            shares = []
            for number, arm in enumerate(_in_order(turn)):
                tell(turn * len(ARMS) + number + warm_up, total, f"round {turn + 1}: {arm}")
                value, share = _run(argv, arm, where, timeout_s, counts)
                figures[arm].append(value)
                shares.append(share)
            others.append(max(shares))
        hits = _hits(Path(counts, "on.db"))
    unit = "s" if where is None else key or "figure"
    better = where is not None and not lower_is_better
    answer = report(command, figures, unit=unit, higher_is_better=better, others=others, hits=hits)
    if where is None and median(figures["off"]) < SHORT_S:
        answer = replace(answer, notes=[*answer.notes, _SHORT_RUN])
    show(answer, as_json=as_json)


_SHORT_RUN: Final = "much of so short a run is start-up: compare the program's own figure with --figure or --key"


def _short(command: list[str]) -> str:
    return textwrap.shorten(" ".join(command), 80, placeholder=" ...")


def _in_order(turn: int) -> list[str]:
    """Each arm comes first, second and last equally often, so that none is always the one after another."""
    return [ARMS[(turn + number) % len(ARMS)] for number in range(len(ARMS))]


def _run(
    argv: list[str], arm: str, figure: re.Pattern[str] | _Key | None, timeout_s: float, counts: str
) -> tuple[float, float]:
    """(wall time in seconds or the figure it printed, share of the CPU that others used) of one run of the program.

    counts: folder of the databases that the runs' calls go to, one for each arm; they are no traffic.
    """
    env = child_env(TORCH_DEVICE_BACKEND_AUTOLOAD="1", GEMMTUNED_DB=f"{counts}/{arm}.db", **_SWITCHES[arm])
    with tempfile.TemporaryFile() as out:
        others = Others()
        start = time.perf_counter()
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env)
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired as err:
            raise _ProgramFailed(f"{argv[0]} ({arm}) ran longer than {timeout_s:g} s: raise --timeout-s") from err
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        wall_s = time.perf_counter() - start
        share = others.share()
        text = _tail(out)
    if code != 0:
        last = " | ".join(text.strip().splitlines()[-3:])
        raise _ProgramFailed(f"{argv[0]} ({arm}) ended with {code}. It wrote last: {clean(last) or 'nothing'}")
    if figure is None:
        return wall_s, share
    found = figure.findall(text)
    value = decimal(found[-1].strip()) if found else None
    if value is None:
        what = f"{found[-1]!r} is no number" if found else "nothing it printed matches"
        raise _ProgramFailed(f"{argv[0]} ({arm}): {what} for {figure.pattern!r}")
    if value <= 0:
        raise _ProgramFailed(f"{argv[0]} ({arm}): figure is {value:g}, expected a number above 0")
    return value, share


def _hits(database: Path) -> tuple[int, int] | None:
    """(calls that ran a solution, all calls) that were counted there; None where it cannot be read."""
    from gemmtuned.db import queries

    if not database.exists():
        return 0, 0
    try:
        rows = queries.coverage(database, by="device", since_s=_EVER_S)
    except StoreError:
        return None
    return sum(r["exact_calls"] + r["padded_calls"] for r in rows), sum(r["calls"] for r in rows)


def _tail(out: IO[bytes]) -> str:
    size = out.seek(0, 2)
    out.seek(max(0, size - _TAIL_BYTES))
    return out.read().decode(errors="replace")
