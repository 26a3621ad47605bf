"""M <= 32: W goes from memory straight into the registers that the matrix instruction reads.

Y[M, N] = X[M, K] @ W[N, K].T + bias.  In mma.m16n8k16 a lane holds values of row lane / 4, at places of K that
depend on lane % 4.  Which k stands at which place is free as long as it is the same for W and X.  So a lane
loads 16 bytes of its row, eight k side by side, and these are its share of two instructions: nothing goes through
shared memory, no thread waits for another before the final sum, and a program needs no more than eight rows.
Each warp takes its own share of K; `split` > 1 cuts K over programs too (split_k.py).

The lay-out is asked for by the order of the axes alone: Triton gives lanes to the first axes of a load, [4, 8, ..],
and what reshape and permute make of it is the operand's own.  Where Triton sees it otherwise, the result is the same
and shared memory comes back.  PTX ISA 9.0, 9.7.14.5.8: fragments of mma.m16n8k16.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.triton.launch import Axis, Config, LaunchRecord, check_config, make_record
from gemmtuned.kernels.triton.space import largest, splits
from gemmtuned.kernels.triton.split_k import arrived_last, reset

NAME: Final = "direct"
KEYS: Final = ("rows", "tokens", "block_k", "split", "warps")
MAX_M: Final = 32
_BANDWIDTH: Final = 4.69e6  # bytes a us
_LATENCY_US: Final = 0.8  # bytes in flight over this is the rate
_UNIT_CACHE: Final = 60e3  # bytes a us to a unit from L2


@triton.jit
def direct(
    x,
    w,
    bias,
    y,
    partials,
    counters,
    m,
    ldx,
    ldw,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    WARPS: tl.constexpr,
):
    STEP_K: tl.constexpr = WARPS * BLOCK_K
    STEPS: tl.constexpr = (K + 2 * STEP_K * SPLIT - 1) // (2 * STEP_K * SPLIT) * 2
    CHUNKS: tl.constexpr = BLOCK_K // 32
    GROUPS: tl.constexpr = (BLOCK_N + 7) // 8  # of eight rows of W
    SIDES: tl.constexpr = BLOCK_M // 8  # of eight rows of X
    element: tl.constexpr = x.dtype.element_ty
    tile = tl.program_id(0)
    part = tl.program_id(1)
    lane = tl.arange(0, 8)
    # [lane % 4, lane / 4, warp, group of rows, chunk of K, pair of values]: two values of 16 bits are one int32
    ks = (tl.arange(0, WARPS) * (BLOCK_K // 2))[None, None, :, None, None, None]
    ks += (tl.arange(0, CHUNKS) * 16)[None, None, None, None, :, None]
    ks += (tl.arange(0, 4) * 4)[:, None, None, None, None, None]
    ks += tl.arange(0, 4)[None, None, None, None, None, :]
    ks += part * (STEPS * STEP_K // 2)
    rows = tile * BLOCK_N + tl.arange(0, GROUPS)[None, :] * 8 + (lane % BLOCK_N)[:, None]
    # rows past the end read the last row again: no mask but for K, and their sums are never stored
    read = tl.minimum(rows, N - 1) if N % BLOCK_N != 0 else rows
    w_at = w.to(tl.pointer_type(tl.int32)) + (read.to(tl.int64)[None, :, None, :, None, None] * (ldw // 2) + ks)
    tokens = tl.arange(0, SIDES)[None, :] * 8 + lane[:, None]
    x_at = x.to(tl.pointer_type(tl.int32)) + (tokens.to(tl.int64)[None, :, None, :, None, None] * (ldx // 2) + ks)
    real = (tokens < m)[None, :, None, :, None, None]
    # two halves of a step, each with sums of its own: an instruction waits for the one before that adds to the same
    even = tl.zeros((WARPS, 16 if BLOCK_M < 16 else BLOCK_M, GROUPS * 8), tl.float32)
    odd = even
    w0, x0 = _load(w_at, x_at, real, ks, 0, K, STEP_K, STEPS, SPLIT)
    w1, x1 = _load(w_at, x_at, real, ks, 1, K, STEP_K, STEPS, SPLIT)
    # m is at least 1: did the compiler know how often, it would unroll, and put each load right in front of its use
    for step in range(2, tl.minimum(STEPS, m * STEPS), 2):
        even = tl.dot(
            _x_operand(x0, element, WARPS, SIDES, CHUNKS), _w_operand(w0, element, WARPS, GROUPS, CHUNKS, SIDES), even
        )
        w0, x0 = _load(w_at, x_at, real, ks, step, K, STEP_K, STEPS, SPLIT)
        odd = tl.dot(
            _x_operand(x1, element, WARPS, SIDES, CHUNKS), _w_operand(w1, element, WARPS, GROUPS, CHUNKS, SIDES), odd
        )
        w1, x1 = _load(w_at, x_at, real, ks, step + 1, K, STEP_K, STEPS, SPLIT)
    even = tl.dot(
        _x_operand(x0, element, WARPS, SIDES, CHUNKS), _w_operand(w0, element, WARPS, GROUPS, CHUNKS, SIDES), even
    )
    odd = tl.dot(
        _x_operand(x1, element, WARPS, SIDES, CHUNKS), _w_operand(w1, element, WARPS, GROUPS, CHUNKS, SIDES), odd
    )
    total = tl.sum(even + odd, 0)
    token = tl.arange(0, 16 if BLOCK_M < 16 else BLOCK_M)[:, None]
    column = tl.arange(0, GROUPS * 8)[None, :]
    row = tile * BLOCK_N + column
    inside = (token < m) & (column < BLOCK_N) & (row < N)
    if SPLIT > 1:
        TILE: tl.constexpr = (16 if BLOCK_M < 16 else BLOCK_M) * GROUPS * 8
        sums = partials + tile.to(tl.int64) * (SPLIT * TILE) + token * (GROUPS * 8) + column
        tl.store(sums + part * TILE, total, mask=inside)
        last = arrived_last(counters, tile, SPLIT)
        if last:
            total = tl.zeros_like(total)
            for i in tl.static_range(SPLIT):
                total += tl.load(sums + i * TILE, mask=inside, other=0.0, cache_modifier=".cg")
            reset(counters, tile)
            if bias is not None:
                total += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
            tl.store(y + token * N + row, total.to(y.dtype.element_ty), mask=inside)
    else:
        if bias is not None:
            total += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
        tl.store(y + token * N + row, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _load(w_at, x_at, real, ks, step, K: tl.constexpr, STEP_K: tl.constexpr, STEPS: tl.constexpr, SPLIT: tl.constexpr):
    """W and X of one step; zeros past the end on both sides: 0 * NaN of the other side's padding would be NaN."""
    at = step * (STEP_K // 2)
    if K == STEPS * STEP_K * SPLIT:
        wt = tl.load(w_at + at, eviction_policy="evict_first")
        xt = tl.load(x_at + at, mask=real, other=0)
    else:
        some = ks + at < K // 2
        wt = tl.load(w_at + at, mask=some, other=0, eviction_policy="evict_first")
        xt = tl.load(x_at + at, mask=real & some, other=0)
    return wt, xt


@triton.jit
def _halves(pairs, element: tl.constexpr):
    """[.., 2] of int32: the two values in each."""
    low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    return tl.join(low.to(element, bitcast=True), high.to(element, bitcast=True))


@triton.jit
def _w_operand(
    wt, element: tl.constexpr, WARPS: tl.constexpr, GROUPS: tl.constexpr, CHUNKS: tl.constexpr, SIDES: tl.constexpr
):
    """[4, 8, warps, groups, chunks, 4] as [warps, K, rows]; a lane's eight k go to two instructions."""
    pairs = tl.reshape(_halves(wt, element), (4, 8, WARPS, GROUPS, CHUNKS, 2, 4))
    return tl.reshape(tl.permute(pairs, (2, 4, 5, 0, 6, 3, 1)), (WARPS, CHUNKS * 32, GROUPS * 8))


@triton.jit
def _x_operand(xt, element: tl.constexpr, WARPS: tl.constexpr, SIDES: tl.constexpr, CHUNKS: tl.constexpr):
    """[4, 8, warps, sides, chunks, 4] as [warps, rows, K], at least sixteen rows: the others are zeros."""
    if SIDES == 1:
        two = tl.permute(tl.join(xt, tl.zeros_like(xt)), (0, 1, 2, 3, 6, 4, 5))
        xt = tl.reshape(two, (4, 8, WARPS, 2, CHUNKS, 4))
    SIDES_: tl.constexpr = 2 if SIDES == 1 else SIDES
    pairs = tl.reshape(_halves(xt, element), (4, 8, WARPS, SIDES_, CHUNKS, 2, 4))
    return tl.reshape(tl.permute(pairs, (2, 3, 1, 4, 5, 0, 6)), (WARPS, SIDES_ * 8, CHUNKS * 32))


KERNEL: Final = direct


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    check_config(config, KEYS, NAME)
    if problem.m > min(MAX_M, config["tokens"]):
        raise CandidateFailed(f"{problem} {NAME}: holds {config['tokens']} rows of X (at most {MAX_M})")
    if problem.k % 2:
        raise CandidateFailed(f"{problem} {NAME}: reads two values at a time, K is odd")
    return make_record(
        NAME,
        problem,
        grid=(Axis("n", config["rows"]), Axis("", config["split"]), Axis("", 1)),
        num_warps=config["warps"],
        num_stages=1,
        constants={
            "BLOCK_N": config["rows"],
            "BLOCK_M": config["tokens"],
            "BLOCK_K": config["block_k"],
            "WARPS": config["warps"],
        },
        split=config["split"],
        tile_values=max(config["rows"], 8) * max(config["tokens"], 16),
    )


def scored(m: int, n: int, k: int, units: int, *, arch: str = "sm_90") -> list[tuple[float, dict[str, int]]]:
    """(estimated us, config) of the candidates for a device with this many units, the fastest first."""
    if m > MAX_M or k % 8:
        return []
    tokens = max(8, 1 << (m - 1).bit_length())
    found = []
    for rows in (2, 4, 8, 16, 32):
        tiles = -(-n // rows)
        if (rows < 8 and tiles > 4 * units) or (rows > 8 and tiles < units // 4):
            continue
        for block_k in (32, 64, 128, 256):
            for warps in (1, 2, 4, 8):
                registers = _registers(rows, tokens, block_k)
                if registers > 240 or warps * block_k * 2 > k:
                    continue
                for split in splits(tiles, k, 2 * block_k * warps, units):
                    steps = -(-k // (2 * block_k * warps * split))
                    config = {"rows": rows, "tokens": tokens, "block_k": block_k, "split": split, "warps": warps}
                    found.append((_estimate_us(m, n, k, units, config, steps, registers), config))
    found.sort(key=lambda item: item[0])
    return found


def _registers(rows: int, tokens: int, block_k: int) -> int:
    """Of a thread, about: two halves of W and X, and two sums."""
    groups, sides = max(rows, 8) // 8, tokens // 8
    return 32 + block_k // 32 * 8 * (groups + sides) + 4 * groups * max(sides, 2)


def _estimate_us(m: int, n: int, k: int, units: int, config: dict[str, int], steps: int, registers: int) -> float:
    """The slowest of memory, a unit's loads in flight, and what comes to it from L2, plus start and reduction."""
    rows, warps, split = config["rows"], config["warps"], config["split"]
    busiest = -(-(-(-n // rows) * split) // units)
    here = min(busiest, 64 // warps, max(1, 2048 // (warps * registers)))
    each = steps * 2 * config["block_k"] * warps * 2  # bytes of one row in a program
    memory = n * each * split / _BANDWIDTH
    in_flight = here * rows * warps * 2 * config["block_k"] * 2
    loads = busiest * rows * each / min(1.3 * _BANDWIDTH / units, in_flight / _LATENCY_US)
    cache = busiest * (rows + m) * each / _UNIT_CACHE
    return 2.1 + largest(memory, loads, cache) + 0.02 * warps + (0.7 if split > 1 else 0.0)


def run(x: Any, w: Any, bias: Any, config: Config, workspace: Any = None) -> Any:
    """Y [M, N] from tensors x [M, K], w [N, K], bias [N] or None. See `gemmtuned.kernels.triton.python_launch`."""
    from gemmtuned.kernels.triton.python_launch import launch

    return launch(KERNEL, launch_record, x, w, bias, config, workspace)
