"""The tiles of a mixture on a real GPU, by kinds of weights: the gate, equal bits, graphs, and what is not tuned.

Run it in a process of its own: `pytest tests/gpu/test_gpu_moe_tiles.py`.
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
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.device import current_cuda_device
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.families.moe import MOE, how_of
from gemmtuned.kernels.mixture import Operands
from gemmtuned.kernels.torch_flags import as_called
from gemmtuned.kernels.triton import moe_launch
from gemmtuned.ops import moe as op

pytestmark = [pytest.mark.gpu, SM_90]
GPU = torch.device("cuda")
WEIGHTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8-tensor": {"wdtype": "fp8_e4m3", "wscale": "tensor"},
    "fp8-row": {"wdtype": "fp8_e4m3", "wscale": "row"},
    "fp8-blocks": {"wdtype": "fp8_e4m3", "wscale": "128x128"},
    "int4-32": {"wdtype": "i4", "wscale": "1x32", "wscale_dtype": "bf16"},
    "int4-128": {"wdtype": "i4", "wscale": "1x128", "wscale_dtype": "bf16"},
    "mxfp4": {"wdtype": "fp4_e2m1", "wscale": "1x32", "wscale_dtype": "e8m0"},
}
EACH = pytest.mark.parametrize("weights", WEIGHTS)


def moe(weights: str, m: int = 130, **more: Any) -> Problem:
    sizes = {"n": 640, "k": 640, "inter": 384, "experts": 40, "topk": 8, "act": "silu_gated", "math_mode": "reduced"}
    return Problem(family="moe", m=m, dtype="bf16", **{**sizes, **WEIGHTS[weights], **more})


def offered(problem: Problem) -> list[Candidate]:
    assert "moe_tiles" in environment(current_cuda_device()).backends
    return list(BACKENDS["moe_tiles"].candidates(problem))


def operands(problem: Problem, kind: str = "randn", seed: int = 0) -> Operands:
    given = MOE.make(problem, kind=kind, seed=seed, device=GPU)
    names = ("x", "w1", "w2", "ids", "scale1", "scale2", "bias1", "bias2")
    found = {name: given.tensors.get(name) for name in names}
    w = {name: _by_rows(found[name]) for name in names[1:] if name != "ids"}
    return Operands(**{**found, **w, "weights": given["gates"]})  # type: ignore[arg-type]


def _by_rows(w: torch.Tensor | None) -> torch.Tensor | None:
    return w if w is None or w.is_contiguous() else w.mT


@EACH
@pytest.mark.parametrize("more", [{}, {"m": 1025}, {"bias": True, "act": "swiglu_gated_interleaved"}], ids=str)
def test_candidates_pass_the_gate(weights: str, more: dict[str, Any]) -> None:
    problem = moe(weights, **more)
    found = offered(problem)
    chosen = (found[0], found[-1])
    with as_called(problem):
        kernels = {c: BACKENDS[c.backend].prepare(c, problem) for c in chosen}
        said = verify(problem, kernels, family_of(problem).default(problem), device=GPU)
    assert {c: v.note or v.outcome for c, v in said.items()} == dict.fromkeys(chosen, "ok")


@EACH
def test_equal_calls_give_equal_bits_in_graphs_too(weights: str) -> None:
    problem = moe(weights)
    kernel = BACKENDS["moe_tiles"].prepare(offered(problem)[0], problem)
    o = operands(problem)
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


@EACH
def test_many_tokens_of_coded_weights_run_in_tiles_before_anything_is_tuned(
    weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain weights stay with torch's grouped product."""
    problem = moe(weights, m=300)
    o, how = operands(problem), how_of(problem)
    ran: list[object] = []
    plain = moe_launch.Launches.__call__
    monkeypatch.setattr(moe_launch.Launches, "__call__", lambda self, o: (ran.append(self), plain(self, o))[1])
    quant = {"bf16": "none", "fp8-tensor": "tensor", "fp8-row": "row", "fp8-blocks": "128x128"}.get(weights)
    how = replace(how, quant=quant or ("mxfp4" if weights == "mxfp4" else "int4"))
    y = op._usual(o, how)
    assert bool(ran) == (weights != "bf16")
    want = mixture.by_expert(replace(o, x=o.x.double(), weights=o.weights.double()), how)
    assert (y.double() - want).norm() <= 8e-3 * want.norm()


def test_rows_of_any_size_meet_weights_of_8_bits() -> None:
    """They are divided by a power of two each: also where fp16 holds none of them, and where one is infinite."""
    problem = moe("fp8-row")
    kernel, how = BACKENDS["moe_tiles"].prepare(offered(problem)[0], problem), replace(how_of(problem), quant="row")
    o = operands(problem)
    for factor in (2.0**-50, 2.0**-20, 2.0**30):  # H is as small as its square
        small = replace(o, x=o.x * factor)
        want = mixture.by_expert(replace(small, x=small.x.double(), weights=o.weights.double()), how)
        y = kernel.takes(small)
        assert y is not None
        near = want.isfinite() & (want.abs() < 1e37)
        assert near.any() and ((y.double() - want)[near].norm() <= 2e-2 * want[near].norm())
    x = o.x.clone()
    x[3, 5], x[4, 7] = float("inf"), float("nan")
    y = kernel.takes(replace(o, x=x))
    first = kernel.takes(o)
    assert y is not None and first is not None
    assert not y[3].isfinite().any() and y[4].isnan().all() and torch.equal(y[5:], first[5:])
