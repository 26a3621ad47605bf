"""M = 1: dot products, on the ordinary FMA units or (`mma` 1) by the tensor core; reading W is most of the work.

y[1, N] = x[1, K] @ W[N, K].T + bias.  A program owns `rows` rows of W and walks K in steps of `block_k`, each thread
with 16-byte loads straight to registers: nothing is shared between threads until the final sum, so there is no barrier
on the way and many loads are in flight.  `split` > 1 cuts K where N alone has too few rows for all units, and the last
program adds up.  The tensor core (diagonal.py) takes a tenth of the instructions for the products, which shows where
all data arrive at about the same time.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import triton
import triton.language as tl

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.triton.diagonal import VALUES, add_products, has_diagonal, on_diagonal
from gemmtuned.kernels.triton.launch import Axis, Config, LaunchRecord, check_config, make_record
from gemmtuned.kernels.triton.space import largest
from gemmtuned.kernels.triton.split_k import arrived_last, reset

NAME: Final = "gemv"
KEYS: Final = ("rows", "block_k", "split", "warps", "unroll", "mma")
_BANDWIDTH: Final = 4.76e6  # bytes a us


class _Costs(NamedTuple):
    """In us.  latency: bytes in flight over it are the rate.  load: of a value that a thread reads at once.  beyond: of
    each part of K read beyond its end.  whole: where all steps are at once."""

    start: float
    latency: float
    load: float
    row: float
    warp: float
    beyond: float
    whole: float


_ORDINARY: Final = _Costs(2.386, 0.731, 0.00503, -0.0283, 0.0225, 0.203, -0.606)
_BY_TENSOR_CORE: Final = _Costs(1.914, 0.568, 0.00622, -0.0374, 0.032, 0.31, -0.326)


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
    MMA: tl.constexpr,
):
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    EVEN_K: tl.constexpr = K == STEPS * BLOCK_K * SPLIT
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
            wt = tl.load(w_rows + k[None, :], eviction_policy="evict_first")
            xt = tl.load(x + k)
        else:
            wt = tl.load(w_rows + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
            xt = tl.load(x + k, mask=k < K, other=0.0)
        if MMA:
            acc = add_products(wt, xt[None, :], acc)
        else:
            acc += wt.to(tl.float32) * xt.to(tl.float32)[None, :]
    if MMA:
        acc = on_diagonal(acc)
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
    config = {"mma": 0, **config}  # a config without is one as they were before
    check_config(config, KEYS, NAME)
    if problem.m != 1:
        raise CandidateFailed(f"{problem} {NAME}: runs M = 1 only")
    if config["mma"] not in (0, 1):
        raise CandidateFailed(f"{NAME}: mma is {config['mma']}, expected 0 or 1")
    if config["mma"] and (config["block_k"] % (VALUES * config["warps"]) or problem.k % 8):
        raise CandidateFailed(
            f"{problem} {NAME}: the tensor core takes {VALUES} values a warp and a K of whole loads, block_k is "
            f"{config['block_k']} for {config['warps']} warps"
        )
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
            "MMA": config["mma"],
        },
        split=config["split"],
        tile_values=config["rows"],
        drop=("m", "ldx"),
    )


def scored(m: int, n: int, k: int, units: int, *, arch: str = "sm_90") -> list[tuple[float, dict[str, int]]]:
    """(estimated us, config) of the candidates for a device with this many units, the fastest first."""
    if m != 1:
        return []
    lanes = 64 if arch.startswith("gfx") else 32
    found = [
        *_ordinary(n, k, units, lanes),
        *(_by_tensor_core(n, k, units) if has_diagonal(arch) and k % 8 == 0 else ()),
    ]
    costs = [(_estimate_us(n, k, units, config, lanes), config) for config in found]
    return sorted(costs, key=lambda item: item[0])


def _ordinary(n: int, k: int, units: int, lanes: int) -> Iterator[dict[str, int]]:
    for rows in (1, 2, 4, 8):
        if rows > 1 and n < 0.75 * rows * units:
            continue
        for block_k in (256, 512, 1024, 2048, 4096, 8192):
            for warps in (1, 2, 4, 8):
                a_thread = rows * block_k // (warps * lanes)
                if 512 < block_k >= 2 * k or not 8 <= a_thread <= 128:
                    continue  # a load of a thread is 16 bytes, and its sums stay in registers
                for split in (1, 2, 4, 8) if rows == 1 else (1,):
                    steps = -(-k // (block_k * split))
                    if split > 1 and (n * split > 2 * units or steps * block_k * split > 1.1 * k):
                        continue
                    for unroll in _unrolls(steps, a_thread, (8, 16)):
                        yield {"rows": rows, "block_k": block_k, "split": split, "warps": warps, "unroll": unroll}


def _by_tensor_core(n: int, k: int, units: int) -> Iterator[dict[str, int]]:
    """A thread has one load of each row of W a step: a wider block is the same as more steps at once."""
    for rows in (1, 2, 4):
        if rows > 1 and n < 0.75 * rows * units:
            continue
        for warps in (1, 2, 4, 8):
            block_k = VALUES * warps
            steps = -(-k // block_k)
            if steps * block_k > 1.25 * k:
                continue
            for unroll in _unrolls(steps, 8 * rows, (4, 8, 16, 32)):
                yield {"rows": rows, "block_k": block_k, "split": 1, "warps": warps, "unroll": unroll, "mma": 1}


def _unrolls(steps: int, a_thread: int, loads: Sequence[int]) -> list[int]:
    """Steps at once that put so many loads of a thread in flight, without a rest where that is not much less."""
    found = set()
    for count in loads:
        most = max(1, min(steps, 8 * count // a_thread))
        even = max(u for u in range(1, most + 1) if steps % u == 0)
        found.add(even if even > most // 2 else most)
    return sorted(found)


def _estimate_us(n: int, k: int, units: int, config: dict[str, int], lanes: int) -> float:
    """As space.estimate_us, for loads that go to registers; constants from 2,400 timings at 20 shapes on an H200."""
    rows, block_k, split, warps, unroll = (config[key] for key in KEYS[:5])
    costs = _BY_TENSOR_CORE if config.get("mma") else _ORDINARY
    a_thread = rows * block_k // (warps * lanes)
    steps = -(-k // (block_k * split))
    at_once = min(unroll, steps)
    busiest = -(-(-(-n // rows) * split) // units)
    sums = 8 * rows if config.get("mma") else a_thread
    registers = 24 + sums + (a_thread + a_thread // rows) * unroll // 2  # and W and X on their way
    here = min(busiest, 32, 64 // warps, max(1, 2048 // (warps * min(registers, 255))))
    memory = n * k * 2 / _BANDWIDTH
    rate = min(1.15 * _BANDWIDTH / units, here * rows * min(block_k, k) * 2 * at_once / costs.latency)
    loads = busiest * rows * k / split * 2 / rate
    beyond = steps * block_k * split / k - 1
    other = costs.load * a_thread * unroll + costs.row * rows + costs.warp * warps + costs.beyond * beyond
    return costs.start + largest(memory, loads) + other + costs.whole * (unroll >= steps) + (1.0 if split > 1 else 0.0)


def run(x: Any, w: Any, bias: Any, config: Config, workspace: Any = None) -> Any:
    """Y [1, N] from tensors x [1, K], w [N, K], bias [N] or None. See `gemmtuned.kernels.triton.python_launch`."""
    from gemmtuned.kernels.triton.python_launch import launch

    return launch(KERNEL, launch_record, x, w, bias, config, workspace)
