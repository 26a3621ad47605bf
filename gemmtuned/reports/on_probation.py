"""Runs that go without a generation because programs died in its kernels: a note under every figure that it spoils."""

from __future__ import annotations

import time
from pathlib import Path

from gemmtuned.configs.human_units import moment
from gemmtuned.hooks.probation import without


def without_notes(home: Path) -> list[str]:
    """One line for each run that goes without the newest tables, until when, and what it means for the figures."""
    return [
        f"{run} goes without generation {generation} until {moment(until_s, time.time())}: programs "
        "died in its kernels. What is tuned is not in use there. See: gemmtuned doctor"
        for (generation, run), until_s in sorted(without(home / "probation").items())
    ]
