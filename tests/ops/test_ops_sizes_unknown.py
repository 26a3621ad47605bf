"""The ops in code for sizes that nobody knows yet: exported, or compiled with bounds; with the hook and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gemmtuned import ops
from gemmtuned.hooks import activate
from gemmtuned.kernels.scaled_by_torch import rows_as_torch_takes
from gemmtuned.ops import blocks, mxfp4, weight_only

E4M3 = torch.float8_e4m3fn
MOST = 4000


@pytest.fixture(params=[False, True], ids=["alone", "hooked"], autouse=True)
def hooked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """What the ops ask of the hook before they call an operator of ours."""
    monkeypatch.setattr(activate, "is_active", lambda: request.param)
    torch._dynamo.reset()
    yield request.param
    torch._dynamo.reset()


def exported(call: Callable[..., Any], *operands: Tensor, rows: tuple[int, ...] = (0,)) -> Any:
    """For any number of rows of these operands."""

    class Program(torch.nn.Module):
        def forward(self, *given: Tensor) -> Any:
            return call(*given)

    size = torch.export.Dim("rows", min=1, max=MOST)
    shapes = tuple({0: size} if at in rows else None for at in range(len(operands)))
    return torch.export.export(Program(), operands, dynamic_shapes={"given": shapes})


def operators(program: Any) -> set[str]:
    return {str(node.target).partition(".")[0] for node in program.graph.nodes if node.op == "call_function"}


CALLS: dict[str, tuple[Callable[..., Tensor], Callable[[int], tuple[Tensor, ...]], tuple[int, ...]]] = {
    "int8": (ops.gemm_a8w8, lambda m: (torch.ones(m, 64).char(), torch.ones(32, 64).char(), torch.rand(m, 1),
                                       torch.rand(1, 32)), (0, 2)),
    "int8, one scale": (lambda *given: ops.gemm_a8w8(*given, torch.ones(1), torch.ones(1)),
                        lambda m: (torch.ones(m, 64).char(), torch.ones(32, 64).char()), (0,)),
    "int8, zero points": (lambda x, w, of_x, of_w, zero: ops.gemm_a8w8(x, w, of_x, of_w, x_zero=zero),
                          lambda m: (torch.ones(m, 64).char(), torch.ones(32, 64).char(), torch.rand(m, 1),
                                     torch.rand(1, 32), torch.arange(m).int()), (0, 2, 4)),
    "int8, zero points in sums": (
        lambda x, w, of_x, of_w, sums: ops.gemm_a8w8(x, w, of_x, of_w, w_sums=sums),
        lambda m: (torch.ones(m, 64).char(), torch.ones(32, 64).char(), torch.rand(1), torch.rand(1, 32),
                   torch.arange(32).int()), (0,)),
    "fp8": (ops.gemm_a8w8, lambda m: (torch.ones(m, 64).to(E4M3), torch.ones(32, 64).to(E4M3), torch.rand(m, 1),
                                      torch.rand(1, 32)), (0, 2)),
    "a16w8": (ops.gemm_a16w8, lambda m: (torch.ones(m, 256).bfloat16(), torch.ones(32, 256).to(E4M3),
                                         torch.rand(32, 1)), (0,)),
    "a16w4": (ops.gemm_a16w4, lambda m: (torch.ones(m, 256).bfloat16(), torch.ones(32, 128).byte(),
                                         torch.rand(32, 4)), (0,)),
    "a4w4": (ops.gemm_a4w4, lambda m: (torch.ones(m, 128).byte(), torch.ones(32, 128).byte(),
                                       torch.full((m, 8), 127).byte(), torch.full((32, 8), 127).byte()), (0, 2)),
}  # fmt: skip


@pytest.mark.part(9)
@pytest.mark.parametrize("name", CALLS)
def test_exported_code_is_for_all_rows_and_runs_without_us(name: str) -> None:
    call, operands, rows = CALLS[name]
    program = exported(call, *operands(40), rows=rows)
    assert "gemmtuned" not in operators(program)
    for m in (2, 32, 300):
        given = operands(m)
        assert torch.equal(program.module()(*given), call(*given))


@pytest.mark.part(9)
@pytest.mark.parametrize("name", CALLS)
def test_exported_code_of_a_gpu_is_for_all_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as tensors without values show it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    call, operands, rows = CALLS[name]
    with FakeTensorMode(shape_env=ShapeEnv()):
        given = tuple(torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in operands(40))
    if name == "int8, one scale":
        call, given = ops.gemm_a8w8, (*given, *_on_gpu(given[0]))
    assert "gemmtuned" not in operators(exported(call, *given, rows=rows))


@pytest.mark.parametrize("name", ["a16w8", "a16w4", "a4w4", "blocks"])
def test_rows_that_a_mask_decides_are_not_asked_for(name: str, hooked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such code compiles with the hook on as without; tensors without values stand for those of a GPU."""
    monkeypatch.setattr(mxfp4, "capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        for m, served in ((shapes.create_unbacked_symint(), False), (16, hooked), (17, False), (0, False)):
            x, w, of_x, of_w = (
                torch.empty(*size, dtype=torch.uint8, device="cuda") for size in ((m, 128), (32, 128), (m, 8), (32, 8))
            )
            if name == "a4w4":
                found = mxfp4.can_be_multiplied(torch.bfloat16, x, w, of_x, of_w)
            elif name == "blocks":
                x, w = (torch.empty(*size, 256, dtype=E4M3, device="cuda") for size in ((m,), (32,)))
                of_x, of_w = torch.empty(m, 2, device="cuda"), torch.empty(1, 2, device="cuda")
                found, served = blocks._is_served(x, w, of_x, of_w, torch.bfloat16), hooked and type(m) is int and m > 0
            else:
                w = w if name == "a16w4" else torch.empty(32, 256, dtype=torch.int8, device="cuda")
                of_w = of_w if name == "a16w4" else torch.empty(32, 1, device="cuda")
                x = torch.empty(m, 256, dtype=torch.bfloat16, device="cuda")
                found = weight_only._is_served(x, w, of_w, None)
            assert found is served, m


def _on_gpu(like: Tensor) -> tuple[Tensor, Tensor]:
    with like.fake_mode:  # type: ignore[attr-defined]
        return torch.empty(1, device="cuda"), torch.empty(1, device="cuda")


@pytest.mark.part(9)
@pytest.mark.parametrize("name", CALLS)
def test_code_that_was_promised_to_be_for_a_range_of_rows_is(name: str) -> None:
    call, operands, rows = CALLS[name]
    compiled, given = torch.compile(call, backend="aot_eager", fullgraph=True), operands(40)
    for at in rows:
        torch._dynamo.mark_dynamic(given[at], 0, min=2, max=MOST)
    assert torch.equal(compiled(*given), call(*given))
    for m in (32, 300):
        others = operands(m)
        assert torch.equal(compiled(*others), call(*others))


def test_rows_are_filled_up_without_asking_how_many_they_are() -> None:
    program = exported(rows_as_torch_takes, torch.ones(40, 256).to(E4M3), torch.rand(40, 2), rows=(0, 1))
    for m in (5, 8, 31):
        x, scales = torch.ones(m, 256).to(E4M3), torch.rand(m, 2)
        found, expected = program.module()(x, scales), rows_as_torch_takes(x, scales)
        assert [t.shape for t in found] == [t.shape for t in expected] and torch.equal(found[1], expected[1])
