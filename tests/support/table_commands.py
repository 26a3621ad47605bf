"""The commands that read and write tables, run in the test's process in a home of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemmtuned.cli import build
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device, Environment, Solution
from gemmtuned.configs.variables import VARIABLES
from gemmtuned.db.store import Store

T = 1_800_000_000.0
CPU = Environment(
    Device(key="cpu-test", kind="cpu", name="Test", arch="x86_64", units=4), {"torch": "2.13", "onednn": "1"}
)  # fmt: skip
Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `gemmtuned ARGS --json` in this process; (exit code, its JSON)."""

    def call(*args: str, **env: str) -> tuple[int, Any]:
        with monkeypatch.context() as patch:
            for variable in VARIABLES:
                patch.delenv(variable.name, raising=False)
            patch.setenv("GEMMTUNED_HOME", str(tmp_path / "home"))
            for name, value in env.items():
                patch.setenv(name, value)
            capsys.readouterr()
            with pytest.raises(SystemExit) as end:
                build()([*args, "--json"], prog_name="gemmtuned")
        out, err = capsys.readouterr()
        assert out, err
        return int(end.value.code or 0), {**json.loads(out), "stderr": err}

    return call


def made(problem: Problem, backend: str = "torch", environment: Environment = CPU, **columns: Any) -> Solution:
    values: dict[str, Any] = {
        "mode": "eager", "covers": "exact", "config": "{}", "us": 5.0, "baseline_us": 10.0, "gain_low": 1.5,
        "err": 1e-6, "baseline_err": 1e-6, "state": "published", **columns,
    }  # fmt: skip
    stamp = environment.stamps[backend]
    return Solution(problem=problem, device=environment.device.key, backend=backend, stamp=stamp, **values)


def install(store: Store, environment: Environment, *solutions: Solution) -> None:
    store.solutions.install(None, solutions, environment=environment, now_s=T)
