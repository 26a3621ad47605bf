"""int8 products with one scale a row or a tensor on a real GPU: the gate takes our kernels, and they serve gemm_a8w8.

Those with zero points, too.

Run it in a process of its own: `pytest tests/gpu/test_gpu_int8.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from gpu_needs import SM_90_OR_LATER
from gpu_program import Program, fresh  # noqa: F401  fresh: an autouse fixture
from peers_site import name_it

from gemmtuned.configs.engine_races import Peer, text_of
from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.child import search
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.families.operand import Inputs
from gemmtuned.kernels.torch_flags import as_called
from gemmtuned.ops import gemm_a8w8, gemm_a8w8_blockscale, gemm_a8w8_bpreshuffle

pytestmark = [pytest.mark.gpu, SM_90_OR_LATER]
GPU = torch.device("cuda")
SIZES = (
    (1, 576, 7168), (3, 2112, 7168), (8, 4096, 4096), (16, 24576, 1536), (16, 320, 656), (17, 2112, 7168),
    (33, 4096, 7168), (64, 7168, 16384), (65, 24576, 1536), (100, 322, 656), (128, 7168, 2048), (256, 4096, 4096),
)  # fmt: skip
PROBLEMS = [
    Problem(
        family="scaled", m=m, n=n, k=k, bias=m in (8, 33, 100), dtype="i8", out_dtype="bf16", scale=scale
    )
    for m, n, k in SIZES for scale in ("row", "tensor")
]  # fmt: skip
OF_ZERO = [
    Problem(
        family="scaled", m=m, n=n, k=k, bias=m in (8, 33, 100), dtype="i8", out_dtype="bf16", scale=scale, wscale=wscale
    )
    for m, n, k in SIZES
    for scale, wscale in (("row+zero", "row"), ("tensor+zero", "row"), ("tensor+zero", "tensor"))
]


@pytest.mark.parametrize("p", [*PROBLEMS, *OF_ZERO], ids=str)
def test_our_kernels_and_torchs_own_pass_the_gate(program: Program, p: Problem) -> None:
    found = list(BACKENDS["cuda"].candidates(p))
    rows = {"scaled_fragments": (1, 16), "scaled_one_shot": (9, 256), "scaled_tiles": (33, 16384)}
    offered = {name for name, (least, most) in rows.items() if least <= p.m <= most}
    assert {c.kernel for c in found} == offered
    some = [c for name in offered for c in [c for c in found if c.kernel == name][:3]]
    with as_called(p):
        kernels = {c: BACKENDS["cuda"].prepare(c, p) for c in some}
        said = verify(p, kernels, family_of(p).default(p), device=GPU)
    assert {str(c): one.note or one.outcome for c, one in said.items()} == {str(c): "ok" for c in kernels}


def product(inputs: Inputs) -> torch.Tensor:
    x, w, sx, sw = (inputs[name] for name in ("x", "w", "scale_x", "scale_w"))
    zero, sums = (inputs.tensors.get(name) for name in ("zero_x", "sums_w"))
    return gemm_a8w8(x, w.t(), sx, sw, inputs.tensors.get("bias"), x_zero=zero, w_sums=sums)


@pytest.mark.parametrize("form", ["eager", "graph", "compiled"])
@pytest.mark.parametrize(
    "p", [*(PROBLEMS[i] for i in (0, 3, 4, 14, 18)), *(OF_ZERO[i] for i in (0, 1, 4, 6, 8, 15, 21, 28))], ids=str
)
def test_a_published_solution_serves_the_op(program: Program, p: Problem, form: str) -> None:
    inputs = family_of(p).make(p, kind="integers", seed=5, device=GPU)
    expected = product(inputs)
    program.hook.patches.look_for_foreign()
    product(inputs)
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


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    """vLLM's product with zero points, which notes how many operands came."""
    site = tmp_path_factory.mktemp("site")
    name_it(site, "vllm", "1.2.3")
    sys.path.insert(0, str(site))
    library, calls = torch.library.Library("_C", "FRAGMENT"), []
    library.define(
        "cutlass_scaled_mm_azp(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor azp_adj, "
        "Tensor? azp, Tensor? bias) -> ()"
    )
    library.impl("cutlass_scaled_mm_azp", lambda *given: calls.append(len(given)), "CUDA")
    yield calls
    library._destroy()
    sys.path.remove(str(site))


