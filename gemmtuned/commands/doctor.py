"""`gemmtuned doctor`: what is in the way, and the command that mends it."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from gemmtuned.commands.native_library import build_now
from gemmtuned.commands.options import Json, settings
from gemmtuned.configs.errors import SettingError
from gemmtuned.configs.settings import Settings, child_env, wrong_variables
from gemmtuned.reports.doctor import examine
from gemmtuned.reports.render import show

NOWHERE: Final = "/nonexistent/gemmtuned"  # the home that is examined where there is none


def doctor(
    build: Annotated[bool, typer.Option("--build", help="Build the native hook for this torch first.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Start no process that imports torch.")] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read the whole database, as gemmtuned db check does: seconds for 100 MB.")
    ] = False,
    variables: Annotated[bool, typer.Option("--variables", help="Show every variable with its meaning.")] = False,
    as_json: Json = False,
) -> None:
    """Check this installation, name what mends it.

    PASS, WARN or FAIL for each part, what is wrong last. Ends with 1 when a check failed. Changes nothing but, with
    --build, the cache.
    """
    wrong = wrong_variables()
    try:
        here = settings(without=wrong)
    except SettingError as err:  # no home folder at all
        wrong["GEMMTUNED_HOME"] = str(err)
        here = Settings.from_env(child_env(**{**dict.fromkeys(wrong), "GEMMTUNED_HOME": NOWHERE}))
    not_built = build_now(here) if build else ""
    report, failed = examine(here, quick=quick, wrong=wrong, deep=deep, variables=variables, not_built=not_built)
    show(report, as_json=as_json)
    if failed:
        raise typer.Exit(1)
