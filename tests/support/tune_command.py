"""The tune command as tests run it, and what it would ask of the tuner."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemmtuned.cli import build
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.seats.request import Request
from gemmtuned.daemon.service.main import Tuned


@pytest.fixture
def typed(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Request, dict[str, Any]]]:
    """What a command line asks of the tuner, which is not run."""
    asked: list[tuple[Request, dict[str, Any]]] = []

    def tune_now(request: Request, settings: Settings, **how: Any) -> Tuned:
        asked.append((request, how))
        return Tuned()

    monkeypatch.setattr("gemmtuned.daemon.service.main.tune_now", tune_now)

    def run(*args: str) -> tuple[Request, dict[str, Any]]:
        with pytest.raises(SystemExit) as end:
            build()(["tune", *args], prog_name="gemmtuned")
        assert end.value.code == 0
        return asked[-1]

    return run


def run(*args: str, **how: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gemmtuned", "tune", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, **how)
