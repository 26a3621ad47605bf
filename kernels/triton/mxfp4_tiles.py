"""MXFP4 by MXFP4: codes go to the instruction that multiplies them, or are decoded in registers where there is none.

Y[M, N] = (X[M, K] * scale_x) @ (W[N, K] * scale_w).T + bias.  X and W hold two e2m1 a byte, and each 32 of K of a row
have a power of two as their scale.  Rows of W lie on the long side of the instruction, tokens on the short one, and K
is cut over thread blocks where there are too few tiles (split_k.py).

Codes and scales as they lie (`decoded` 0): Triton makes `tcgen05.mma kind::mxf4` of it on sm_100 where a tile has 128
rows, `mma.sync kind::mxf4nvf4` on sm_120, and `v_mfma_scale_f32` on gfx950.  No such GPU has run it yet.

Elsewhere both become numbers of Y's 16 bits on their way to the tensor core, W as in weight_only_tiles.py, X by way of
shared memory.  That is one launch instead of those that turn X into numbers before, which take longer than the product
of few rows.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import triton
import triton.language as tl

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import Condition
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device
from gemmtuned.configs.tunable import WEIGHT_ONLY_ROWS, is_mxfp4
from gemmtuned.kernels.arch import at_least_sm, shared_limit
from gemmtuned.kernels.own_kernel import COUNTERS_BYTES, PARAMETERS, Config, Parameter, Scored, rows_apart
from gemmtuned.kernels.triton.coded_weights import in_order_of_4_bit, of_e2m1, of_e8m0, row_order, values_of_4_bit
from gemmtuned.kernels.triton.kernel import TritonKernel, is_interpreted
from gemmtuned.kernels.triton.launch import MAX_GRID_YZ, Axis, LaunchRecord
from gemmtuned.kernels.triton.split_k import add_slices_and_store
from gemmtuned.kernels.triton.to_shared import splits
from gemmtuned.kernels.triton.weight_only_tiles import FITS

NAME: Final = "mxfp4_tiles"
_GROUP: Final = 32  # values of K with one scale
_ALIGNED: Final = 16  # bytes of a row of X and of W that a thread loads at once
# Rows of W, tokens, warps of a tile
_AS_THEY_LIE: Final = (
    (128, 16, 4), (128, 32, 4), (128, 64, 4), (128, 64, 8), (128, 128, 4), (128, 128, 8), (128, 256, 8),
)  # fmt: skip
_DECODED: Final = (
    (64, 16, 4), (128, 16, 4), (64, 32, 4), (128, 32, 4), (64, 64, 4), (128, 64, 4), (128, 64, 8), (256, 64, 8),
    (128, 128, 8), (256, 128, 8),
)  # fmt: skip
_AT_FIRST: Final = {(128, 3): 1.0, (256, 3): 1.02, (128, 4): 1.03, (256, 4): 1.05}  # so that others of its shape follow
_WORDS: Final = {**PARAMETERS, "scale_x": "scale_x.ptr", "scale_w": "scale_w.ptr"}
_STEP_US: Final = 0.1  # a guess: of 128 of K and 8192 sums on the busiest unit, where codes go to the tensor core


@triton.jit
def mxfp4_tiles(
    x, w, scale_x, scale_w, bias, y, partials, counters, m, ldx, ldw, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, DECODED: tl.constexpr,
    WARPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    EVEN_K: tl.constexpr = K == STEPS * BLOCK_K * SPLIT
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    PIECE: tl.constexpr = 128 if DECODED else BLOCK_K  # values of K that are multiplied at once
    part = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    read = tl.program_id(0) * BLOCK_N + row_order(BLOCK_N, WARPS) if DECODED else rows
    # past the end the last row is read again: no mask but for K, and those sums are never stored
    row = tl.minimum(read, N - 1).to(tl.int64)
    token = tl.minimum(tokens, m - 1).to(tl.int64)
    to: tl.constexpr = y.dtype.element_ty
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(0, STEPS):
        for piece in tl.static_range(BLOCK_K // PIECE):
            first = (part * STEPS + step) * BLOCK_K + piece * PIECE
            wt, ws = _piece(w + row * ldw, scale_w + row * (K // 32), first, K, PIECE, EVEN_K)
            xt, xs = _piece(x + token * ldx, scale_x + token * (K // 32), first, K, PIECE, EVEN_K)
            if DECODED:
                values = values_of_4_bit(wt, ws, to, True, tl.uint8, BLOCK_N, 4, WARPS, ASM)
                acc = tl.dot(values, _tokens_of(xt, xs, to, BLOCK_M, ASM).trans(), acc)
            else:
                acc = tl.dot_scaled(wt, ws, "e2m1", xt.trans(), xs, "e2m1", acc)
    here = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    rows = rows[:, None]
    tokens = tokens[None, :]
    tile = tl.program_id(2) * TILES_N + tl.program_id(0)
    add_slices_and_store(
        acc, partials, counters, tile, part, tile.to(tl.int64) * (SPLIT * BLOCK_N * BLOCK_M) + here, bias, y,
        tokens.to(tl.int64) * N + rows, rows, rows < N, (rows < N) & (tokens < m), BLOCK_N * BLOCK_M, SPLIT,
    )  # fmt: skip


@triton.jit
def _piece(rows, scales, first, K: tl.constexpr, PIECE: tl.constexpr, EVEN_K: tl.constexpr):
    """(codes, scales) of PIECE values of K of these rows; behind K codes are 0."""
    byte = first // 2 + tl.arange(0, PIECE // 2)
    group = first // 32 + tl.arange(0, PIECE // 32)
    codes = rows[:, None] + byte[None, :]
    powers = scales[:, None] + group[None, :]
    if EVEN_K:
        return tl.load(codes), tl.load(powers)
    else:
        there = tl.load(codes, mask=(byte < K // 2)[None, :], other=0)
        return there, tl.load(powers, mask=(group < K // 32)[None, :], other=0)


@triton.jit
def _tokens_of(x, s, to: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr):
    """[ROWS, 128] of X's numbers in `to`, their values of K in the order of a decoded W's."""
    exact: tl.constexpr = to if to == tl.bfloat16 else tl.float32  # holds every power of two
    s = of_e8m0(s).to(exact)[:, :, None]
    low, high = of_e2m1(x, to, ASM)
    low = (low.to(exact).reshape(ROWS, 4, 16) * s).to(to).reshape(ROWS, 64)
    high = (high.to(exact).reshape(ROWS, 4, 16) * s).to(to).reshape(ROWS, 64)
    return in_order_of_4_bit(tl.join(low, high).reshape(ROWS, 128), ROWS)


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    config = KERNEL.checked(config)
    p = problem
    if not is_mxfp4(p):
        raise CandidateFailed(f"{p}: kernel {NAME} runs plain products of fp4_e2m1 by fp4_e2m1, with scales in rows")
    rows, tokens, block_k, split, warps = (config[n] for n in ("rows", "tokens", "block_k", "split", "warps"))
    if config["decoded"] and (rows % (16 * warps) or p.m > WEIGHT_ONLY_ROWS):
        raise CandidateFailed(f"{p} {NAME}: decoded it runs up to {WEIGHT_ONLY_ROWS} rows of X, each warp 16 rows of W")
    tiles_n, tiles_m = -(-p.n // rows), -(-p.m // tokens)
    if max(tiles_m, split) > MAX_GRID_YZ or (split > 1 and 4 * tiles_n * tiles_m > COUNTERS_BYTES):
        raise CandidateFailed(f"{p} {NAME}: {tiles_n * tiles_m} tiles in {split} slices are too many")
    absent = {*(() if p.bias else ("bias",)), *(() if split > 1 else ("partials", "counters"))}
    offset = COUNTERS_BYTES if split > 1 else 0
    names = ("x", "w", "scale_x", "scale_w", "bias", "y", "partials", "counters", "m", "ldx", "ldw")
    return LaunchRecord(
        kernel=KERNEL.name,
        dtype=p.out_dtype,
        grid=(Axis("n", rows), Axis("", split), Axis("m", tokens)),
        num_warps=warps,
        num_stages=config["stages"],
        constants={
            "N": p.n,
            "K": p.k,
            "BLOCK_N": rows,
            "BLOCK_M": tokens,
            "BLOCK_K": block_k,
            "SPLIT": split,
            "DECODED": config["decoded"],
            "WARPS": warps,
            "ASM": int(not is_interpreted(mxfp4_tiles)),
        },
        arguments=tuple(name for name in names if name not in absent),
        types=dict.fromkeys(("x", "w", "scale_x", "scale_w"), "u8"),
        words=_WORDS,
        conditions=_conditions(p),
        ld_multiple=_ALIGNED,
        max_m=p.m,
        counters_bytes=4 * tiles_n * tiles_m if split > 1 else 0,
        partials_offset=offset,
        workspace_bytes=offset + 4 * split * rows * tokens * tiles_n * tiles_m if split > 1 else 0,
    )


def _conditions(problem: Problem) -> tuple[Condition, ...]:
    """Rows of X, this many at most, and of W of whole pieces of 16 bytes, and all their scales side by side."""
    p = problem
    found = [
        *rows_apart(("x", "w", *(("bias",) if p.bias else ())), _ALIGNED, p.m),
        Condition("x.size1", "==", p.k // 2), Condition("w.size1", "==", p.k // 2), Condition("w.size0", "==", p.n),
        Condition("scale_x.size0", "==", "x.size0"), Condition("scale_w.size0", "==", p.n),
    ]  # fmt: skip
    for name in ("scale_x", "scale_w"):
        found += [Condition(f"{name}.size1", "==", p.k // _GROUP), Condition(f"{name}.contiguous", "==", 1)]
    return (*found, *(Condition(f"{name}.ptr", "%", _ALIGNED) for name in ("scale_x", "scale_w")))


def scored(problem: Problem, device: Device) -> Scored:
    """(estimated us, config) of what is worth trying, the fastest first."""
    if not is_mxfp4(problem):
        return []
    multiplies_it = at_least_sm(device.arch, 100) or device.arch == "gfx950"
    if not multiplies_it and problem.m > WEIGHT_ONLY_ROWS:
        return []
    return sorted(_estimated(problem, device, decoded=not multiplies_it), key=lambda one: one[0])


def _estimated(problem: Problem, device: Device, *, decoded: bool) -> Iterator[tuple[float, dict[str, int]]]:
    p = problem
    for rows, tokens, warps in _DECODED if decoded else _AS_THEY_LIE:
        tiles = -(-p.n // rows) * -(-p.m // tokens)
        if tokens >= 2 * max(p.m, 16):
            continue
        for block_k in (128, 256):
            for split in splits(tiles, p.k, block_k, device.units):
                if split > 1 and 4 * tiles > COUNTERS_BYTES:
                    continue
                for stages in (3, 4):
                    config = {"rows": rows, "tokens": tokens, "block_k": block_k, "split": split}
                    if _shared_bytes(config, stages, decoded=decoded) > shared_limit(device.arch):
                        continue
                    us = estimate_us(p, device, config, decoded=decoded) * _AT_FIRST[block_k, stages]
                    yield us, config | {"decoded": int(decoded), "warps": warps, "stages": stages}


def _shared_bytes(config: Config, stages: int, *, decoded: bool) -> int:
    numbers = 2 * config["tokens"] * 128 if decoded else 0  # X as the tensor core reads it
    return stages * config["block_k"] // 2 * (config["rows"] + config["tokens"]) + numbers


def estimate_us(problem: Problem, device: Device, config: Config, *, decoded: bool) -> float:
    """An estimate in microseconds by the times of weight_only_tiles.py, cold on an H200; other forms are guesses."""
    p = problem
    rows, tokens, block_k, split = (config[n] for n in ("rows", "tokens", "block_k", "split"))
    tiles = -(-p.n // rows) * -(-p.m // tokens)
    steps = -(-tiles * split // device.units) * -(-p.k // (block_k * split)) * block_k / 128
    costs = FITS["all"]
    if decoded:
        each = costs.multiply_us * rows * tokens / 8192 + costs.decode_us * (rows + tokens) / 128
    else:
        each = _STEP_US * (1 + rows * tokens / 8192)
    sums = split * rows * tokens * tiles * 4 / 1e6 if split > 1 else 0.0
    return costs.start_us + costs.read_mb_us * p.n * p.k / 2e6 + costs.sums_mb_us * sums + steps * each


KERNEL: Final = TritonKernel(
    name="mxfp4_tiles",
    function=mxfp4_tiles,
    families=("scaled",),
    archs=("sm_80+", "gfx950"),
    parameters=(
        Parameter("rows", 32, 256, power=True),
        Parameter("tokens", 16, 256, power=True),
        Parameter("block_k", 128, 256, power=True),
        Parameter("split"),
        Parameter("decoded", 0, 1),
        Parameter("warps", most=16, power=True),
        Parameter("stages", 1, 8),
    ),
    scored=scored,
    record=launch_record,
)
