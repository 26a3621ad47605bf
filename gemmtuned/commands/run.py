"""`gemmtuned run`: start a program with capture and dispatch on."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from gemmtuned.commands.native_library import build_before, say
from gemmtuned.commands.options import settings
from gemmtuned.commands.spot_checking import check_tables
from gemmtuned.configs.beside_aiter import aiter_captures
from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.settings import Settings, child_env
from gemmtuned.reports.why_nothing import why_off

UPGRADE_WAIT_S: Final = 5.0  # for others who hold the database
Command = Annotated[list[str], typer.Argument(metavar="COMMAND...", help="python serve.py, or serve.py alone.")]


def run(
    command: Command,
    run_label: Annotated[str | None, typer.Option(help="Name of this workload in reports (GEMMTUNED_RUN).")] = None,
    capture_only: Annotated[bool, typer.Option("--capture-only", help="Count, and run stock torch.")] = False,
) -> None:
    """Start a program with capture and dispatch on.

    GEMMs without a solution are counted, tuned ones use theirs. The native hook is built first when this torch has
    none yet, once. Then the program replaces this process, so signals and its exit code are its own. The same without
    this command: gemmtuned doctor --build, then GEMMTUNED=1 python serve.py
    """
    argv = program(command)
    aiters = aiter_captures()
    if aiters:
        say(f"AITER_TUNE_GEMM is not passed on: {aiters}")
    env = child_env(
        GEMMTUNED="1",
        **({"AITER_TUNE_GEMM": None} if aiters else {}),
        TORCH_DEVICE_BACKEND_AUTOLOAD="1",  # some launchers set 0, and torch then never calls us
        **({"GEMMTUNED_RUN": run_label} if run_label else {}),
        **({"GEMMTUNED_DISPATCH": "0"} if capture_only else {}),
    )
    here = settings()
    for line in why_off(here, program=True):
        say(line)
    build_before(argv, here)
    check_tables(here)
    _bring_up_to_date(here)
    sys.stdout.flush()
    os.execvpe(argv[0], argv, env)  # noqa: S606  no shell: the user's own command line


def _bring_up_to_date(here: Settings) -> None:
    """The database that the program will add its counts to: a program itself never changes the schema of one."""
    from gemmtuned.db.store import Store

    path, locks = here.counts
    if here.disabled or not path.exists():
        return
    try:
        Store(path, locks=locks, timeout_s=UPGRADE_WAIT_S, create=False).close()
    except GemmtunedError as err:
        say(f"the program's counts may be lost: {err}")


def program(command: list[str]) -> list[str]:
    """The command line to start: a Python file gets this interpreter put before it.

    Raises a usage error when there is no such program.
    """
    name = command[0]
    if shutil.which(name):
        return command
    if name.endswith(".py") and Path(name).is_file():
        return [sys.executable, *command]
    raise typer.BadParameter(f"{name!r} is neither a program on the path nor a Python file")
