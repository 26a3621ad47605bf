""".ci/run: each step's output is in the log, what fails fails the whole, and tests are tried once more."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

RUN = Path(__file__).resolve().parents[2] / ".ci/run"
# In the place of make, and of the python that tries the wheel: says its name, and fails where FAILING names it
STUB = """#!/bin/sh
echo "output of $1"
case " $FAILING " in *" $1 "*) exit 3;; esac
"""
WHEEL = "tests/tools/package.py"


class Ran(NamedTuple):
    """What .ci/run ended with, and the stubs that spoke, in the order of the log."""

    code: int
    steps: list[str]
    log: str


def run(folder: Path, *failing: str) -> Ran:
    for name in (".ci/run", "bin/make", ".venv/bin/python"):
        file = folder / name
        file.parent.mkdir(parents=True)
        file.write_text(RUN.read_text() if name == ".ci/run" else STUB)
        file.chmod(0o755)
    (folder / "dist").mkdir()
    (folder / "dist/a.whl").touch()
    env = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "FAILING": " ".join(failing)}
    done = subprocess.run(
        [folder / ".ci/run"], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
    )
    said = [line.removeprefix("output of ") for line in done.stdout.splitlines() if line.startswith("output of ")]
    return Ran(done.returncode, said, done.stdout)


def test_all_steps_are_run_and_heard(tmp_path: Path) -> None:
    done = run(tmp_path)

    assert (done.code, done.steps) == (0, ["install", "check", "dist", WHEEL, "test"])
    assert done.log.rstrip().splitlines()[-1].startswith("== done")


@pytest.mark.parametrize(
    ("failing", "steps"),
    [
        ("install", ["install"]), ("check", ["install", "check", "dist", WHEEL]),
        ("dist", ["install", "check", "dist"]), (WHEEL, ["install", "check", "dist", WHEEL]),
    ],
)  # fmt: skip
def test_what_fails_fails_the_whole_and_has_been_heard(tmp_path: Path, failing: str, steps: list[str]) -> None:
    done = run(tmp_path, failing)

    assert done.code != 0 and done.steps == steps


def test_tests_that_fail_are_tried_once_more(tmp_path: Path) -> None:
    assert run(tmp_path / "once", "test")[:2] == (0, ["install", "check", "dist", WHEEL, "test", "again"])
    assert run(tmp_path / "twice", "test", "again").code != 0
