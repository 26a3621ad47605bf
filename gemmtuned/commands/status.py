"""`gemmtuned status`: what goes on now."""

from __future__ import annotations

import time
from typing import Any

from gemmtuned.commands.options import Json, settings
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.manifest import read_manifest
from gemmtuned.reports.checks import PASS
from gemmtuned.reports.checks_store import salvages
from gemmtuned.reports.published import standing
from gemmtuned.reports.render import complain, show
from gemmtuned.reports.source import no_database
from gemmtuned.reports.status import report


def status(as_json: Json = False) -> None:
    """What goes on: daemon, programs, generations."""
    here = settings()
    if not here.db.exists():
        nothing: dict[str, Any] = {
            "generation": 0,
            "published_generation": None,
            "published_differs": None,
            "daemon": None,
            "covered_share": None,
            "saved_us": 0.0,
            "frozen_problems": 0,
            "asked_again": 0,
            "untunable_problems": 0,
            "engine_paths": [],
        }
        tables = ("devices", "sessions", "environments")
        off = here.switched_off
        show(no_database("status", here, *tables, **nothing, switched_off=off), as_json=as_json)
        return
    from gemmtuned.daemon.notice import read_notice
    from gemmtuned.db import queries

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
        asked_again=queries.asked_again(here.db),
        differs=standing(here),
        salvages=[check for check in salvages(here) if check.result != PASS],
        now_s=time.time(),
    )
    show(answer, as_json=as_json)
