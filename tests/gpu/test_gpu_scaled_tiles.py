"""scaled_tiles on a real GPU: the gate, whole numbers, fewer rows than it is for, graphs on two streams.

Run it in a process of its own: `pytest tests/gpu/test_gpu_scaled_tiles.py`.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import torch
from gpu_needs import SM_90_OR_LATER
from gpu_program import Program, fresh  # noqa: F401  fresh: an autouse fixture

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.cuda.scaled_tiles import scored
from gemmtuned.kernels.device import current_cuda_device
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.families.operand import Inputs
from gemmtuned.kernels.torch_flags import as_called
from gemmtuned.ops import gemm_a8w8

pytestmark = [pytest.mark.gpu, SM_90_OR_LATER]
GPU = torch.device("cuda")
KINDS: dict[str, dict[str, Any]] = {
    "row": {"dtype": "fp8_e4m3", "scale": "row"},
    "row_fast": {"dtype": "fp8_e4m3", "scale": "row", "math_mode": "reduced"},
    "tensor": {"dtype": "fp8_e4m3", "scale": "tensor"},
    "block": {"dtype": "fp8_e4m3", "scale": "1x128", "scale_layout": "col"},
    "block_row": {"dtype": "fp8_e4m3", "scale": "1x128"},
    "int8": {"dtype": "i8", "scale": "row"},
    "int8_zero": {"dtype": "i8", "scale": "row+zero", "wscale": "row"},
    "int8_zero_tensor": {"dtype": "i8", "scale": "tensor+zero", "wscale": "row"},
}
SIZES = ((33, 4098, 1536), (64, 320, 640), (130, 576, 7168), (300, 1024, 400), (1000, 2112, 2048), (2048, 4096, 1024))


def of_kind(kind: str, m: int, n: int, k: int) -> Problem:
    bias = m in (33, 300) and not kind.startswith("block")
    lies = {"wscale_layout": "row_padded"} if kind == "block" and -(-k // 128) % 4 else {}
    return Problem(family="scaled", m=m, n=n, k=k, bias=bias, out_dtype="bf16", **KINDS[kind] | lies)


# torch has no fp8 product of one scale a row or a tensor where N is no multiple of 16
PROBLEMS = [
    of_kind(kind, m, n if kind.startswith(("block", "int8")) else n // 16 * 16, k)
    for kind in KINDS
    for m, n, k in SIZES
]


def of_each_form(p: Problem, most: int = 8) -> list[Candidate]:
    """The candidate that is thought the fastest of each way to share tiles of each size, for some of them."""
    found: dict[tuple[int, ...], Candidate] = {}
    for _, config in scored(p, current_cuda_device().units):
        form = tuple(config[name] for name in ("tokens", "halves", "share_w", "share_x", "parts"))
        found.setdefault(form, Candidate.of("cuda", kernel="scaled_tiles", **config))
    ways = list(found.values())
    return ways[:: max(len(ways) // most, 1)]


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_the_gate_takes_each_form(program: Program, p: Problem) -> None:
    assert any(c.kernel == "scaled_tiles" for c in BACKENDS["cuda"].candidates(p)), "it is offered"
    kernels = {}
    with as_called(p):
        for c in of_each_form(p):
            with contextlib.suppress(CandidateFailed):  # it spills registers
                kernels[c] = BACKENDS["cuda"].prepare(c, p)
        assert len(kernels) >= 4
        said = verify(p, kernels, family_of(p).default(p), device=GPU)
    assert {str(c): one.note or one.outcome for c, one in said.items()} == {str(c): "ok" for c in kernels}


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_rows_than_it_is_for_have_the_same_results(program: Program, kind: str) -> None:
    p = of_kind(kind, 1000, 2112, 2048)
    inputs = family_of(p).make(p, kind="integers", seed=5, device=GPU)
    weights = [inputs[o.name] for o in family_of(p).operands if o.weight and o.name in inputs.tensors]
    x, scale, *zero = (inputs[name] for name in ("x", "scale_x", "zero_x") if name in inputs.tensors)
    for c in of_each_form(p, 4):
        run = BACKENDS["cuda"].prepare(c, p).bind(*weights)
        whole = run(x, scale, *zero)
        for m in (1, 63, 64, 65, 129, 999):
            its = [t[:m] if t.shape[:1] == x.shape[:1] else t for t in (scale, *zero)]
            assert torch.equal(run(x[:m], *its), whole[:m]), (str(c), m)


def product(p: Problem, inputs: Inputs) -> torch.Tensor:
    if p.dtype != "i8":
        return inputs.run(family_of(p).default(p))
    x, w, sx, sw = (inputs[name] for name in ("x", "w", "scale_x", "scale_w"))
    zero, sums = (inputs.tensors.get(name) for name in ("zero_x", "sums_w"))
    return gemm_a8w8(x, w.t(), sx, sw, inputs.tensors.get("bias"), x_zero=zero, w_sums=sums)


@pytest.mark.parametrize("p", [of_kind(kind, 300, 1024, 640) for kind in KINDS if kind != "block_row"], ids=str)
def test_two_streams_of_graphs_do_not_share_anything(program: Program, p: Problem) -> None:
    """The maps of X and W lie in each graph, as its addresses do."""
    inputs = [family_of(p).make(p, kind="integers", seed=seed, device=GPU) for seed in (5, 6)]
    program.hook.patches.look_for_foreign()
    expected = [product(p, one) for one in inputs]
    parts = [c for c in of_each_form(p, 99) if json.loads(c.config)["parts"] > 1]
    for c in (of_each_form(p)[0], parts[0]):
        program.publish(program.solution(p, c))
        program.outcomes()
        streams, graphs, results = [torch.cuda.Stream() for _ in inputs], [], []
        for one, stream in zip(inputs, streams, strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                results.append([product(p, one) for _ in range(4)])
            graphs.append(graph)
        assert program.outcomes() == {"exact": 8} and not program.hook.native.failures()
        for _ in range(50):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for found, right in zip(results, expected, strict=True):
            assert all(torch.equal(y, right) for y in found), str(c)
