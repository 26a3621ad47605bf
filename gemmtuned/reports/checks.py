"""What one check of `gemmtuned doctor` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PASS: Final = "PASS"  # noqa: S105
WARN: Final = "WARN"
FAIL: Final = "FAIL"


@dataclass(frozen=True, slots=True)
class Check:
    """name: what was looked at; result: PASS, WARN or FAIL; found: the facts; fix: a command or a step, "" if none."""

    name: str
    result: str
    found: str
    fix: str = ""
