"""benchmarks/families.py: what a row says of a search's trials; the searches themselves need a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")  # timing.py measures the floor with it
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import block_forms
import families
import int8_forms
import torch

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Environment, Solution, cpu_device
from gemmtuned.daemon.child.measure import Bench
from gemmtuned.daemon.protocol.wire import Trial
from gemmtuned.kernels.families import family_of

HERE = Environment(cpu_device(), {"torch": "1"})
TIMES = {"torch": 20.0, "cublaslt": 16.0, "cuda": 10.0, "int_mm": 12.0, "int_mm_fused": 15.0, "copied": 13.0}


def trial(problem: Problem, candidate: Candidate, us: float | None, outcome: str = "ok") -> Trial:
    return Trial(problem, candidate, "screen", us, None, outcome, "", 0)


def found(problem: Problem, here: Environment) -> dict[str, Any]:
    ours, slower = Candidate.of("cuda", kernel="scaled_one_shot", rows=8), Candidate.of("cuda", kernel="x", rows=16)
    library, other = Candidate.of("cublaslt", tile=1), Candidate.of("cublaslt", tile=2)
    trials = [trial(problem, c, us) for c, us in ((slower, 15.0), (ours, 10.0), (other, 19.0), (library, 16.0))]
    trials.append(trial(problem, Candidate.of("cublaslt", tile=3), None, "refused"))
    solution = Solution(
        problem=problem, device="d", mode="graph", covers="exact", backend="cuda", config=ours.config, stamp="s",
        us=10.0, baseline_us=20.0, gain_low=1.9, err=1e-3, baseline_err=2e-3, state="published",
    )  # fmt: skip
    return {"solution": solution, "trials": trials, "wall_s": 1.0, "gpu_s": 0.5, "timed": 4}


def turns(problem: Problem, candidates: Any) -> tuple[list[list[float]], float]:
    return [[TIMES[c.backend] * (1 + i / 1000) for i in range(9)] for c in candidates], 8.0


def refused(problem: Problem, here: Environment) -> dict[str, Any]:
    raise CandidateFailed("torch's own kernel refuses")


def test_a_row_has_torch_the_librarys_best_ours_and_the_floor_of_one_run() -> None:
    row = families.measure(families.problem_of("row", 16, 256, 512), HERE, found, turns)
    assert (row["published"], row["cublaslt_us"], row["ours_us"], row["torch_us"]) == (True, 16.064, 10.04, 20.08)
    assert row["counts"] == row["ratio"] == pytest.approx(2.0) and row["floor_us"] == 8.0
    assert [name for name, *_ in row["not_ok"]] == [str(Candidate.of("cublaslt", tile=3))]


def test_int8_is_held_against_the_best_that_torch_has() -> None:
    problem = families.problem_of("int8", 3, 256, 512)
    row = {"kind": "int8", **families.measure(problem, HERE, found, turns)}
    (line,) = families.summary([row])
    assert line["over_int_mm_fused"] == pytest.approx(1.5) and line["torch_over_int_mm"] == pytest.approx(
        20 / 12, rel=1e-3
    )
    inputs = family_of(problem).make(problem, kind="randn", seed=0, device=torch.device("cpu"))
    stock = inputs.run(family_of(problem).default(problem))
    sums = inputs.run(int8_forms.FORMS["int_mm"](problem))[:3]
    assert torch.equal(int8_forms.scaled(sums, inputs["scale_w"], inputs["scale_x"], torch.bfloat16), stock)


@pytest.mark.parametrize("kind", ["int8_zero", "int8_zero_tensor"])
def test_zero_points_are_held_against_the_best_that_torch_has(kind: str) -> None:
    problem = families.problem_of(kind, 3, 256, 512)
    inputs = family_of(problem).make(problem, kind="randn", seed=0, device=torch.device("cpu"))
    stock = inputs.run(family_of(problem).default(problem))
    sums = inputs.run(int8_forms.FORMS["int_mm"](problem))[:3]
    given = [inputs.tensors.get(name) for name in ("sums_w", "zero_x")]
    fused = int8_forms.scaled(sums, inputs["scale_w"], inputs["scale_x"], torch.bfloat16, *given)
    assert torch.equal(fused, stock)


def test_blocks_of_one_row_are_held_against_copies_that_torch_takes() -> None:
    row = {"kind": "block", **families.measure(families.problem_of("block", 1, 256, 512), HERE, found, turns)}
    (line,) = families.summary([row])
    assert line["over_copied"] == pytest.approx(1.3) and line["torch_over_copied"] == pytest.approx(20 / 13, rel=1e-3)
    problem = families.problem_of("block", 1, 256, 384)
    inputs = family_of(problem).make(problem, kind="randn", seed=0, device=torch.device("cpu"))
    form = block_forms.Copied(problem)
    with pytest.raises((RuntimeError, ValueError)):  # CPUs have no such product
        inputs.run(form)
    ((rows, of_x),) = form.rows.values()  # which no later call makes again
    assert rows.shape == (4, 384) and of_x.stride() == (1, 4)
    assert "copied_us" in families.measure(families.problem_of("block_row", 4, 256, 512), HERE, found, turns)
    assert "copied_us" not in families.measure(families.problem_of("block", 4, 256, 512), HERE, found, turns)


def test_what_torch_refuses_is_a_row_that_says_so_and_counts_nowhere() -> None:
    rows = [
        {"kind": "block", **families.measure(families.problem_of("block", 1, 256, 512), HERE, refused, turns)},
        {"kind": "block", **families.measure(families.problem_of("block", 1, 512, 512), HERE, found, turns)},
    ]
    assert "refuses" in rows[0]["failed"]
    (line,) = families.summary(rows)
    assert (line["problems"], line["failed"], line["published"]) == (1, 1, 1)
    assert line["torch_over_cublaslt"] == pytest.approx(1.25) and line["ours_over_floor"] == pytest.approx(1.255)


@pytest.mark.parametrize("kind", families.KINDS)
@pytest.mark.parametrize("m", [1, 17])
def test_problems_are_those_that_the_family_makes_inputs_of(kind: str, m: int) -> None:
    for n, k in ((2112, 7168), (320, 640)):
        problem = families.problem_of(kind, m, n, k)
        family_of(problem)
        assert (problem.math_mode == "reduced") == kind.endswith("fast")
    assert families.problem_of("block", 17, 64, 640).wscale_layout == "row_padded"


@pytest.mark.parametrize("kind", families.BATCHED)
def test_batched_products_are_torchs_bmm_and_their_floor_reads_all_weights(kind: str) -> None:
    problem = families.problem_of(kind, 3, 32, 16, groups=4, threads=1)
    bench = Bench(problem, torch.device("cpu"))
    (w, *_), x = bench.weights[0], bench.inputs(problem)["x"]
    assert torch.equal(family_of(problem).default(problem).call(x, w), torch.bmm(x, w))
    read = families._read_of(problem, bench)[0]
    assert read.is_contiguous() and read.numel() == 4 * 32 * 16


@pytest.mark.parametrize("kind", families.OF_GROUPS)
def test_groups_of_fp8_have_the_key_of_the_call_and_their_floor_reads_those_that_have_rows(kind: str) -> None:
    problem = families.problem_of(kind, 3, 32, 16, groups=4)
    fast = ",math=reduced" if kind.endswith("fast") else ""
    assert str(problem) == f"grouped:fp8_e4m3>bf16:4x3x32x16,scale=row{fast}"
    bench = Bench(problem, torch.device("cpu"))
    offs = bench.inputs(problem)["offs"]
    used = sum(end > first for first, end in zip([0, *offs.tolist()], offs.tolist(), strict=False))
    for read in families._read_of(problem, bench)[:9]:
        assert read.is_contiguous() and read.numel() * read.element_size() == used * 32 * 16
