"""Grouped products of fp8 with scales of rows on a real GPU: exact, recorded, tuned by the command, and served.

Run it in a process of its own: `pytest tests/gpu/test_gpu_scaled_grouped.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_needs import SM_90, SM_90_OR_LATER
from gpu_program import Program, deal_anew, fresh, groups_of, ours  # noqa: F401  fresh: an autouse fixture

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.families.operand import Inputs
from gemmtuned.kernels.torch_flags import as_called

pytestmark = [pytest.mark.gpu, SM_90_OR_LATER]
GPU = torch.device("cuda")
MODES = ("ieee", "reduced")


def groups(count: int, m: int, n: int, k: int, mode: str = "ieee") -> Problem:
    return Problem(
        family="grouped", batch=count, m=m, n=n, k=k, dtype="fp8_e4m3", out_dtype="bf16", scale="row", math_mode=mode
    )


SIZES = ((128, 8, 384, 2048), (128, 512, 384, 2048), (16, 1, 1536, 7168), (5, 300, 272, 144), (16, 4096, 512, 1024))
PROBLEMS = [groups(*size, mode) for size in SIZES for mode in MODES]


def by_v1(p: Problem, i: Inputs) -> torch.Tensor:
    return torch._scaled_grouped_mm(
        i["x"], i["w"], i["scale_x"], i["scale_w"], offs=i["offs"], use_fast_accum=p.math_mode == "reduced"
    )


def by_v2(p: Problem, i: Inputs) -> torch.Tensor:
    by_row, plain = torch.nn.functional.ScalingType.RowWise, torch.nn.functional.SwizzleType.NO_SWIZZLE
    return torch.nn.functional.scaled_grouped_mm(
        i["x"], i["w"], i["scale_x"], by_row, i["scale_w"], by_row, swizzle_a=plain, swizzle_b=plain, offs=i["offs"],
        output_dtype=torch.bfloat16, use_fast_accum=p.math_mode == "reduced",
    )  # fmt: skip


def exact(p: Problem, inputs: Inputs) -> torch.Tensor:
    """All of Y in fp64."""
    x, w = inputs["x"].double() * inputs["scale_x"].double()[:, None], inputs["w"]
    y = torch.empty(p.m, p.n, dtype=torch.float64, device=GPU)
    for g, (first, end) in enumerate(groups_of(inputs["offs"])):
        y[first:end] = x[first:end] @ (w[g].double() * inputs["scale_w"][g].double())
    return y


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_torchs_own_and_our_kernel_pass_the_gate(program: Program, p: Problem) -> None:
    with as_called(p):
        kernels = {c: BACKENDS["triton"].prepare(c, p) for c in ours(p)[:4]}
        kernels[Candidate("torch")] = family_of(p).default(p)
        said = verify(p, kernels, family_of(p).default(p), device=GPU)
    assert {str(c): one.note or one.outcome for c, one in said.items()} == {str(c): "ok" for c in kernels}


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_every_candidate_is_exact_on_whole_numbers_and_the_same_twenty_times(program: Program, p: Problem) -> None:
    whole = family_of(p).make(p, kind="integers", seed=1, device=GPU)
    usual = family_of(p).make(p, kind="randn", seed=1, device=GPU)
    right, near = exact(p, whole).bfloat16(), exact(p, usual)
    spilled = []
    for candidate in ours(p):
        try:
            kernel = BACKENDS["triton"].prepare(candidate, p)
        except CandidateFailed as err:
            assert "spills" in str(err), "nothing else is wrong with any"
            spilled.append(candidate)
            continue
        assert torch.equal(whole.run(kernel), right), candidate
        results = [usual.run(kernel) for _ in range(20)]
        assert all(torch.equal(y, results[0]) for y in results), candidate
        assert float((results[0].double() - near).norm() / near.norm()) < 5e-3, candidate
    assert len(spilled) <= 1, spilled


@SM_90
def test_sums_are_short_only_where_the_problem_allows_it(program: Program) -> None:
    """On numbers of one sign, whose roundings towards zero add up: the tensor core of sm_90 alone does it."""
    size = (2, 64, 512, 16384)
    inputs = family_of(groups(*size)).make(groups(*size), kind="one_sign", seed=2, device=GPU)
    right = exact(groups(*size), inputs)
    wide = {"kernel": "scaled_grouped", "rows": 64, "tokens": 32, "block_k": 256, "warps": 4, "stages": 3, "swap": 1}
    off = {}
    for mode in MODES:
        p = groups(*size, mode)
        y = inputs.run(BACKENDS["triton"].prepare(Candidate.of("triton", **wide), p)).double()
        off[mode] = float((y / right - 1).mean().abs())
    assert off["ieee"] < 2e-3 and off["reduced"] > 4 * off["ieee"], off


@pytest.mark.parametrize("call", [by_v1, by_v2], ids=["v1", "v2"])
@pytest.mark.parametrize("p", PROBLEMS[:6], ids=str)
def test_a_published_kernel_serves_both_operators_eager_and_in_a_graph(
    program: Program, p: Problem, call: Callable[[Problem, Inputs], torch.Tensor]
) -> None:
    program.publish(program.solution(p, ours(p)[0]))
    inputs = family_of(p).make(p, kind="integers", seed=5, device=GPU)
    want = exact(p, inputs).bfloat16()
    program.hook.native.drain()

    y = call(p, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(p, inputs)
    deal_anew(inputs["offs"], p.m)
    graph.replay()

    counted = [s for s in program.hook.native.drain() if s.problem.family == "grouped"]
    assert {s.problem for s in counted} == {p}
    assert sum(s.calls for s in counted) == sum(s.calls for s in counted if s.outcome == "exact") >= 2, counted
    assert torch.equal(y, want) and torch.equal(captured, exact(p, inputs).bfloat16())
    assert y.stride() == (p.n, 1) and not program.hook.native.failures()


def test_what_torch_refuses_it_refuses_where_there_is_a_route_too(program: Program) -> None:
    p = groups(5, 300, 272, 144)
    program.publish(program.solution(p, ours(p)[0]))
    inputs = family_of(p).make(p, kind="integers", seed=5, device=GPU)
    program.outcomes()
    for wrong in ({"scale_x": inputs["scale_x"][:, None]}, {"scale_w": inputs["scale_w"][:, :16]}):
        with pytest.raises((RuntimeError, ValueError)):
            by_v1(p, inputs.having(**wrong))
    assert "exact" not in program.outcomes() and not program.hook.native.failures()
    assert torch.equal(by_v1(p, inputs), exact(p, inputs).bfloat16()) and program.outcomes() == {"exact": 1}


USER = """
import json, sys, torch
from gemmtuned.configs.problem import Problem
from gemmtuned.hooks import activate
p = Problem.parse(sys.argv[1])
torch.manual_seed(1)
x = torch.randint(-2, 3, (p.m, p.k), device="cuda").to(torch.float8_e4m3fn)
w = torch.randint(-2, 3, (p.batch, p.n, p.k), device="cuda").to(torch.float8_e4m3fn).mT
sx, sw = (torch.exp2(torch.randint(-2, 3, s, device="cuda").float()) for s in ((p.m,), (p.batch, p.n)))
ends = torch.randint(0, p.m + 1, (p.batch,), device="cuda", dtype=torch.int32).sort().values
ends[-1] = p.m
fast = p.math_mode == "reduced"
call = lambda: torch._scaled_grouped_mm(x, w, sx, sw, offs=ends, use_fast_accum=fast)
made = [call() for _ in range(20)]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    made.append(call())
for _ in range(50):
    graph.replay()
