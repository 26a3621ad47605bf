"""What `gemmtuned doctor` says of programs, without a process of its own."""

from __future__ import annotations

from hooked import Home

from gemmtuned.configs.settings import Settings
from gemmtuned.reports import checks_store


def doctor(home: Home) -> str:
    """What doctor says of the programs that use this home."""
    checks = checks_store.checks(Settings.from_env(home.environment()))
    return "\n".join(f"{check.result} {check.found}" for check in checks if check.name == "programs")
