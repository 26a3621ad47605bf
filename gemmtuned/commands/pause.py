"""`gemmtuned pause` and `gemmtuned resume`: the operator's hand on the daemon of a home."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from gemmtuned.commands.options import Json, seconds, settings
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.human_units import moment
from gemmtuned.configs.manifest import make_folder, write_whole
from gemmtuned.daemon.service.rules import PAUSED
from gemmtuned.reports.render import Report, show


def pause(
    span: Annotated[
        float | None, typer.Option("--for", parser=seconds, metavar="SPAN", help="End by itself after: 45m, 2h.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Stop tuning until `gemmtuned resume`.

    A worker that is at work ends within a second; what it measured is kept. Programs go on with what is published.
    """
    here = settings()
    until_s = time.time() + span if span is not None else None
    try:
        make_folder(here.home)
        write_whole(here.home / PAUSED, b"" if until_s is None else f"{until_s:.0f}\n".encode())
    except OSError as err:
        raise TableError(f"{here.home / PAUSED}: cannot be written ({err.strerror or err})") from err
    when = "until gemmtuned resume" if until_s is None else f"until {moment(until_s, time.time())}"
    line = f"paused {when}: nothing is tuned for {here.home}"
    show(Report("pause", facts={"home": str(here.home), "until_s": until_s}, lines=[line]), as_json=as_json)


def resume(as_json: Json = False) -> None:
    """Tune again after `gemmtuned pause`."""
    here = settings()
    was_paused = True
    try:
        (here.home / PAUSED).unlink()
    except FileNotFoundError:
        was_paused = False
    except OSError as err:
        raise TableError(f"{here.home / PAUSED}: cannot be removed ({err.strerror or err})") from err
    line = "resumed" if was_paused else "was not paused"
    show(Report("resume", facts={"home": str(here.home), "was_paused": was_paused}, lines=[line]), as_json=as_json)
