"""`gemmtuned doctor`: what is in the way, and the command that mends it."""

from __future__ import annotations

from typing import Annotated

import typer

from gemmtuned.commands.options import Json, settings
from gemmtuned.configs.settings import wrong_variables
from gemmtuned.reports.doctor import examine
from gemmtuned.reports.render import show


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Start no process that imports torch.")] = False,
    as_json: Json = False,
) -> None:
    """Check this installation, name what mends it.

    PASS, WARN or FAIL for each part. Ends with 1 when a check failed. Changes nothing.
    """
    wrong = wrong_variables()
    report, failed = examine(settings(without=wrong), quick=quick, wrong=wrong)
    show(report, as_json=as_json)
    if failed:
        raise typer.Exit(1)
