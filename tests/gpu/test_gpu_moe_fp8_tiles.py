"""Mixtures that quantise X and H, on a real GPU: right, the same in graphs, and only for those who allow it.

Run it in a process of its own: `pytest tests/gpu/test_gpu_moe_fp8_tiles.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_needs import SM_90

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels import mixture
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.families.moe import MOE, how_of
from gemmtuned.kernels.mixture import Operands
from gemmtuned.kernels.torch_flags import as_called
from gemmtuned.kernels.triton import moe_fp8_launch, moe_fp8_tiling
from gemmtuned.ops import fused_moe
from gemmtuned.ops import moe as op

pytestmark = [pytest.mark.gpu, SM_90]
GPU = torch.device("cuda")
TILES = [
    ("64.16.1.4.4", "128.16.1.4.4"), ("128.16.1.8.3", "128.16.4.4.4"), ("64.32.1.4.4", "128.32.4.4.4"),
    ("128.32.1.8.3", "128.64.4.4.3"), ("64.64.1.4.3", "64.64.8.4.3"), ("128.64.1.8.4", "128.64.4.4.3"),
]  # fmt: skip


def moe(m: int = 130, **more: Any) -> Problem:
    sizes = {"n": 640, "k": 640, "inter": 384, "experts": 40, "topk": 8, "act": "silu_gated", "math_mode": "reduced"}
    types = {"dtype": "bf16", "wdtype": "fp8_e4m3", "scale": "1x128", "wscale": "128x128"}
    return Problem(family="moe", m=m, **{**sizes, **types, **more})


def operands(problem: Problem, kind: str = "randn") -> Operands:
    given = MOE.make(problem, kind=kind, seed=0, device=GPU)
    return Operands(
        **{name: given[name] for name in ("x", "w1", "w2", "ids", "scale1", "scale2")}, weights=given["gates"]
    )


@pytest.mark.parametrize(
    "more", [{}, {"m": 1025}, {"act": "gelu_gated_weighted", "dtype": "fp16"}, {"inter": 192}], ids=str
)
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_every_form_passes_the_gate(tiles: tuple[str, str], more: dict[str, Any]) -> None:
    problem, (up, down) = moe(**more), tiles
    if problem.inter == 192 and up.startswith("128"):
        pytest.skip("192 columns are no whole tiles of 128")
    chosen = Candidate.of(moe_fp8_tiling.NAME, up=up, down=down)
    with as_called(problem):
        kernel = BACKENDS[chosen.backend].prepare(chosen, problem)
        said = verify(problem, {chosen: kernel}, family_of(problem).default(problem), device=GPU)
    assert said[chosen].outcome == "ok", said[chosen].note


def test_equal_calls_give_equal_bits_in_graphs_too() -> None:
    problem = moe()
    chosen = next(iter(BACKENDS["moe_fp8_tiles"].candidates(problem)))
    kernel, o = BACKENDS["moe_fp8_tiles"].prepare(chosen, problem), operands(problem)
    first = kernel.takes(o)
    assert first is not None and all(torch.equal(kernel.takes(o), first) for _ in range(20))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel.takes(o)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, first)
    longer = kernel.takes(replace(o, ids=o.ids.long()))
    assert longer is not None and torch.equal(longer, first)


@pytest.mark.parametrize("allowed", [False, True])
def test_fused_moe_quantises_for_those_who_allow_it(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = moe(300)
    o, ran = operands(problem), []
    plain = moe_fp8_launch.Launches.__call__
    monkeypatch.setattr(moe_fp8_launch.Launches, "__call__", lambda self, o: (ran.append(self), plain(self, o))[1])
    y = fused_moe(
        o.x, o.w1, o.w2, o.weights, o.ids, quant_type="per_1x128", w1_scale=o.scale1, w2_scale=o.scale2,
        quantize_activations=allowed,
    )  # fmt: skip
    want = mixture.by_expert(replace(o, x=o.x.double(), weights=o.weights.double()), how_of(problem))
    error = float((y.double() - want).norm() / want.norm())
    assert bool(ran) == allowed and (0.02 < error < 0.07 if allowed else error < 8e-3)
    key = op.problem_of(o, replace(how_of(problem), activations="1x128" if allowed else "none"))
    assert key == (problem if allowed else replace(problem, scale="none", scale_dtype=""))


def test_what_is_infinite_or_no_number_stays_in_its_row() -> None:
    problem = moe()
    chosen = next(iter(BACKENDS["moe_fp8_tiles"].candidates(problem)))
    kernel, o = BACKENDS["moe_fp8_tiles"].prepare(chosen, problem), operands(problem)
    x = o.x.clone()
    x[3, 5], x[4, 7], x[6] = float("inf"), float("nan"), 0
    y, first = kernel.takes(replace(o, x=x)), kernel.takes(o)
    assert y is not None and first is not None
    assert y[3:5].isnan().all() and not y[6].any() and torch.equal(y[7:], first[7:]) and torch.equal(y[:3], first[:3])
