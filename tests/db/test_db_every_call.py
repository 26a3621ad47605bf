"""SQLite's own method: of all writes, fsyncs, renames and opens of the store and the publisher, each fails once."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    built = tmp_path_factory.mktemp("library") / "failing_calls.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(built), str(HERE / "failing_calls.c"), "-ldl"], check=True
    )
    return built


def every_call(folder: Path, library: Path, number: int, step: int) -> str:
    command = [sys.executable, str(HERE / "every_call_fails.py"), str(folder), str(library), str(number), str(step)]
    env = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=3000)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "EACCES"])
def test_a_few_of_all_calls_fail_once_and_nothing_is_lost(tmp_path: Path, library: Path, error: str) -> None:
    said = every_call(tmp_path, library, getattr(errno, error), 13)
    total = re.fullmatch(r"(\d+) calls, tried to \d+, (\d+) of them refused a step\n", said)
    assert total is not None, said
    assert int(total[1]) > 60 and int(total[2]) >= 3, "the shim strikes SQLite's calls and Python's"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "EACCES"])
def test_each_of_all_calls_fails_once_and_nothing_is_lost(tmp_path: Path, library: Path, error: str) -> None:
    said = every_call(tmp_path, library, getattr(errno, error), 1)
    assert re.fullmatch(r"(\d+) calls, tried to \1, \d+ of them refused a step\n", said), said
