"""fp8 with scales of blocks at sizes that torch refuses, on a real GPU: verdicts, and gemm_a8w8_blockscale.

Run it in a process of its own: `pytest tests/gpu/test_gpu_blocks.py`.
"""

from __future__ import annotations

import pytest
import torch
from gpu_needs import SM_90_OR_LATER
from gpu_program import Program, fresh  # noqa: F401  fresh: an autouse fixture

from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.child import search
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.families.operand import Inputs
from gemmtuned.kernels.torch_flags import as_called
from gemmtuned.ops import gemm_a8w8_blockscale

pytestmark = [pytest.mark.gpu, SM_90_OR_LATER]
GPU = torch.device("cuda")
SIZES = ((1, 2112, 7168), (1, 7168, 2304), (3, 576, 7168), (5, 4096, 400), (17, 320, 640), (33, 4098, 1536))
PROBLEMS = [
    Problem(
        family="scaled", m=m, n=n, k=k, dtype="fp8_e4m3", out_dtype="bf16", scale="1x128", math_mode="ieee",
        scale_layout=lies,
    )
    for m, n, k in SIZES for lies in (("row", "col") if m > 1 else ("row",))
]  # fmt: skip


@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_our_kernels_pass_the_gate_beside_copies_that_torch_multiplies(program: Program, p: Problem) -> None:
    found = list(BACKENDS["cuda"].candidates(p))
    names = {c.kernel for c in found}
    of_size = (("scaled_fragments",) if p.m <= 16 else ()) + (("scaled_tiles",) if p.m > 32 else ())
    assert names == {"scaled_one_shot", *of_size}
    some = [c for name in names for c in [c for c in found if c.kernel == name][:2]]
    with as_called(p):
        kernels = {c: BACKENDS["cuda"].prepare(c, p) for c in some}
        said = verify(p, kernels, family_of(p).default(p), device=GPU)
    assert {str(c): one.note or one.outcome for c, one in said.items()} == {str(c): "ok" for c in kernels}


@pytest.mark.parametrize("p", PROBLEMS[:2], ids=str)
def test_a_search_has_a_verdict_for_one_row(program: Program, p: Problem) -> None:
    here = environment(cuda_device(0))
    solution, *_ = search.tune_modes((p,), "exact", p, here, mode="graph", skip=(), emit=lambda trial: None)
    assert (solution.state, solution.backend) == ("published", "cuda")
    assert solution.us < solution.baseline_us


def product(inputs: Inputs) -> torch.Tensor:
    x, w, sx, sw = (inputs[name] for name in ("x", "w", "scale_x", "scale_w"))
    return gemm_a8w8_blockscale(x, w.t(), sx, sw.t())


@pytest.mark.parametrize("form", ["eager", "graph", "compiled"])
@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_a_published_solution_serves_the_op(program: Program, p: Problem, form: str) -> None:
    inputs = family_of(p).make(p, kind="integers", seed=5, device=GPU)
    expected = product(inputs)
    program.hook.patches.look_for_foreign()
    program.outcomes()
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
