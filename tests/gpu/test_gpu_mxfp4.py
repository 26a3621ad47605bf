"""MXFP4 by MXFP4 on a real GPU: the gate takes our kernel, and it serves gemm_a4w4.

Where the GPU has no such instruction the form that names it runs, too, since Triton then decodes both operands: that
shows its addresses, masks and slices.  Run it in a process of its own: `pytest tests/gpu/test_gpu_mxfp4.py`.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from gpu_needs import SM_90_OR_LATER
from gpu_program import Program, fresh  # noqa: F401  fresh: an autouse fixture

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.families.operand import Inputs
from gemmtuned.kernels.kernel import Kernel
from gemmtuned.kernels.torch_flags import as_called
from gemmtuned.kernels.triton.mxfp4_tiles import KERNEL
from gemmtuned.ops import gemm_a4w4
from gemmtuned.ops.weight_only import COMPILED_ROWS

pytestmark = [pytest.mark.gpu, SM_90_OR_LATER]
GPU = torch.device("cuda")
PROBLEMS = [
    Problem(
        family="scaled", m=m, n=n, k=k, bias=m % 10 == 3, dtype="fp4_e2m1", out_dtype=out, scale="1x32"
    )
    for out, (m, n, k) in zip(
        ("bf16", "fp16", "bf16", "fp16", "bf16"),
        ((1, 576, 7168), (13, 2112, 2080), (16, 1000, 1280), (33, 1024, 4096), (300, 1000, 1312)),
        strict=True,
    )
]  # fmt: skip


def prepared(p: Problem, decoded: int = 1) -> dict[Candidate, Kernel]:
    """Three of this form that are unlike each other, those that spill aside."""
    arch = "sm_90" if decoded else "sm_100"
    configs = [config for _, config in KERNEL.scored(p, replace(cuda_device(0), arch=arch))]
    kernels: dict[Candidate, Kernel] = {}
    for config in (*configs[:: max(1, len(configs) // 3)], *configs):
        candidate = Candidate.of("triton", kernel=KERNEL.name, **config)
        with contextlib.suppress(CandidateFailed):
            kernels[candidate] = BACKENDS["triton"].prepare(candidate, p)
        if len(kernels) == 3:
            break
    return kernels


def product(inputs: Inputs) -> torch.Tensor:
    x, w, scale_x, scale_w = (inputs[name] for name in ("x", "w", "scale_x", "scale_w"))
    bias = inputs.tensors.get("bias")
    return gemm_a4w4(x, w.t(), scale_x, scale_w.t(), bias)


@pytest.mark.parametrize("decoded", [0, 1])
@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_our_kernel_and_torchs_own_pass_the_gate(program: Program, p: Problem, decoded: int) -> None:
    with as_called(p):
        kernels = prepared(p, decoded)
        assert kernels
        said = verify(p, kernels, family_of(p).default(p), device=GPU)
    assert {str(c): one.note or one.outcome for c, one in said.items()} == {str(c): "ok" for c in kernels}


def test_scales_that_are_not_numbers_give_results_that_are_none(program: Program) -> None:
    p = PROBLEMS[0].with_m(33)
    inputs = family_of(p).make(p, kind="randn", seed=5, device=GPU)
    inputs["scale_x"][7, 3] = inputs["scale_w"][5, 11] = 255
    right = inputs.run(family_of(p).default(p))
    for kernel in (*prepared(p).values(), *prepared(p, 0).values()):
        y = inputs.run(kernel)
        assert torch.equal(y.isnan(), right.isnan())
        assert y.isnan()[7].all() and y.isnan()[:, 11].all() and y.isnan().sum() == p.n + p.m - 1


@pytest.mark.parametrize("form", ["eager", "graph", "compiled"])
@pytest.mark.parametrize("p", [PROBLEMS[0], PROBLEMS[2], PROBLEMS[4]], ids=str)
def test_a_published_solution_serves_the_op(program: Program, p: Problem, form: str) -> None:
    if form == "compiled" and p.m > COMPILED_ROWS:
        pytest.skip("a compiler dequantises by itself there")
    inputs = family_of(p).make(p, kind="integers", seed=5, device=GPU)
    program.hook.patches.look_for_foreign()
    expected = product(inputs)
    seen = program.outcomes()
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
