"""Kernels with instructions that Triton's interpreter does not know: clusters, and the tensor core's on registers."""

from __future__ import annotations

import pytest
import torch

from gemmtuned.kernels.arch import has_clusters
from gemmtuned.kernels.triton import fragments, gemv, selected, tiles, warp_split_k
from gemmtuned.kernels.triton.diagonal import has_diagonal
from gemmtuned.kernels.triton.python_launch import device_arch, run

pytestmark = pytest.mark.gpu

WARPS = {"rows": 16, "tokens": 8, "block_k": 64, "split": 8, "warps": 2, "stages": 5, "cluster": 1}
LOW = {
    "rows": 32,
    "tokens": 64,
    "block_k": 64,
    "split": 5,
    "group": 1,
    "swap": 0,
    "warps": 4,
    "stages": 4,
    "cluster": 1,
}
HIGH = {**LOW, "rows": 64, "swap": 1}


def assert_right_every_time(module, config, m, n, k, bias, dtype, *, times, apart=0) -> None:
    """Near to the product in fp64, and bitwise the same each time; apart: values between the rows of X and of W."""
    generator = torch.Generator("cuda").manual_seed(1)
    x, w = (torch.randn(rows, k + apart, device="cuda", generator=generator).to(dtype)[:, :k] for rows in (m, n))
    b = torch.randn(n, device="cuda", generator=generator).to(dtype) if bias else None
    exact = x.double() @ w.double().T + (0 if b is None else b.double())

    y = run(module, x, w, b, config)

    assert ((y.double() - exact).norm() / exact.norm()).item() < (3e-3 if dtype == torch.bfloat16 else 4e-4)
    for _ in range(times):
        assert torch.equal(run(module, x, w, b, config), y)


