"""`gemmtuned demo`: the whole loop on this machine, in a minute."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer

from gemmtuned.commands.cpu_of_others import Others, crowd
from gemmtuned.commands.native_library import build_before
from gemmtuned.commands.options import settings
from gemmtuned.configs.errors import TryLater
from gemmtuned.reports.render import complain, several, terminal

CROWDED: Final = 0.1  # share of the CPUs: others that use more can be why nothing is found


def demo(
    home: Annotated[
        Path | None,
        typer.Option("--home", metavar="DIR", help="Where its database and tables go; a new folder if not given."),
    ] = None,
) -> None:
    """See the loop on this machine, with a small decoder.

    Two copies of it run, one of them tuned while it runs. Takes about a minute and nothing but torch. Your own home is
    not touched.
    """
    from gemmtuned.demo.loop import run

    folder = Path(tempfile.mkdtemp(prefix="gemmtuned-demo-")) if home is None else home.resolve()
    if home is not None and folder.exists() and any(folder.iterdir()):
        raise typer.BadParameter(f"{folder} is not empty: name a new folder")
    build_before([sys.executable], settings())
    load = crowd()
    if load:
        complain(f"other programs use this machine ({load}): times say little then, and nothing may be found")
    others = Others()
    try:
        result = run(folder, say=_say)
    except BaseException:
        _forget(folder, home)
        raise
    _say("")
    if not result.verdicts:
        _forget(folder, home)
        share = others.share()
        _say(f"No shape had a verdict when the time was over: other programs used {_of_cpus(share)} meanwhile.")
        if share > CROWDED:
            _say("Run it again when they rest; gemmtuned doctor says whether all else is in order.")
        else:
            _say("This machine is slow, then, or something is not in order: gemmtuned doctor says what.")
        raise typer.Exit(TryLater.exit_code)
    median, _, _ = result.gain(result.after)
    slower = f"{result.slower()} of {several(len(result.after['hooked']), 'round')} went slower"
    if result.is_clear():
        _say(f"{median:.2f}x in {result.took_s:.0f} s, in processes that were never restarted.")
        if result.slower():
            _say(f"{slower}; other programs used {_of_cpus(others.share())} meanwhile.")
    else:
        _say(f"No clear gain here ({median:.2f}x, and {slower}): where torch is best it stays.")
    _say(f"The outputs of both differ by {result.difference:.1e} of their sum.")
    _say("")
    _say("Look at what it found:")
    for command in ("coverage", "gains", "report"):
        _say(f"    GEMMTUNED_HOME={folder} gemmtuned {command}")
    _say("")
    _say("Your own program:  GEMMTUNED=1 python serve.py      and beside it:  gemmtuned daemon")
    if not result.is_clear():
        share = others.share()
        when = "run it again when they rest" if share > CROWDED else "they were not in the way"
        complain(f"other programs used {_of_cpus(share)} meanwhile: {when}")


def _forget(folder: Path, home: Path | None) -> None:
    """Remove the new folder, where the user named none."""
    if home is None:
        shutil.rmtree(folder, ignore_errors=True)


def _of_cpus(share: float) -> str:
    """`1.1 of 2 CPUs`."""
    cpus = os.cpu_count() or 1
    return f"{share * cpus:.1f} of {several(cpus, 'CPU')}"


def _say(line: str) -> None:
    """At once, also into a file; on a terminal a long line goes on between two words."""
    from gemmtuned.reports.narrow import say

    say(terminal(), line)
    sys.stdout.flush()
