"""A device, three problems and a solution for tests of the commands, and the environment of one with this home."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device, Environment, Solution
from gemmtuned.configs.variables import VARIABLES

DEVICE = Device(key="cpu-test-0", kind="cpu", name="test", arch="x86_64", units=2)
HERE = Environment(DEVICE, {"torch": "2.13.0", "onednn": "2.13.0/cpu-test-0"})
TUNED = Problem(m=8, n=2048, k=1024, dtype="fp32", threads=2)
EVEN = Problem(m=9, n=2048, k=1024, dtype="fp32", threads=2)
WAITING = Problem(m=8, n=512, k=1024, dtype="bf16", threads=2)

Cli = Callable[..., subprocess.CompletedProcess[str]]


def environment(home: Path, **more: str) -> dict[str, str]:
    ours = {variable.name for variable in VARIABLES}
    env = {name: value for name, value in os.environ.items() if name not in ours}
    env.pop("NO_COLOR", None)
    return {**env, "GEMMTUNED_HOME": str(home), "GEMMTUNED_DEVICE_LOCKS": str(home.parent / "locks"), **more}


def solution(problem: Problem, **more: Any) -> Solution:
    facts: dict[str, Any] = {
        "device": DEVICE.key, "mode": "eager", "covers": "exact", "backend": "onednn", "config": "{}",
        "stamp": HERE.stamps["onednn"], "us": 50.0, "baseline_us": 100.0, "gain_low": 1.9, "err": 1e-7,
        "baseline_err": 1e-7, "state": "published",
    }  # fmt: skip
    return Solution(problem=problem, **{**facts, **more})


def says(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What `gemmtuned WORDS` says in a process of its own, a fork of this one: it need not import what is here."""
    from gemmtuned.cli import build

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for number, file in ((1, out), (2, err)):
                    os.dup2(file.fileno(), number)
                sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
                env = environment(home)
                os.environ.clear()
                os.environ.update(env)
                build()(list(words), prog_name="gemmtuned")
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())