@pytest.mark.parametrize("scale", ["row+zero", "tensor+zero"])
def test_what_is_found_of_zero_points_is_served_bit_for_bit_and_an_engines_operator_by_what_has_won_over_it(
    program: Program, engine: list[int], scale: str
) -> None:
    p = Problem(family="scaled", m=16, n=2112, k=7168, dtype="i8", out_dtype="bf16", scale=scale, wscale="row")
    inputs = family_of(p).make(p, kind="integers", seed=7, device=GPU)
    expected = product(inputs)
    here = environment(cuda_device(0))
    solution, *_ = search.tune_modes((p,), "exact", p, here, mode="graph", skip=(), emit=lambda trial: None)
    assert solution.backend in ("cuda", "torch")
    chosen = solution.candidate if solution.backend == "cuda" else next(iter(BACKENDS["cuda"].candidates(p)))
    program.hook.patches.look_for_foreign()
    program.publish(program.solution(p, chosen))
    program.outcomes()
    assert torch.equal(product(inputs), expected)
    assert program.outcomes().get("exact") and not program.hook.native.failures()

    x, w, sx, sw, sums = (inputs[name] for name in ("x", "w", "scale_x", "scale_w", "sums_w"))
    y, before = torch.zeros_like(expected), len(engine)
    given = (x, w, sx, sw, sums, inputs.tensors.get("zero_x"), None)
    torch.ops._C.cutlass_scaled_mm_azp(y, *given)
    assert engine[before:] == [8] and program.outcomes().get("miss") and not y.any()

    name = "vllm_cutlass_zero" if scale == "row+zero" else "vllm_cutlass_zero_tensor"
    program.publish(replace(program.solution(p, chosen), beside=text_of({name: Peer("1.2.3", 1.1)})))
    torch.ops._C.cutlass_scaled_mm_azp(y, *given)
    assert engine[before:] == [8] and program.outcomes().get("exact") and torch.equal(y, expected)


SHUFFLED = [
    Problem(
        family="scaled", m=m, n=n, k=k, bias=m == 8, dtype=dtype, out_dtype="bf16", weight_state="shuffled",
        scale=scale, wscale="128x128" if scale == "1x128" else scale, scale_layout="row",
    )
    for m, n, k in (
        (1, 576, 7168), (3, 2112, 7168), (8, 4096, 4096), (16, 24576, 1536), (16, 320, 672),
        (17, 2112, 7168), (64, 320, 672), (130, 4096, 4096), (1000, 576, 7168),
    )
    for dtype, scale in (("i8", "row"), ("i8", "tensor"), ("fp8_e4m3", "row"), ("fp8_e4m3", "1x128"))
    if not (scale == "1x128" and m == 8)
]  # fmt: skip


@pytest.mark.parametrize("p", SHUFFLED, ids=str)
def test_weights_in_aiters_order_pass_the_gate_and_are_served(program: Program, p: Problem) -> None:
    kernels = {}
    with as_called(p):
        offered = list(BACKENDS["cuda"].candidates(p))
        assert {c.kernel for c in offered} >= {"scaled_fragments" if p.m <= 16 else "scaled_one_shot"}
        by_kernel = ([c for c in offered if c.kernel == name][:6] for name in ("scaled_fragments", "scaled_one_shot"))
        for c in itertools.chain(*by_kernel):
            with contextlib.suppress(CandidateFailed):  # it spills registers
                kernels[c] = BACKENDS["cuda"].prepare(c, p)
        assert len(kernels) >= 2
        said = verify(p, kernels, family_of(p).default(p), device=GPU)
    assert {str(c): one.note or one.outcome for c, one in said.items()} == {str(c): "ok" for c in kernels}

    inputs = family_of(p).make(p, kind="integers", seed=5, device=GPU)
    x, w, sx, sw = (inputs[name] for name in ("x", "w", "scale_x", "scale_w"))
    weight = w.t()
    weight.is_shuffled, weight.shuffle_layout = True, (16, 16)

    def call() -> torch.Tensor:
        if p.scale == "1x128":
            return gemm_a8w8_blockscale(x, weight, sx, sw.t(), isBpreshuffled=True)
        return gemm_a8w8_bpreshuffle(x, weight, sx, sw, inputs.tensors.get("bias"))

    program.hook.patches.look_for_foreign()
    expected = call()
    program.publish(program.solution(p, next(iter(kernels))))
    program.outcomes()
    assert torch.equal(call(), expected)
    assert program.outcomes().get("exact") and not program.hook.native.failures()
