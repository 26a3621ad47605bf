"""Quantised experts on a real GPU: torch's forms in graphs, the gate, verdicts of searches, calls served by the table.

Run it in a process of its own: `pytest tests/gpu/test_gpu_moe_quantised.py`.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_needs import SM_90
from gpu_program import Program, fresh  # noqa: F401  fresh: an autouse fixture
from torch import Tensor

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Solution
from gemmtuned.daemon.child import search
from gemmtuned.daemon.child.measure import Arm
from gemmtuned.daemon.child.measure_cuda import CudaGraphs, GraphClock
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels import mixture
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.families.error import Error, Spread, limits, measure_error
from gemmtuned.kernels.families.moe import MOE, how_of
from gemmtuned.kernels.families.operand import Inputs
from gemmtuned.kernels.mixture import Operands
from gemmtuned.kernels.torch_flags import as_called
from gemmtuned.ops import fused_moe
from gemmtuned.ops import moe as op

pytestmark = [pytest.mark.gpu, SM_90]
GPU = torch.device("cuda")
KINDS = {
    "tensor": "bf16/fp8_e4m3:{m}x512x512,wscale=tensor",
    "row": "fp16/fp8_e4m3:{m}x512x512,wscale=row",
    "128x128": "bf16/fp8_e4m3:{m}x512x512,wscale=128x128",
    "int4 in 32": "bf16/i4:{m}x512x512,wscale=1x32,wscaledtype=bf16",
    "int4 in 64": "fp16/i4:{m}x512x512+bias,wscale=1x64,wscaledtype=fp16",
    "int4 in 128": "bf16/i4:{m}x512x512,wscale=1x128,wscaledtype=bf16",
    "mxfp4": "bf16/fp4_e2m1:{m}x512x512+bias,wscale=1x32",
}
QUANT_TYPES = {
    "tensor": "per_Tensor", "row": "per_Token", "128x128": "per_128x128", "int4": "per_Group", "mxfp4": "per_1x32"
}  # fmt: skip
EACH = pytest.mark.parametrize("kind", KINDS)


def moe(kind: str, m: int = 8, experts: int = 32) -> Problem:
    text = KINDS[kind].format(m=m)
    act = "swiglu_gated_interleaved" if kind == "mxfp4" else "silu_gated"
    return Problem.parse(f"moe:{text},math=reduced,experts={experts},topk=4,inter=256,act={act}")


def operands(inputs: Inputs) -> Operands:
    t = inputs.tensors
    return Operands(
        x=t["x"], w1=t["w1"], w2=t["w2"], weights=t["gates"], ids=t["ids"], scale1=t["scale1"], scale2=t["scale2"],
        bias1=t.get("bias1"), bias2=t.get("bias2"),
    )  # fmt: skip


def called(problem: Problem, o: Operands) -> Tensor:
    how = how_of(problem)
    return fused_moe(
        o.x, o.w1, o.w2, o.weights, o.ids, activation=how.act, quant_type=QUANT_TYPES[how.quant], w1_scale=o.scale1,
        w2_scale=o.scale2, bias1=o.bias1, bias2=o.bias2, interleaved=how.interleaved,
    )  # fmt: skip


def assert_right(problem: Problem, inputs: Inputs, y: Tensor) -> None:
    sample = MOE.sample(problem, seed=0, device=GPU)
    exact = MOE.reference(problem, inputs, sample)
    most = limits(problem, Error(1.0, 1.0), Spread.of(exact, MOE.x_rows(problem, inputs, sample))).r
    assert measure_error(sample.of(y), exact).r <= most


@EACH
def test_the_key_of_a_call_is_the_problem_whose_inputs_it_has(program: Program, kind: str) -> None:
    problem = moe(kind)
    o = operands(MOE.make(problem, kind="randn", seed=0, device=GPU))
    assert op.problem_of(o, how_of(problem)) == problem


@EACH
@pytest.mark.parametrize("m", [2, 8, 40])
def test_torchs_own_form_in_a_graph_is_right_for_other_routings_too(program: Program, kind: str, m: int) -> None:
    """Pair after pair up to as many as there are experts; grouped, or expert after expert for fp16, for more."""
    problem = moe(kind, m)
    inputs = MOE.make(problem, kind="randn", seed=0, device=GPU)
    o, how = operands(inputs), how_of(problem)
    mixture.run(o, how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mixture.run(o, how)
    for routing in ("randn", "nobody", "twice", "unvisited"):
        given = MOE.make(problem, kind=routing, seed=3, device=GPU)
        for name, t in inputs.tensors.items():
            t.copy_(given[name])
        graph.replay()
        torch.cuda.synchronize()
        assert_right(problem, inputs, y)


@EACH
def test_torchs_own_form_is_timed_in_a_graph_within_seconds(program: Program, kind: str) -> None:
    """As a race does it, at a size of a model: 128 experts of which 8 tokens visit up to 32."""
    problem = replace(moe(kind, experts=128), n=2048, k=2048, inter=768)
    began = time.monotonic()
    with as_called(problem):
        runs = [MOE.default(problem).bind(*w) for w in MOE.weight_copies(problem, count=3, device=GPU)]
        inputs = MOE.make(problem, kind="randn", seed=0, device=GPU)
        calls = [lambda run=run: run(*inputs.activations) for run in runs]
        clock = GraphClock(CudaGraphs())
        us = clock.us(Arm("torch", calls), (0,))
    assert 0 < us < 1e6 and time.monotonic() - began < 20
    print(f"{problem}: torch's own form takes {us:.0f} us in a graph")


@EACH
def test_candidates_pass_the_gate(program: Program, kind: str) -> None:
    problem = moe(kind)
    found = list(BACKENDS["moe_decode"].candidates(problem))
    assert len(found) == 36
    chosen = (Candidate("torch"), found[0], found[-1])
    with as_called(problem):
        kernels = {c: BACKENDS[c.backend].prepare(c, problem) for c in chosen}
        said = verify(problem, kernels, MOE.default(problem), device=GPU)
    assert {c: v.note or v.outcome for c, v in said.items()} == dict.fromkeys(chosen, "ok")


@EACH
def test_a_search_has_a_verdict_and_torchs_own_form_can_lose(program: Program, kind: str) -> None:
    """For graphs and for eager calls."""
    problem, here = moe(kind), environment(program.device)
    trials: list[Any] = []
    began = time.monotonic()
    found = search.tune_modes((problem,), "exact", problem, here, mode="graph", skip=(), emit=trials.append)
    print(f"{problem}: {[(s.mode, s.backend, s.config, round(s.baseline_us), round(s.us, 1)) for s in found]}")
    assert [s.mode for s in found] == ["graph", "eager"]
    assert time.monotonic() - began < 120
    graph = found[0]
    assert (graph.state, graph.backend) == ("published", "moe_decode"), [t for t in trials if t.outcome != "ok"]
    assert graph.us < graph.baseline_us and graph.err <= 1.25 * max(graph.baseline_err, 2e-3)


@EACH
def test_a_published_solution_serves_the_call(program: Program, kind: str) -> None:
    problem = moe(kind)
    inputs = MOE.make(problem, kind="randn", seed=0, device=GPU)
    o = operands(inputs)
    candidate = list(BACKENDS["moe_decode"].candidates(problem))[7]
    program.publish(_published(program, problem, candidate))
    _outcomes(program, problem)
    for ids in (o.ids, o.ids.long()):
        assert_right(problem, inputs, called(problem, replace(o, ids=ids)))
    assert _outcomes(program, problem) == {"exact": 2} and not program.hook.native.failures()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = called(problem, o)
    graph.replay()
    torch.cuda.synchronize()
    assert_right(problem, inputs, y)
    assert set(_outcomes(program, problem)) == {"exact"}


def test_scales_that_are_not_the_problems_are_another_problem(program: Program) -> None:
    """int4 with scales in fp32, which our kernels do not read: counted apart, and as torch's own form gives it."""
    problem = moe("int4 in 32")
    inputs = MOE.make(problem, kind="randn", seed=0, device=GPU)
    o = operands(inputs)
    assert o.scale1 is not None and o.scale2 is not None
    program.publish(_published(program, problem, next(iter(BACKENDS["moe_decode"].candidates(problem)))))
    _outcomes(program, problem)
    wide = replace(o, scale1=o.scale1.float(), scale2=o.scale2.float())
    assert_right(problem, inputs, called(problem, wide))
    assert _outcomes(program, problem) == {}


def _published(program: Program, problem: Problem, candidate: Candidate) -> Solution:
    return Solution(
        problem=problem, device=program.device.key, mode="eager", covers="exact", backend=candidate.backend,
        config=candidate.config, stamp=environment(program.device).stamp_of(candidate) or "", us=1.0, baseline_us=2.0,
        gain_low=1.5, err=1e-3, baseline_err=1e-3, state="published",
    )  # fmt: skip


def _outcomes(program: Program, problem: Problem) -> dict[str, int]:
    """Calls of the problem by outcome since the last time."""
    found: Counter[str] = Counter()
    for s in program.hook.drain():
        if s.problem == problem:
            found[s.outcome] += s.calls
    return dict(found)
