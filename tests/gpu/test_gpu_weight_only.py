"""Products with a weight of 8 or 4 bits on a real GPU: the gate takes our kernel, and serves gemm_a16w8 and gemm_a16w4.

Run it in a process of its own: `pytest tests/gpu/test_gpu_weight_only.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_needs import SM_90_OR_LATER
from gpu_program import Program, fresh, hooked  # noqa: F401  fresh: an autouse fixture

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tunable import WEIGHT_ONLY
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.families.operand import Inputs
from gemmtuned.kernels.torch_flags import as_called
from gemmtuned.ops import gemm_a16w4, gemm_a16w8

pytestmark = [pytest.mark.gpu, SM_90_OR_LATER]
GPU = torch.device("cuda")
SIZES = ((1, 576, 7168), (3, 2112, 2048), (16, 1000, 1280))
PROBLEMS = [
    Problem(
        family="weight_only", m=m, n=n, k=k, bias=m == 3, dtype=dtype, wdtype=wdtype, wscale=scale, wscale_dtype=of,
        math_mode="reduced",
    )
    for number, ((dtype, wdtype), kinds) in enumerate(WEIGHT_ONLY.items())
    for (scale, of), (m, n, k) in zip(kinds, SIZES[number % 3 :] + SIZES + SIZES, strict=False)
]  # fmt: skip


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, native_cache: Path) -> Iterator[Program]:
    yield from hooked(tmp_path_factory.mktemp("home"), native_cache)


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_our_kernel_and_torchs_own_pass_the_gate(program: Program, p: Problem) -> None:
    found = list(BACKENDS["cuda"].candidates(p))
    assert found, "it is not offered"
    with as_called(p):
        kernels = {c: BACKENDS["cuda"].prepare(c, p) for c in found[:3]}
        said = verify(p, kernels, family_of(p).default(p), device=GPU)
    assert {str(c): one.note or one.outcome for c, one in said.items()} == {str(c): "ok" for c in kernels}


def product(inputs: Inputs) -> torch.Tensor:
    x, w, scales, bias = inputs["x"], inputs["w"].t(), inputs["scale_w"], inputs.tensors.get("bias")
    if w.dtype == torch.uint8:
        return gemm_a16w4(x, w, scales.t(), bias=bias)
    return gemm_a16w8(x, w, scales.t() if scales.dim() == 2 else scales, bias)


@pytest.mark.parametrize("form", ["eager", "graph", "compiled"])
@pytest.mark.parametrize("p", [PROBLEMS[0], PROBLEMS[2], PROBLEMS[7], PROBLEMS[-1]], ids=str)
def test_a_published_solution_serves_the_op(program: Program, p: Problem, form: str) -> None:
    inputs = family_of(p).make(p, kind="integers", seed=5, device=GPU)
    program.hook.patches.look_for_foreign()
    expected = product(inputs)
    seen = program.outcomes()  # a form before this one may have published
    assert seen.get("miss") or seen.get("exact"), "its calls are counted"
    program.publish(program.solution(p, next(iter(BACKENDS["cuda"].candidates(p)))))
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