@pytest.mark.parametrize(
    ("module", "config", "m", "n", "k", "bias"),
    [
        (warp_split_k, WARPS, 8, 256, 7168, False),
        (warp_split_k, {**WARPS, "split": 7}, 5, 250, 7168, True),
        (warp_split_k, {**WARPS, "split": 3}, 3, 1000, 4104, True),
        (warp_split_k, {**WARPS, "rows": 32, "tokens": 16, "warps": 4, "split": 2, "stages": 3}, 16, 576, 2056, False),
        (tiles, LOW, 64, 576, 7168, False),
        (tiles, {**LOW, "split": 7}, 61, 570, 7176, True),
        (tiles, HIGH, 64, 1536, 7168, True),
        (tiles, {**HIGH, "split": 3, "group": 2}, 150, 200, 2001, True),
        (tiles, {**HIGH, "rows": 128, "warps": 8, "split": 2, "tokens": 16}, 9, 1280, 8192, False),
        (tiles, {**LOW, "rows": 16, "split": 8}, 64, 256, 7168, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_clusters_are_right_and_bitwise_the_same_every_time(module, config, m, n, k, bias, dtype) -> None:
    if not has_clusters(device_arch()):
        pytest.skip("clusters need sm_90")
    assert_right_every_time(module, config, m, n, k, bias, dtype, times=50)


@pytest.mark.parametrize(
    ("rows", "warps", "unroll", "n", "k", "bias"),
    [
        (1, 1, 28, 2112, 7168, False),
        (1, 4, 7, 1536, 7168, True),
        (2, 8, 4, 257, 7168, True),  # a last step half beyond K, a row beyond N
        (2, 1, 3, 1000, 1032, False),  # 8 values in the last step
        (4, 2, 2, 4099, 520, True),
        (1, 8, 1, 3, 8, False),
    ],
)
@pytest.mark.parametrize(
    ("mma", "hold", "apart"),  # apart: rows of W further apart than K
    [(1, 0, 0), (1, 0, 8), (1, 1, 8), (1, 2, 0), (0, 1, 0), (0, 2, 8)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_on_the_diagonal_are_right(rows, warps, unroll, n, k, bias, dtype, mma, hold, apart) -> None:
    if not has_diagonal(device_arch()):
        pytest.skip("mma.m16n8k16 needs sm_80")
    config = {"rows": rows, "block_k": 256 * warps, "split": 1, "warps": warps, "unroll": unroll, "mma": mma}
    config["hold"] = hold
    assert_right_every_time(gemv, config, 1, n, k, bias, dtype, times=10, apart=apart)


PART = {"rows": 8, "tokens": 4, "split": 8, "warps": 2, "ahead": 7, "chains": 2, "registers": 0}


@pytest.mark.parametrize(
    ("config", "m", "n", "k", "bias", "apart"),
    [
        ({}, 4, 576, 7168, False, 0),
        ({"split": 7, "ahead": 8, "chains": 4}, 3, 250, 7168, True, 8),
        ({"split": 3, "warps": 4, "ahead": 2, "chains": 1, "registers": 96}, 2, 1001, 4104, True, 8),
        ({"tokens": 8, "rows": 16, "split": 5, "warps": 1}, 7, 2112, 7176, True, 0),
        ({"tokens": 16, "split": 6, "warps": 4, "ahead": 4}, 13, 512, 16384, False, 0),
        ({"tokens": 16, "rows": 32, "split": 1, "ahead": 2, "chains": 1}, 16, 7168, 2048, True, 16),
        ({"tokens": 12, "rows": 32, "split": 1, "ahead": 3, "chains": 1}, 11, 577, 7168, True, 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operands_straight_from_memory_are_right(config, m, n, k, bias, apart, dtype) -> None:
    if not has_diagonal(device_arch()):
        pytest.skip("mma.m16n8k16 needs sm_80")
    if (PART | config)["split"] > 1 and not has_clusters(device_arch()):
        pytest.skip("clusters need sm_90")
    assert_right_every_time(fragments, PART | config, m, n, k, bias, dtype, times=20, apart=apart)


WHOLE = {"rows": 8, "split": 8, "warps": 2, "ahead": 4, "registers": 0}


@pytest.mark.parametrize(
    ("config", "m", "n", "k", "bias", "apart"),
    [
        ({}, 16, 512, 16384, False, 0),
        ({"split": 7, "ahead": 8, "registers": 255}, 13, 250, 7168, True, 8),
        ({"rows": 16, "split": 2}, 9, 4096, 4096, False, 0),
        ({"rows": 16, "split": 3, "warps": 4, "ahead": 2, "registers": 96}, 10, 1001, 4104, True, 8),
        ({"split": 1, "warps": 8, "ahead": 3}, 16, 577, 7176, True, 16),
        ({"rows": 16, "split": 1, "warps": 1}, 12, 7168, 2048, True, 0),
        ({"split": 7, "warps": 4, "ahead": 2, "registers": 168}, 16, 256, 7168, True, 0),
        ({"rows": 16, "split": 5, "warps": 8, "ahead": 1}, 11, 600, 3592, False, 8),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_one_part_of_k_each_are_right(config, m, n, k, bias, apart, dtype) -> None:
    if not has_diagonal(device_arch()):
        pytest.skip("mma.sp needs sm_80")
    if (WHOLE | config)["split"] > 1 and not has_clusters(device_arch()):
        pytest.skip("clusters need sm_90")
    assert_right_every_time(selected, WHOLE | config, m, n, k, bias, dtype, times=20, apart=apart)


def test_clusters_in_a_graph_beside_another_stream_of_clusters() -> None:
    if not has_clusters(device_arch()):
        pytest.skip("clusters need sm_90")
    x, w = (torch.randn(rows, 7168, device="cuda").bfloat16() for rows in (64, 1536))
    expected = run(tiles, x, w, None, HIGH)
    streams = [torch.cuda.Stream() for _ in range(3)]
    graphs, results = [], []
    for stream in streams:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results.append([run(tiles, x, w, None, HIGH) for _ in range(20)])
        graphs.append(graph)

    for _ in range(100):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()

    assert all(torch.equal(y, expected) for ys in results for y in ys)
