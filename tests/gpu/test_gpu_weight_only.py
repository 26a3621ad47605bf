"""Products with a weight of 8 or 4 bits on a real GPU: the gate takes our kernel, and serves gemm_a16w8 and gemm_a16w4.

Run it in a process of its own: `pytest tests/gpu/test_gpu_weight_only.py`.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from gpu_needs import SM_90_OR_LATER
from gpu_program import Program, fresh  # noqa: F401  fresh: an autouse fixture

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.configs.tunable import WEIGHT_ONLY
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.families.operand import Inputs
from gemmtuned.kernels.kernel import Kernel
from gemmtuned.kernels.torch_flags import as_called
from gemmtuned.ops import gemm_a16w4, gemm_a16w8
from gemmtuned.ops.weight_only import COMPILED_ROWS

pytestmark = [pytest.mark.gpu, SM_90_OR_LATER]
GPU = torch.device("cuda")
FEW = ((1, 576, 7168), (3, 2112, 2048), (16, 1000, 1280))
MANY = ((17, 576, 7168), (33, 2112, 2048), (300, 1000, 1280))  # for the tiles


def of_each_kind(sizes: tuple[tuple[int, int, int], ...]) -> list[Problem]:
    return [
        Problem(
            family="weight_only", m=m, n=n, k=k, bias=m % 10 == 3, dtype=dtype, wdtype=wdtype, wscale=scale,
            wscale_dtype=of, math_mode="reduced",
        )
        for number, ((dtype, wdtype), kinds) in enumerate(WEIGHT_ONLY.items())
        for (scale, of), (m, n, k) in zip(kinds, sizes[number % 3 :] + sizes + sizes, strict=False)
    ]  # fmt: skip


PROBLEMS, OF_TILES = of_each_kind(FEW), of_each_kind(MANY)


def backend_of(p: Problem) -> str:
    return "cuda" if p.m <= 16 else "triton"


def prepared(p: Problem) -> dict[Candidate, Kernel]:
    """The three that are likely the best, those that spill aside."""
    kernels: dict[Candidate, Kernel] = {}
    for candidate in BACKENDS[backend_of(p)].candidates(p):
        with contextlib.suppress(CandidateFailed):
            kernels[candidate] = BACKENDS[candidate.backend].prepare(candidate, p)
        if len(kernels) == 3:
            break
    return kernels


@pytest.mark.parametrize("p", PROBLEMS + OF_TILES, ids=str)
def test_our_kernel_and_torchs_own_pass_the_gate(program: Program, p: Problem) -> None:
    with as_called(p):
        kernels = prepared(p)
        assert kernels, "it is not offered"
        said = verify(p, kernels, family_of(p).default(p), device=GPU)
    assert {str(c): one.note or one.outcome for c, one in said.items()} == {str(c): "ok" for c in kernels}


def product(inputs: Inputs) -> torch.Tensor:
    x, w, scales, bias = inputs["x"], inputs["w"].t(), inputs["scale_w"], inputs.tensors.get("bias")
    if w.dtype == torch.uint8:
        return gemm_a16w4(x, w, scales.t(), bias=bias)
    return gemm_a16w8(x, w, scales.t() if scales.dim() == 2 else scales, bias)


@pytest.mark.parametrize("form", ["eager", "graph", "compiled"])
@pytest.mark.parametrize("p", [a[i] for a in (PROBLEMS, OF_TILES) for i in (0, 2, 7, -1)], ids=str)
def test_a_published_solution_serves_the_op(program: Program, p: Problem, form: str) -> None:
    if form == "compiled" and p.m > COMPILED_ROWS:
        pytest.skip("a compiler dequantises by itself there")
    inputs = family_of(p).make(p, kind="integers", seed=5, device=GPU)
    program.hook.patches.look_for_foreign()
    expected = product(inputs)
    seen = program.outcomes()  # a form before this one may have published
    assert seen.get("miss") or seen.get("exact"), "its calls are counted"
    program.publish(program.solution(p, next(iter(prepared(p)))))
    if form == "graph":
        product(inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = product(inputs)
        y.zero_()
        graph.replay()
    else:
        y = (torch.compile(product, dynamic=False) if form == "compiled" else product)(inputs)
    assert program.outcomes().get("exact") and not program.hook.native.failures()
    assert torch.equal(y, expected), "whole numbers have one right result"