torch.cuda.synchronize()
first = ends.tolist()
right = torch.cat([
    (x[a:b].double() * sx[a:b, None]) @ (w[g].double() * sw[g]) for g, (a, b) in enumerate(zip([0, *first], first))
]).bfloat16()
hook = activate.current()
found = {mode: hook.table.find(p, mode, "cuda:0")[1] for mode in ("eager", "graph")}
print(json.dumps({
    "right": all(torch.equal(y, right) for y in made),
    "by": {mode: one and [one.backend, one.us, one.baseline_us] for mode, one in found.items()},
    "failures": len(hook.native.failures()),
}))
"""


def test_a_program_is_recorded_tuned_by_the_command_and_served(tmp_path: Path, native_cache: Path) -> None:
    """An unmodified program, twice: in between `gemmtuned tune` takes what it called from the queue."""
    p = groups(128, 8, 1536, 2048)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMMTUNED", "AITER_"))} | {
        "GEMMTUNED_HOME": str(tmp_path / "home"), "GEMMTUNED_CACHE": str(native_cache), "GEMMTUNED_FLUSH_S": "0.2",
    }  # fmt: skip

    def ran(*command: str, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], env=env | more, cwd=tmp_path, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    def used() -> Any:
        return json.loads(ran("-c", USER, str(p), GEMMTUNED="1", GEMMTUNED_QUIET="1").splitlines()[-1])

    before = used()
    assert before == {"right": True, "by": {"eager": None, "graph": None}, "failures": 0}
    said = json.loads(ran("-m", "gemmtuned", "tune", "--json").splitlines()[-1])
    rows = [row for row in said["rows"] if row["problem"] == str(p)]
    assert rows and not said["failed"], said
    after = used()
    assert after["right"] and not after["failures"]
    by = {mode: one[0] for mode, one in after["by"].items() if one}
    assert by and set(by.values()) == {"triton"}, (after, rows)
