"""Fixtures of the tests of commands."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Cli, environment
from table_commands import run as run
from tune_command import typed as typed

from gemmtuned.cli import build


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Run `gemmtuned ARGS` inside this process, its home in tmp_path/home: ten times as fast as one of its own."""
    logger = logging.getLogger("gemmtuned")
    before = logger.handlers[:], logger.level, logger.propagate
    app = build()

    def run(*args: str, **more: str) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            for name in set(os.environ) - set(environment(tmp_path)):
                patch.delenv(name)
            for name, value in environment(tmp_path / "home", **more).items():
                patch.setenv(name, value)
            patch.chdir(tmp_path)
            capsys.readouterr()
            with pytest.raises(SystemExit) as end:
                app(list(args), prog_name="gemmtuned")
            out, err = capsys.readouterr()
        return subprocess.CompletedProcess(args, int(end.value.code or 0), out, err)

    yield run
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])
