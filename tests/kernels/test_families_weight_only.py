"""weight_only problems on the CPU: the gate takes a right kernel that scales sums, and sees planted faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels.dequantise import dequantised
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.families.quantised import quant_of
from gemmtuned.kernels.kernel import StatelessKernel

Scales = Callable[[Tensor], Tensor]
PROBLEMS = [
    f"weight_only:{kind},threads=1"
    for kind in (
        "bf16/i4:3x40x256,wscale=1x32,wscaledtype=bf16",
        "fp16/i4:1x40x512+bias,wscale=1x128,wscaledtype=fp32",
        "bf16/fp4_e2m1:9x24x256+bias,wscale=1x32",
        "fp16/fp4_e2m1:2x24x256,wscale=1x32",
        "fp16/i8:5x40x144+bias,wscale=row",
        "bf16/i8:1x40x144,wscale=tensor",
        "bf16/fp8_e4m3:5x136x272,wscale=128x128",
    )
]


def sums_scaled(problem: Problem, *, scales: Scales = lambda s: s, drop: int = 0) -> StatelessKernel:
    """As our kernel does it: exact numbers of W, sums in fp32, each of one scale. scales, drop: to plant a fault."""
    quant = quant_of(problem)
    group = {"row": problem.k, "tensor": problem.k, "128x128": 128}.get(quant) or int(problem.wscale[2:])

    def call(x: Tensor, w: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
        ones = torch.full_like(scale, 127 if scale.dtype == torch.uint8 else 1)
        values = dequantised(w.mT, ones.mT if ones.dim() == 2 else ones, quant, torch.float32)
        s = (
            scale
            if scale.dtype != torch.uint8
            else torch.where(scale == 255, torch.nan, torch.exp2(scale.float() - 127))
        )
        s = s.float().mT if s.dim() == 2 else s.float().reshape(1, 1)
        s = scales(s.repeat_interleave(128, 0)[: problem.n] if quant == "128x128" else s)
        y = x.new_zeros(problem.m, problem.n, dtype=torch.float32)
        for i, k in enumerate(range(0, problem.k - drop, group)):
            y += (x[:, k : k + group].float() @ values[:, k : k + group].t()) * s[:, i]
        return (y if bias is None else y + bias.float()).to(x.dtype)

    return StatelessKernel(call)


def outcome(text: str, **fault: object) -> str:
    problem, candidate = Problem.parse(text), Candidate("sums")
    with torch.inference_mode():
        kernels = {candidate: sums_scaled(problem, **fault)}  # type: ignore[arg-type]
        return verify(problem, kernels, family_of(problem).default(problem), device=torch.device("cpu"))[
            candidate
        ].outcome


@pytest.mark.part(2)
@pytest.mark.parametrize("text", PROBLEMS)
def test_the_gate_takes_a_kernel_that_scales_sums(text: str) -> None:
    assert outcome(text) == "ok"


@pytest.mark.parametrize("text", [PROBLEMS[0], PROBLEMS[2], PROBLEMS[6]])
def test_the_gate_sees_a_neighbours_scale_and_a_lost_group(text: str) -> None:
    assert outcome(text, scales=lambda s: s.roll(1, -1)) == "wrong"
    assert outcome(text, scales=lambda s: s.roll(1, 0)) == "wrong"
    assert outcome(text, drop=32) == "wrong"
