"""A captured graph keeps its kernels until it is captured anew; then it has the table's, in engines' operators, too.

Run it in a process of its own: `pytest tests/gpu/test_gpu_recapture.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_needs import SM_90_OR_LATER
from gpu_program import Program, fresh  # noqa: F401  fresh: an autouse fixture
from peers_site import name_it

import gemmtuned.graphs
from gemmtuned.configs.engine_races import Peer, text_of
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.backends import BACKENDS

pytestmark = [
    pytest.mark.gpu,
    SM_90_OR_LATER,
]
M, N, K = 16, 2112, 7168
PROBLEM = Problem(
    family="scaled", m=M, n=N, k=K, dtype="fp8_e4m3", out_dtype="bf16", math_mode="reduced", scale="row"
)  # fmt: skip
LAUNCHES, REPLAYS = 3, 5


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`_C::cutlass_scaled_mm` as vLLM declares it; beneath, torch's own product."""
    site = tmp_path_factory.mktemp("site")
    name_it(site, "vllm", "1.2.3")
    sys.path.insert(0, str(site))
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(
        "cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()"
    )

    def product(
        out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor, bias: Any
    ) -> None:
        out.copy_(torch._scaled_mm(a, b, sa, sb, bias=bias, out_dtype=out.dtype, use_fast_accum=True))

    library.impl("cutlass_scaled_mm", product, "CUDA")
    yield torch.ops._C.cutlass_scaled_mm
    library._destroy()
    sys.path.remove(str(site))


class Operands:
    """X [M, K] and W [K, N] in fp8 with a scale for each row and column, and what is right."""

    def __init__(self) -> None:
        self.x = torch.randn(M, K, device="cuda").to(torch.float8_e4m3fn)
        self.w = torch.randn(N, K, device="cuda").to(torch.float8_e4m3fn).t()
        self.sx, self.sw = torch.rand(M, 1, device="cuda") + 0.5, torch.rand(1, N, device="cuda") + 0.5
        self.out = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)

    def torchs(self) -> torch.Tensor:
        return torch._scaled_mm(
            self.x, self.w, self.sx, self.sw, out_dtype=torch.bfloat16, use_fast_accum=True
        )  # fmt: skip

    def error(self, y: torch.Tensor) -> float:
        want = (self.x.double() * self.sx.double()) @ (self.w.double() * self.sw.double())
        return float((y.double() - want).norm() / want.norm())


def captured(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            y = call()
    return graph, y


@pytest.mark.parametrize("which", ["torch._scaled_mm", "_C::cutlass_scaled_mm"])
def test_a_graph_is_counted_with_its_replays_and_routed_once_it_is_captured_anew(
    program: Program, engine: Any, which: str
) -> None:
    operands = Operands()

    def call() -> torch.Tensor:
        if which == "torch._scaled_mm":
            return operands.torchs()
        engine(operands.out, operands.x, operands.w, operands.sx, operands.sw, None)
        return operands.out

    until_s = time.monotonic() + 10
    while "_C::cutlass_scaled_mm" not in " ".join(gemmtuned.status()["engine_operators"]):
        program.hook.patches.look_for_foreign()  # the hook's thread does it once a second
        assert time.monotonic() < until_s, gemmtuned.status()
    program.publish()  # nothing: a table of before is gone
    told: list[int] = []
    off = gemmtuned.graphs.on_stale(told.append)
    allowed = max(2 * operands.error(operands.torchs()), 5e-3)
    graph, y = captured(call)
    program.outcomes()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    assert program.outcomes() == {"miss": LAUNCHES * REPLAYS}
    assert operands.error(y) <= allowed
    assert gemmtuned.graphs.stale_launches() == 0

    solution = program.solution(PROBLEM, next(iter(BACKENDS["cublaslt"].candidates(PROBLEM))))
    program.publish(solution)
    if which != "torch._scaled_mm":  # it was not raced beside the engine's own kernel
        assert gemmtuned.graphs.stale_launches() == 0
        program.publish(replace(solution, beside=text_of({"vllm_cutlass": Peer("1.2.3", 1.1)})))
    assert gemmtuned.graphs.stale_launches() == LAUNCHES
    graph.replay()
    torch.cuda.synchronize()
    assert program.outcomes() == {"miss": LAUNCHES}  # as it was captured

    began_s = time.monotonic()
    old, (graph, y) = graph, captured(call)
    took_s = time.monotonic() - began_s
    del old
    assert gemmtuned.graphs.stale_launches() == 0
    program.outcomes()
    operands.x.copy_(torch.randn(M, K, device="cuda").to(torch.float8_e4m3fn))
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    assert program.outcomes() == {"exact": LAUNCHES * REPLAYS}
    assert operands.error(y) <= allowed
    assert not program.hook.native.failures()
    print(f"{which}: captured anew in {took_s:.3f} s")
    off()
