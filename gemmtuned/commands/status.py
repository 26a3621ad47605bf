"""`gemmtuned status`: what goes on now."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any, Final

import typer

from gemmtuned.commands.options import Json, settings
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.manifest import read_manifest
from gemmtuned.configs.settings import Settings
from gemmtuned.db.ask import kept_open
from gemmtuned.reports.checks import PASS
from gemmtuned.reports.checks_store import salvages
from gemmtuned.reports.published import standing
from gemmtuned.reports.render import Report, complain, show
from gemmtuned.reports.source import no_database
from gemmtuned.reports.status import report
from gemmtuned.reports.status_fleet import with_fleet

WATCH_S: Final = 2.0


def status(
    watch: Annotated[
        bool, typer.Option("--watch", help=f"Show it again every {WATCH_S:g} s until Ctrl-C; gemmtuned top does more.")
    ] = False,
    as_json: Json = False,
) -> None:
    """What goes on: daemon, programs, generations."""
    here = settings()
    while True:
        with kept_open(here.db):
            answer = _answer(here)
        if watch and not as_json and sys.stdout.isatty():
            print("\x1b[H\x1b[2J", end="")
        show(answer, as_json=as_json)
        sys.stdout.flush()
        if not watch:
            return
        time.sleep(WATCH_S)
        if not as_json:
            print()


def _answer(here: Settings) -> Report:
    if not here.db.exists():
        nothing: dict[str, Any] = {
            "home": str(here.home),
            "generation": 0,
            "published_generation": None,
            "published_differs": None,
            "daemon": None,
            "covered_share": None,
            "saved_us": 0.0,
            "frozen_problems": 0,
            "unraced_problems": 0,
            "unfit_problems": 0,
            "asked_again": 0,
            "untunable_problems": 0,
            "engine_paths": [],
            "dropped_calls": {},
            "fleet": None,
        }
        tables = ("devices", "sessions", "environments")
        off = here.switched_off
        return no_database("status", here, *tables, **nothing, switched_off=off)
    from gemmtuned.daemon.status_file import read_notice
    from gemmtuned.db import queries
    from gemmtuned.db.fleet_state import fleet_state

    published = None
    try:
        manifest = read_manifest(here.config_dir)
        published = manifest.generation if manifest else None
    except TableError as err:
        complain(str(err))
    newest = queries.publications(here.db, limit=1)
    answer = report(
        here,
        notice=read_notice(here.home),
        published=published,
        generation=newest[0]["generation"] if newest else 0,
        sessions=queries.sessions(here.db),
        covered_time=queries.covered_time(here.db),
        environments=queries.environments(here.db),
        saved_us=queries.saved_us(here.db),
        frozen=queries.frozen(here.db),
        unraced=queries.unraced(here.db),
        unfit=queries.unfit(here.db),
        asked_again=queries.asked_again(here.db),
        differs=standing(here),
        salvages=[check for check in salvages(here) if check.result != PASS],
        now_s=time.time(),
    )
    return with_fleet(answer, fleet_state(here.db))
