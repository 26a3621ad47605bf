"""M = 1: dot products on the ordinary FMA units, because reading W is all the work there is.

y[1, N] = x[1, K] @ W[N, K].T + bias.  A program owns `rows` rows of W and walks K in steps of `block_k`, each thread
with 16-byte loads straight to registers: nothing is shared between threads until the final sum, so there is no barrier
on the way and many loads are in flight.  `split` > 1 cuts K for small N, and the last program adds up.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.triton.launch import Axis, Config, LaunchRecord, check_config, make_record
from gemmtuned.kernels.triton.split_k import arrived_last, reset

NAME: Final = "gemv"
KEYS: Final = ("rows", "block_k", "split", "warps", "unroll", "evict")
_BANDWIDTH: Final = 4.4e6  # bytes a us, H200 streaming
_LATENCY_US: Final = 0.9  # a DRAM load under load; bytes in flight / latency bounds the rate


@triton.jit
def gemv(
    x,
    w,
    bias,
    y,
    partials,
    counters,
    ldw,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    UNROLL: tl.constexpr,
    EVICT: tl.constexpr,
):
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    EVEN_K: tl.constexpr = K == STEPS * BLOCK_K * SPLIT
    EVICTION: tl.constexpr = "evict_first" if EVICT else ""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    # rows past the end read the last row again: no mask on the loads, and their sums are never stored
    read = tl.minimum(rows, N - 1) if N % BLOCK_N != 0 else rows
    ks = part * (STEPS * BLOCK_K) + tl.arange(0, BLOCK_K)
    w_rows = w + read.to(tl.int64)[:, None] * ldw
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for step in tl.range(0, STEPS, loop_unroll_factor=UNROLL):
        k = ks + step * BLOCK_K
        if EVEN_K:
            wt = tl.load(w_rows + k[None, :], eviction_policy=EVICTION)
            xt = tl.load(x + k)
        else:
            wt = tl.load(w_rows + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy=EVICTION)
            xt = tl.load(x + k, mask=k < K, other=0.0)
        acc += wt.to(tl.float32) * xt.to(tl.float32)[None, :]
    total = tl.sum(acc, 1)
    if SPLIT == 1:
        if bias is not None:
            total += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + rows, total.to(y.dtype.element_ty), mask=inside)
    else:
        at = tile * (SPLIT * BLOCK_N) + tl.arange(0, BLOCK_N)
        tl.store(partials + at + part * BLOCK_N, total)
        if arrived_last(counters, tile, SPLIT):
            total = tl.zeros((BLOCK_N,), tl.float32)
            for i in tl.static_range(SPLIT):
                total += tl.load(partials + at + i * BLOCK_N, cache_modifier=".cg")
            if bias is not None:
                total += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
            tl.store(y + rows, total.to(y.dtype.element_ty), mask=inside)
            reset(counters, tile)


KERNEL: Final = gemv


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    check_config(config, KEYS, NAME)
    if problem.m != 1:
        raise CandidateFailed(f"{problem} {NAME}: runs M = 1 only")
    return make_record(
        NAME,
        problem,
        grid=(Axis("n", config["rows"]), Axis("", config["split"]), Axis("", 1)),
        num_warps=config["warps"],
        num_stages=1,
        constants={
            "BLOCK_N": config["rows"],
            "BLOCK_K": config["block_k"],
            "UNROLL": config["unroll"],
            "EVICT": config["evict"],
        },
        split=config["split"],
        tile_values=config["rows"],
        drop=("m", "ldx"),
    )


def configs(m: int, n: int, k: int, units: int, *, arch: str = "sm_90", limit: int = 48) -> list[dict[str, int]]:
    """At most `limit` candidates for a device with this many units, the cheapest by the cost model first."""
    if m != 1:
        return []
    lanes = 64 if arch.startswith("gfx") else 32
    scored = []
    for rows in (1, 2, 4, 8, 16):
        for block_k in (512, 1024, 2048, 4096, 8192):
            for warps in (1, 2, 4, 8):
                a_thread = rows * block_k // (warps * lanes)
                if not 8 <= a_thread <= 128 or block_k // 2 >= k > 512:
                    continue
                for split in (1, 2, 4, 7, 8):
                    steps = -(-k // (block_k * split))
                    if steps * block_k * split > 1.35 * k and split > 1:
                        continue  # mostly empty slices
                    unroll = max(1, min(steps, 64 // a_thread))
                    cost = _cost_us(n, k, units, rows, block_k, split, warps, lanes, unroll)
                    config = {"rows": rows, "block_k": block_k, "split": split, "warps": warps, "unroll": unroll}
                    scored.append((cost, {**config, "evict": 1}))
    scored.sort(key=lambda item: item[0])
    return [config for _, config in scored[:limit]]


def _cost_us(
    n: int, k: int, units: int, rows: int, block_k: int, split: int, warps: int, lanes: int, unroll: int
) -> float:
    """Estimated device time: streaming, bounded by the loads that fit in flight, plus start, sum and reduction."""
    programs = -(-n // rows) * split
    resident = min(max(1, 48 // warps), 16)
    busy = min(programs, units * resident)
    in_flight = busy * min(rows * block_k * 2 * unroll, warps * lanes * 64 * 2)
    rate = min(_BANDWIDTH, in_flight / _LATENCY_US)
    steps = -(-k // (block_k * split))
    padded = steps * block_k * split * -(-n // rows) * rows * 2
    waves = programs / (units * resident)
    uneven = -(-programs // units) / (programs / units) if programs < 4 * units else 1.0
    return 2.0 + padded / rate * (0.7 + 0.3 * uneven) + 0.15 * steps / unroll + 0.3 * waves + (1.2 if split > 1 else 0)


def run(x: Any, w: Any, bias: Any, config: Config, workspace: Any = None) -> Any:
    """Y [1, N] from tensors x [1, K], w [N, K], bias [N] or None. See `gemmtuned.kernels.triton.python_launch`."""
    from gemmtuned.kernels.triton.python_launch import launch

    return launch(KERNEL, launch_record, x, w, bias, config, workspace)
