"""`gemmtuned doctor`: all checks in order, and the settings as this shell has them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

from gemmtuned.configs.settings import Settings, is_given
from gemmtuned.configs.variables import AITER_CONFIGS, VARIABLES
from gemmtuned.reports import checks_hook, checks_host, checks_room, checks_store, checks_tables, left_out
from gemmtuned.reports.checks import FAIL, PASS, WARN, Check
from gemmtuned.reports.render import Column, Report, Table

# Which field of Settings a variable sets; two that set none of their own are shown through `disabled`.
_FIELDS: Final = {
    "GEMMTUNED": "capture",
    "AITER_TUNE_GEMM": "capture",
    "GEMMTUNED_DISPATCH": "dispatch",
    "GEMMTUNED_PATCH": "patches",
    "GEMMTUNED_DISABLE": "disabled",
    "AITER_BYPASS_TUNE_CONFIG": "disabled",
    "AITER_LOG_TUNED_CONFIG": "log_tuned",
}


def examine(
    settings: Settings,
    *,
    quick: bool,
    wrong: Mapping[str, str],
    deep: bool = False,
    variables: bool = False,
    not_built: str = "",
) -> tuple[Report, bool]:
    """(report, whether a check failed). What is wrong stands last, where a terminal is read first.

    quick: start no process that imports torch.  wrong: variables that settings were read without, each with what is
    wrong about it.  deep: read all of the database.  variables: show all of them, not only those that are set.
    not_built: why the native hook could not be built just now.
    """
    host = list(checks_host.checks(settings))
    home = next(check for check in host if check.name == "home")
    found = [
        *(Check("variables", FAIL, said, f"unset {name}, or set it right") for name, said in wrong.items()),
        *checks_hook.checks(settings, quick=quick, not_built=not_built),
        *host,
        *checks_store.checks(settings, with_database=not checks_host.cannot_be(settings.db, settings, home), deep=deep),
        *checks_tables.checks(settings),
        *checks_room.checks(settings),
        *left_out.checks(settings),
    ]
    failed = sum(check.result == FAIL for check in found)
    warned = sum(check.result == WARN for check in found)
    rows = [asdict(check) for check in sorted(found, key=lambda check: (PASS, WARN, FAIL).index(check.result))]
    columns = (
        Column("result", "", right=False),
        Column("name", "check", right=False),
        Column("found", "found", right=False),
    )
    checks = Table("checks", columns, rows, below=Column("fix", "to mend it", right=False))
    tables = [*_settings(settings, every=variables), checks]
    verdict = f"{failed} failed, {warned} warned, {len(found) - failed - warned} passed"
    result = FAIL if failed else WARN if warned else PASS
    facts = {"result": result, "database": str(settings.db) if settings.db.exists() else None}
    return Report("doctor", tables, facts=facts, notes=[verdict]), failed > 0


def _settings(settings: Settings, *, every: bool) -> list[Table]:
    """The variables that are set, and in one line that there are others; `every` shows all."""
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
    there = [row for row in rows if every or is_given(row["name"])]
    others = [row for row in rows if row not in there]
    said = f"{len(others)} variables have their defaults: gemmtuned doctor --variables lists them with what they mean."
    return [
        Table("settings", columns, there, title="Variables of this shell:"),
        Table("settings", columns, others, instead=said if others else ""),
    ]
