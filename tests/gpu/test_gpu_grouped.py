"""Grouped products on a real GPU: our kernel passes the gate, and serves torch._grouped_mm, eager and in a graph.

Run it in a process of its own: `pytest tests/gpu/test_gpu_grouped.py`.
"""

from __future__ import annotations

import pytest
import torch
from gpu_needs import SM_90_OR_LATER
from gpu_program import Program, deal_anew, fresh, groups_of, ours  # noqa: F401  fresh: an autouse fixture

from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.torch_flags import as_called

pytestmark = [
    pytest.mark.gpu,
    SM_90_OR_LATER,
]
GPU = torch.device("cuda")


def grouped(groups: int, m: int, n: int, k: int, *, layout: str = "nt", dtype: str = "bf16") -> Problem:
    return Problem(
        family="grouped", batch=groups, m=m, n=n, k=k, dtype=dtype, layout=layout, math_mode="reduced"
    )  # fmt: skip


PROBLEMS = (
    grouped(128, 8, 384, 2048), grouped(128, 512, 384, 2048), grouped(32, 4, 1440, 2880, layout="nn"),
    grouped(5, 300, 264, 136), grouped(16, 4096, 512, 1024),
)  # fmt: skip


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_our_kernel_passes_the_gate(program: Program, p: Problem) -> None:
    said = {}
    with as_called(p):
        for candidate in ours(p)[:3]:
            kernel = BACKENDS["triton"].prepare(candidate, p)
            found = verify(p, {candidate: kernel}, family_of(p).default(p), device=GPU)[candidate]
            said[str(candidate)] = found.note or found.outcome
    assert all(text == "ok" for text in said.values()), said


@pytest.mark.parametrize("p", PROBLEMS[:3], ids=str)
def test_a_published_kernel_serves_torchs_function_eager_and_in_a_graph(program: Program, p: Problem) -> None:
    program.publish(program.solution(p, ours(p)[0]))
    inputs = family_of(p).make(p, kind="randn", seed=5, device=GPU)
    x, w, offs = inputs["x"], inputs["w"], inputs["offs"]
    want = torch.cat([x[a:b].float() @ w[g].float() for g, (a, b) in enumerate(groups_of(offs))])
    program.hook.native.drain()

    y = torch._grouped_mm(x, w, offs=offs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch._grouped_mm(x, w, offs=offs)
    deal_anew(offs, p.m)
    again = torch.cat([x[a:b].float() @ w[g].float() for g, (a, b) in enumerate(groups_of(offs))])
    graph.replay()

    counted = [s for s in program.hook.native.drain() if s.problem.family == "grouped"]
    assert {s.problem for s in counted} == {p}
    assert sum(s.calls for s in counted) == sum(s.calls for s in counted if s.outcome == "exact") >= 2, counted
    torch.testing.assert_close(y.float(), want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(captured.float(), again, rtol=2e-2, atol=2e-2)
    assert y.stride() == (p.n, 1) and not program.hook.native.failures()
