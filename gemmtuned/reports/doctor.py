"""`gemmtuned doctor`: all checks in order, and the settings as this shell has them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

from gemmtuned.configs.settings import Settings
from gemmtuned.configs.variables import AITER_CONFIGS, VARIABLES
from gemmtuned.reports import checks_hook, checks_host, checks_room, checks_store, checks_tables
from gemmtuned.reports.checks import FAIL, PASS, WARN, Check
from gemmtuned.reports.render import Column, Report, Table

# Which field of Settings a variable sets; two that set none of their own are shown through `disabled`.
_FIELDS: Final = {
    "GEMMTUNED": "capture",
    "AITER_TUNE_GEMM": "capture",
    "GEMMTUNED_DISPATCH": "dispatch",
    "GEMMTUNED_DISABLE": "disabled",
    "AITER_BYPASS_TUNE_CONFIG": "disabled",
    "AITER_LOG_TUNED_CONFIG": "log_tuned",
}


def examine(settings: Settings, *, quick: bool, wrong: Mapping[str, str], deep: bool = False) -> tuple[Report, bool]:
    """(report, whether a check failed). `quick` starts no process that imports torch; `deep` reads all of the database.

    wrong: variables that settings were read without, each with what is wrong about it.
    """
    host = list(checks_host.checks(settings))
    home = next(check for check in host if check.name == "home")
    found = [
        *(Check("variables", FAIL, said, f"unset {name}, or set it right") for name, said in wrong.items()),
        *checks_hook.checks(settings, quick=quick),
        *host,
        *checks_store.checks(settings, with_database=not checks_host.cannot_be(settings.db, settings, home), deep=deep),
        *checks_tables.checks(settings),
        *checks_room.checks(settings),
    ]
    failed = sum(check.result == FAIL for check in found)
    warned = sum(check.result == WARN for check in found)
    rows = [asdict(check) for check in found]
    columns = (
        Column("result", "", right=False),
        Column("name", "check", right=False),
        Column("found", "found", right=False),
        Column("fix", "to mend it", lambda fix: fix or "", right=False),
    )
    tables = [Table("checks", columns, rows), _settings(settings)]
    verdict = f"{failed} failed, {warned} warned, {len(found) - failed - warned} passed"
    result = FAIL if failed else WARN if warned else PASS
    facts = {"result": result, "database": str(settings.db) if settings.db.exists() else None}
    return Report("doctor", tables, facts=facts, notes=[verdict]), failed > 0


def _settings(settings: Settings) -> Table:
    tables = {table.variable: os.pathsep.join(map(str, table.paths)) for table in settings.tables}
    rows = []
    for variable in VARIABLES:
        if variable.name in AITER_CONFIGS:
            text = tables.get(variable.name, "")
            rows.append(
                {"name": variable.name, "value": text, "default": variable.default, "meaning": variable.meaning}
            )
            continue
        field = _FIELDS.get(variable.name) or variable.name.removeprefix("GEMMTUNED_").removeprefix("AITER_").lower()
        value = getattr(settings, field)
        text = str(int(value)) if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
        rows.append({"name": variable.name, "value": text, "default": variable.default, "meaning": variable.meaning})
    columns = (
        Column("name", "variable", right=False),
        Column("value", "value", right=False),
        Column("default", "default", right=False),
        Column("meaning", "meaning", right=False),
    )
    return Table("settings", columns, rows, title="Settings of this shell:")
