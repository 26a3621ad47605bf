"""The ops of 8-bit and 4-bit operands on a GPU: as on the CPU, eager and in a graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gemmtuned import ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
E4M3 = torch.float8_e4m3fn
RANDOM = torch.Generator().manual_seed(5)


def fp8(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RANDOM).to(E4M3)


def integers(*shape: int) -> Tensor:
    return torch.randint(-8, 9, shape, dtype=torch.int8, generator=RANDOM)


def scales(*shape: int) -> Tensor:
    return torch.exp2(torch.randint(-3, 4, shape, generator=RANDOM).float())


def codes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=RANDOM)


def with_zero(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, zero: Tensor) -> Tensor:
    return ops.gemm_a8w8(x, w, of_x, of_w, x_zero=zero)


def cases() -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    found: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {}
    for m in (1, 2, 5, 64):
        found |= {
            f"a8w8 row {m}": (ops.gemm_a8w8, (fp8(m, 512), fp8(192, 512), scales(m, 1), scales(1, 192))),
            f"a8w8 tensor {m}": (ops.gemm_a8w8, (fp8(m, 512), fp8(192, 512), scales(1), scales(1))),
            f"a8w8 mixed {m}": (ops.gemm_a8w8, (fp8(m, 512), fp8(192, 512), scales(1), scales(192))),
            f"a8w8 odd sizes {m}": (ops.gemm_a8w8, (fp8(m, 40), fp8(23, 40), scales(m), scales(1))),
            f"a8w8 int8 {m}": (ops.gemm_a8w8, (integers(m, 512), integers(192, 512), scales(m), scales(192))),
            f"a8w8 int8 odd {m}": (ops.gemm_a8w8, (integers(m, 50), integers(23, 50), scales(m), scales(1))),
            f"a8w8 int8 zero points {m}": (
                with_zero, (integers(m, 512), integers(192, 512), scales(m), scales(192), integers(m)),
            ),
            f"a8w8 int8 odd zero points {m}": (
                with_zero, (integers(m, 50), integers(23, 50), scales(m), scales(1), integers(1)),
            ),
            f"blockscale {m}": (ops.gemm_a8w8_blockscale, (fp8(m, 512), fp8(192, 512), scales(m, 4), scales(2, 4))),
            f"blockscale 3 steps {m}": (
                ops.gemm_a8w8_blockscale, (fp8(m, 384), fp8(128, 384), scales(m, 3), scales(1, 3)),
            ),
            f"blockscale tail {m}": (
                ops.gemm_a8w8_blockscale, (fp8(m, 400), fp8(128, 400), scales(m, 4), scales(1, 4)),
            ),
            f"a4w4 {m}": (
                ops.gemm_a4w4, (codes(m, 64), codes(96, 64), codes(m, 4) // 32 + 124, codes(96, 4) // 32 + 124),
            ),
            f"a16w8 {m}": (ops.gemm_a16w8, (torch.randn(m, 256).bfloat16(), fp8(160, 256), scales(160, 1))),
            f"a16w4 {m}": (ops.gemm_a16w4, (torch.randn(m, 256).bfloat16(), codes(160, 128), scales(160, 4))),
        }  # fmt: skip
    return found


@pytest.mark.parametrize("name", cases())
def test_as_on_the_cpu_and_in_a_graph(name: str) -> None:
    op, operands = cases()[name]
    want = op(*operands).double()
    there = [t.cuda() for t in operands]
    y = op(*there)
    torch.cuda.synchronize()
    size = want.abs().mean() + want.abs()
    assert y.dtype == torch.bfloat16 and y.shape == want.shape
    assert bool(((y.cpu().double() - want).abs() <= 2**-6 * size).all()), (y.cpu().double() - want).abs().max()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = op(*there)
    again.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(again, y)
