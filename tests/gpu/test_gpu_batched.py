"""Batched products on a real GPU: our kernel passes the gate, and serves torch.bmm, eager and in a graph.

Run it in a process of its own: `pytest tests/gpu/test_gpu_batched.py`.
"""

from __future__ import annotations

import pytest
import torch
from gpu_needs import SM_90_OR_LATER
from gpu_program import Program, fresh, ours  # noqa: F401  fresh: an autouse fixture

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


def batched(batch: int, m: int, n: int, k: int, *, layout: str = "nn", dtype: str = "bf16") -> Problem:
    return Problem(
        family="batched", batch=batch, m=m, n=n, k=k, dtype=dtype, layout=layout, math_mode="reduced"
    )  # fmt: skip


PROBLEMS = (
    batched(16, 8, 512, 128), batched(16, 64, 128, 512), batched(128, 1, 512, 128, layout="nt"),
    batched(5, 300, 264, 136, layout="nt", dtype="fp16"), batched(16, 256, 128, 512), batched(3, 33, 520, 1032),
)  # fmt: skip


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_our_kernel_passes_the_gate(program: Program, p: Problem) -> None:
    said = {}
    with as_called(p):
        for candidate in ours(p):
            kernel = BACKENDS["triton"].prepare(candidate, p)
            found = verify(p, {candidate: kernel}, family_of(p).default(p), device=GPU)[candidate]
            said[str(candidate)] = found.note or found.outcome
    assert all(text == "ok" for text in said.values()), said


@pytest.mark.parametrize("p", PROBLEMS[:3], ids=str)
def test_a_published_kernel_serves_torchs_function_eager_and_in_a_graph(program: Program, p: Problem) -> None:
    """Of X as it is made, of heads of tokens in turn, and into a result that is given."""
    program.publish(program.solution(p, ours(p)[0]))
    inputs = family_of(p).make(p, kind="randn", seed=5, device=GPU)
    w = inputs["w"]
    x = inputs["x"].transpose(0, 1).contiguous().transpose(0, 1)
    want = x.float() @ w.float()
    program.hook.native.drain()

    y = torch.bmm(x, w)
    out = torch.full_like(y, torch.nan)
    torch.bmm(inputs["x"], w, out=out)
    heads = torch.full((p.m, p.batch, p.n), torch.nan, dtype=y.dtype, device=GPU)
    torch.bmm(x, w, out=heads.transpose(0, 1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.bmm(x, w)
    x.mul_(-2)
    graph.replay()

    counted = [s for s in program.hook.native.drain() if s.problem.dtype == p.dtype]  # not those of `want`
    assert {s.problem for s in counted} == {p}
    assert sum(s.calls for s in counted) == sum(s.calls for s in counted if s.outcome == "exact") >= 4, counted
    for got, of in ((y, want), (out, want), (heads.transpose(0, 1), want), (captured, -2 * want)):
        torch.testing.assert_close(got.float(), of, rtol=2e-2, atol=2e-1)
    assert y.is_contiguous() and not program.hook.native.failures()


def test_fewer_rows_than_it_is_for_are_the_rows_of_the_whole(program: Program) -> None:
    p = batched(4, 200, 264, 136)
    kernel = BACKENDS["triton"].prepare(ours(p)[0], p)
    inputs = family_of(p).make(p, kind="integers", seed=5, device=GPU)
    run = kernel.bind(inputs["w"])
    whole = run(inputs["x"])
    for rows in (1, 17, 63, 64, 199):
        assert torch.equal(run(inputs["x"][:, :rows]), whole[:, :rows]), rows
