"""benchmarks/peers.py: what a row says of other libraries' kernels; the searches themselves need a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")  # timing.py measures the floor with it
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import families
import peers
import torch

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Environment, Solution, cpu_device
from gemmtuned.daemon.protocol.wire import Trial
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.backends.torch_op import OperatorBackend

HERE = Environment(cpu_device(), {"torch": "1", "exact": "1.2", "zeros": "1.2", "broken": "1.2"})
TIMES = {"torch": 20.0, "exact": 10.0, "int_mm": 12.0, "int_mm_fused": 15.0}


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Three libraries' products of int8: a right one, a wrong one, and one that raises."""
    library = torch.library.Library("bench_peers", "DEF")

    def exact(x: torch.Tensor, b: torch.Tensor, sx: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
        return (x.double() @ b.double() * sx.double() * sb.double()).bfloat16()

    def zeros(x: torch.Tensor, b: torch.Tensor, sx: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
        return torch.zeros(x.shape[0], b.shape[1], dtype=torch.bfloat16)

    def broken(x: torch.Tensor, b: torch.Tensor, sx: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    for function in (exact, zeros, broken):
        name = function.__name__
        library.define(f"{name}(Tensor x, Tensor b, Tensor sx, Tensor sb) -> Tensor")
        library.impl(name, function, "CPU")
        backend = OperatorBackend(
            name=name, package="torch", operator=f"bench_peers::{name}", kinds=("cpu",),
            arguments=("x", "b", "scale_x", "scale_b"), suits=lambda p: p.dtype == "i8",
        )  # fmt: skip
        monkeypatch.setitem(BACKENDS, name, backend)
    return library


def found(problem: Problem, here: Environment) -> dict[str, Any]:
    trials = [Trial(problem, Candidate("exact"), phase, 9.0, None, "ok", "", 0) for phase in ("start", "screen")]
    solution = Solution(
        problem=problem, device="d", mode="graph", covers="exact", backend="exact", config="", stamp="1.2",
        us=10.0, baseline_us=20.0, gain_low=1.9, err=1e-3, baseline_err=2e-3, state="published",
    )  # fmt: skip
    return {"solution": solution, "trials": trials, "wall_s": 1.0, "gpu_s": 0.5, "timed": 1}


def turns(problem: Problem, candidates: Any) -> tuple[list[list[float]], float]:
    return [[TIMES[c.backend]] * 9 for c in candidates], 8.0


def test_a_row_says_what_the_gate_and_the_search_said_of_each_library(libraries: Any) -> None:
    problem = families.problem_of("int8", 16, 64, 256, threads=1)

    row = peers.measure(problem, HERE, found, turns, torch.device("cpu"))

    of = row["peers"]
    assert {name: (said["gate"], said["us"]) for name, said in of.items()} == {
        "exact": ("ok", 10.0), "zeros": ("wrong", None), "broken": ("refused", None),
    }  # fmt: skip
    assert of["zeros"]["note"] and "no kernel image" in of["broken"]["note"]
    assert of["exact"]["search"] == [{"phase": "screen", "outcome": "ok", "us": 9.0, "note": ""}]
    assert (row["torch_us"], row["floor_us"], row["backend"]) == (20.0, 8.0, "exact")
    lines = peers.fastest([row])
    assert lines["exact"] == {"problems": 1, "passed": 1, "published": 1, "over_torch": 2.0}
    assert lines["zeros"] == {"problems": 1, "passed": 0, "published": 0, "over_torch": None}


def test_a_problem_that_no_library_takes_has_no_peers(libraries: Any) -> None:
    row = peers.measure(families.problem_of("row", 16, 64, 256, threads=1), HERE, found, turns, torch.device("cpu"))
    assert row["peers"] == {} and peers.fastest([row]) == {}
