"""W of 8 or 4 bits by many rows of X of 16: W is decoded in registers and multiplied there, tile by tile.

Y[M, N] = X[M, K] @ (W[N, K] * scale_w).T + bias, for which torch makes all of W anew in X's type at every call.  Rows
of W lie on the long side of the matrix instruction, tokens on the short one, and K is cut over thread blocks where
there are too few tiles (split_k.py).  A tile of decoded values has K in another order than memory (coded_weights.py),
so a tile of X is brought into that order on its way.

Scales of a tensor or a row multiply the fp32 sums at the end, those of 128x128 the sums of each block of K, those of
groups the decoded values, which are then rounded to X's type, as torch rounds them.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device
from gemmtuned.configs.tunable import PACKED, WEIGHT_ONLY_ROWS
from gemmtuned.kernels import weight_only_operands as operands
from gemmtuned.kernels.arch import at_least_sm, shared_limit
from gemmtuned.kernels.estimates import fits
from gemmtuned.kernels.own_kernel import COUNTERS_BYTES, PARAMETERS, Config, Parameter, Scored
from gemmtuned.kernels.triton.coded_weights import (
    in_order_of_4_bit,
    in_order_of_fp8,
    of_fp8,
    row_order,
    tile_of_fp8,
    values_of_4_bit,
)  # fmt: skip
from gemmtuned.kernels.triton.kernel import TritonKernel, is_interpreted
from gemmtuned.kernels.triton.launch import MAX_GRID_YZ, Axis, LaunchRecord
from gemmtuned.kernels.triton.split_k import add_slices_and_store
from gemmtuned.kernels.triton.to_shared import splits


@dataclass(frozen=True, slots=True)
class Costs:
    """What the estimate adds up, in microseconds.

    start_us: a launch.  read_mb_us, sums_mb_us: a MB of W, and of the sums of slices of K.  The others are for 128
    values of K on the busiest multiprocessor.  decode_us: to decode 128 rows of W.  multiply_us: to multiply 128 rows
    by 64 tokens.  wait_us: to wait for loads, which the thread blocks that it holds at a time do together.
    """

    start_us: float
    read_mb_us: float
    sums_mb_us: float
    decode_us: float
    multiply_us: float
    wait_us: float


FITS: Final = fits(__file__, Costs)
NAME: Final = "weight_only_tiles"
LEAST_M: Final = 9  # for fewer rows weight_only.cu is
_ALIGNED: Final = 16  # bytes of a row of W that a thread loads at once, and values of X
# Rows of W, tokens, warps of a tile, and the last one for int8 alone: others have no registers for it
_SHAPES: Final = (
    (64, 16, 4), (128, 16, 4), (64, 32, 4), (128, 32, 4), (64, 64, 4), (128, 64, 4), (128, 64, 8), (256, 64, 8),
    (128, 128, 8), (256, 128, 8), (256, 128, 16),
)  # fmt: skip
_MOST_SUMS: Final = 64  # per thread where it has a second set, for the block of K under way
_MOST_SCALES: Final = (1 << 31) - 1
_MORE_STAGES: Final = 1.02  # what was timed had three; four are tried behind these
_REGISTERS: Final = 200  # per thread, roughly
_WORDS: Final = {**PARAMETERS, "scale": "scale_w.ptr"}


@triton.jit
def weight_only_tiles(
    x, w, scale, bias, y, partials, counters, m, ldx, ldw, N: tl.constexpr, K: tl.constexpr, WEIGHT: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    EVEN_K: tl.constexpr = K == STEPS * BLOCK_K * SPLIT
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    part = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    # past the end the last row is read again: no mask but for K, and those sums are never stored
    x_rows = x + tl.minimum(tokens, m - 1).to(tl.int64) * ldx
    decoded = tl.minimum(tl.program_id(0) * BLOCK_N + row_order(BLOCK_N, WARPS), N - 1)
    w_rows = w + decoded.to(tl.int64) * ldw
    if WEIGHT == 1:
        w_rows = w_rows.to(tl.pointer_type(tl.uint8), bitcast=True)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(0, STEPS):
        begin = (part * STEPS + step) * BLOCK_K
        acc = _add_step(acc, x_rows, w_rows, scale, decoded, rows, begin, N, K, WEIGHT, SCALES, GROUP,
                        BLOCK_N, BLOCK_M, BLOCK_K, WARPS, EVEN_K, ASM)  # fmt: skip
    if SCALES == 0:
        acc *= tl.load(scale)
    elif SCALES == 1:
        acc *= tl.load(scale + tl.minimum(rows, N - 1))[:, None]
    here = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    rows = rows[:, None]
    tokens = tokens[None, :]
    tile = tl.program_id(2) * TILES_N + tl.program_id(0)
    add_slices_and_store(
        acc, partials, counters, tile, part, tile.to(tl.int64) * (SPLIT * BLOCK_N * BLOCK_M) + here, bias, y,
        tokens.to(tl.int64) * N + rows, rows, rows < N, (rows < N) & (tokens < m), BLOCK_N * BLOCK_M, SPLIT,
    )  # fmt: skip


@triton.jit
def _add_step(
    acc, x_rows, w_rows, scale, decoded, rows, begin, N: tl.constexpr, K: tl.constexpr, WEIGHT: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr, EVEN_K: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc and BLOCK_K of K from `begin` on. decoded: rows of W in the order of the tile of bytes, rows: of the sums."""
    to: tl.constexpr = x_rows.dtype.element_ty
    kind: tl.constexpr = scale.dtype.element_ty
    across: tl.constexpr = (K + 127) // 128  # blocks of scales
    PIECE: tl.constexpr = 64 if WEIGHT < 2 else 128  # values of K in 64 bytes of a row
    for piece in tl.static_range(BLOCK_K // PIECE):
        first = begin + piece * PIECE
        k = first + tl.arange(0, PIECE)
        byte = first * 64 // PIECE + tl.arange(0, 64)
        xp = x_rows[:, None] + k[None, :]
        wp = w_rows[:, None] + byte[None, :]
        if EVEN_K:
            xt = tl.load(xp)
            wt = tl.load(wp)
        else:
            xt = tl.load(xp, mask=(k < K)[None, :], other=0.0)
            wt = tl.load(wp, mask=(byte < K * 64 // PIECE)[None, :], other=0)
        if WEIGHT < 2:
            xt = in_order_of_fp8(xt, BLOCK_M).trans()
            values = (wt if WEIGHT == 0 else of_fp8(wt, ASM)).to(to)
            values = tile_of_fp8(values, BLOCK_N, WARPS)
        else:
            xt = in_order_of_4_bit(xt, BLOCK_M).trans()
            group = first // GROUP + tl.arange(0, PIECE // GROUP)
            sp = scale + decoded[:, None] * (K // GROUP) + group[None, :]
            s = tl.load(sp) if EVEN_K else tl.load(sp, mask=(group < K // GROUP)[None, :], other=0)
            values = values_of_4_bit(wt, s, to, WEIGHT == 3, kind, BLOCK_N, PIECE // GROUP, WARPS, ASM)
        if SCALES != 2:
            acc = tl.dot(values, xt, acc)
        elif piece % 2 == 0:
            part = tl.dot(values, xt)
        else:
            part = tl.dot(values, xt, part)
            block = first // 128
            there = (rows < N) & (block < across)  # behind K the next scale is of other rows
            acc += part * tl.load(scale + rows // 128 * across + block, mask=there, other=0.0)[:, None]
    return acc


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    config = KERNEL.checked(config)
    p = problem
    operands.check(p, NAME, WEIGHT_ONLY_ROWS)
    rows, tokens, block_k, split, warps = (config[n] for n in ("rows", "tokens", "block_k", "split", "warps"))
    if rows % (16 * warps) or block_k % 128:
        raise CandidateFailed(f"{p} {NAME}: {dict(config)} has warps without rows, or a step of K with part of a block")
    tiles_n, tiles_m = -(-p.n // rows), -(-p.m // tokens)
    if max(tiles_m, split) > MAX_GRID_YZ or (split > 1 and 4 * tiles_n * tiles_m > COUNTERS_BYTES):
        raise CandidateFailed(f"{p} {NAME}: {tiles_n * tiles_m} tiles in {split} slices are too many")
    if p.n * p.k // (operands.group_of(p) or p.k) > _MOST_SCALES:
        raise CandidateFailed(f"{p} {NAME}: it counts scales in 31 bits")
    absent = {*(() if p.bias else ("bias",)), *(() if split > 1 else ("partials", "counters"))}
    offset = COUNTERS_BYTES if split > 1 else 0
    arguments = tuple(
        name
        for name in ("x", "w", "scale", "bias", "y", "partials", "counters", "m", "ldx", "ldw")
        if name not in absent
    )
    return LaunchRecord(
        kernel=KERNEL.name,
        dtype=p.dtype,
        grid=(Axis("n", rows), Axis("", split), Axis("m", tokens)),
        num_warps=warps,
        num_stages=config["stages"],
        constants={
            "N": p.n,
            "K": p.k,
            "WEIGHT": operands.WEIGHTS[p.wdtype],
            "SCALES": operands.SCALES[p.wscale],
            "GROUP": operands.group_of(p) or 32,
            "BLOCK_N": rows,
            "BLOCK_M": tokens,
            "BLOCK_K": block_k,
            "SPLIT": split,
            "WARPS": warps,
            "ASM": int(not is_interpreted(weight_only_tiles)),
        },
        arguments=arguments,
        types={
            "w": "u8" if p.wdtype in PACKED else p.wdtype,
            "scale": "u8" if p.wscale_dtype == "e8m0" else p.wscale_dtype,
        },
        words=_WORDS,
        conditions=operands.conditions(p, p.m, _ALIGNED),
        ld_multiple=_ALIGNED,
        max_m=p.m,
        counters_bytes=4 * tiles_n * tiles_m if split > 1 else 0,
        partials_offset=offset,
        workspace_bytes=offset + 4 * split * rows * tokens * tiles_n * tiles_m if split > 1 else 0,
    )


def scored(problem: Problem, device: Device) -> Scored:
    """(estimated us, config) of what is worth trying, the fastest first."""
    try:
        operands.check(problem, NAME, WEIGHT_ONLY_ROWS)
    except CandidateFailed:
        return []
    if problem.m < LEAST_M or (problem.wdtype == "fp8_e4m3" and not at_least_sm(device.arch, 89)):
        return []  # e4m3 in hardware begins with sm_89
    return sorted(_estimated(problem, device), key=lambda one: one[0])


def _estimated(problem: Problem, device: Device) -> Iterator[tuple[float, dict[str, int]]]:
    p = problem
    for rows, tokens, warps in _SHAPES if p.wdtype == "i8" else _SHAPES[:-1]:
        if p.wscale == "128x128" and rows * tokens > 32 * warps * _MOST_SUMS:
            continue
        tiles = -(-p.n // rows) * -(-p.m // tokens)
        if tokens >= 2 * max(p.m, 16):
            continue
        for block_k in (128, 256) if p.wdtype in PACKED else (128,):
            for split in splits(tiles, p.k, block_k, device.units):
                if split > 1 and 4 * tiles > COUNTERS_BYTES:
                    continue
                for stages in (3, 4):
                    config = {"rows": rows, "tokens": tokens, "block_k": block_k, "split": split}
                    config |= {"warps": warps, "stages": stages}
                    if _shared_bytes(p, config) <= shared_limit(device.arch):
                        yield estimate_us(p, device, config), config


def _shared_bytes(problem: Problem, config: Config) -> int:
    of_w = config["rows"] // (2 if problem.wdtype in PACKED else 1)
    return config["stages"] * config["block_k"] * (of_w + 2 * config["tokens"])


def estimate_us(problem: Problem, device: Device, config: Config) -> float:
    """An estimate in microseconds for an H200 with cold weights, made to order configurations."""
    p, costs = problem, FITS["all"]
    rows, tokens, block_k, split, warps = (config[n] for n in ("rows", "tokens", "block_k", "split", "warps"))
    tiles = -(-p.n // rows) * -(-p.m // tokens)
    busiest = -(-tiles * split // device.units)
    by_memory = shared_limit(device.arch) // (_shared_bytes(p, config) + 1024)
    here = max(1, min(busiest, by_memory, 65536 // (32 * warps * _REGISTERS), 4))
    steps = busiest * -(-p.k // (block_k * split)) * block_k / 128
    us = steps * (costs.decode_us * rows / 128 + costs.multiply_us * rows * tokens / 8192 + costs.wait_us / here)
    us += costs.sums_mb_us * (split * rows * tokens * tiles * 4 / 1e6 if split > 1 else 0.0)
    us += costs.start_us + costs.read_mb_us * p.n * p.k / (2 if p.wdtype in PACKED else 1) / 1e6
    return us * (_MORE_STAGES if config["stages"] > 3 else 1.0)


KERNEL: Final = TritonKernel(
    name="weight_only_tiles",
    function=weight_only_tiles,
    families=("weight_only",),
    archs=("sm_80+",),
    parameters=(
        Parameter("rows", 32, 256, power=True),
        Parameter("tokens", 16, 256, power=True),
        Parameter("block_k", 128, 256, power=True),
        Parameter("split"),
        Parameter("warps", most=16, power=True),
        Parameter("stages", 1, 8),
    ),
    scored=scored,
    record=launch_record,
)
