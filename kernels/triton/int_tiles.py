"""int8 into int32, M up to 64: one tile holds all rows of X, and K is cut over thread blocks to fill the device.

Y[M, N] = X[M, K] @ W[N, K].T, exact: integers are added up in whatever order, so that slices of K may meet anywhere.
torch._int_mm takes M from 17 on and gives cuBLASLt no workspace for sums of slices of K, without which few rows of W
leave most of a device idle.  `swap` puts rows of W on the long side of the matrix instruction, as in tiles.py; the last
thread block of a tile adds up (split_k.py).

The tensor core's sums may stop at the largest number where torch's wrap: from K = 131072 on, which is refused.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device
from gemmtuned.configs.tunable import is_int_product
from gemmtuned.kernels.arch import shared_limit
from gemmtuned.kernels.own_kernel import COUNTERS_BYTES, PARAMETERS, Config, Parameter, Scored
from gemmtuned.kernels.triton.kernel import TritonKernel
from gemmtuned.kernels.triton.launch import Axis, LaunchRecord
from gemmtuned.kernels.triton.split_k import add_slices_and_store
from gemmtuned.kernels.triton.tiles import FITS
from gemmtuned.kernels.triton.to_shared import Tile, estimate_us, ring_stages, splits

MAX_M: Final = 64
_TOO_LONG: Final = 1 << 17  # values of K: 128 * 128 * K does not fit 32 bits
_WIDEST: Final = 16  # bytes a load
_BLOCKS_K: Final = (128, 256)
_RING_BYTES: Final = (24 << 10, 36 << 10, 48 << 10, 64 << 10, 96 << 10)
_SHAPES: Final = ((32, 0, 4), (64, 0, 4), (64, 1, 4), (128, 1, 4), (128, 1, 8))  # rows of W, swap, warps


@triton.jit
def int_tiles(
    x, w, y, partials, counters, m, ldx, ldw, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    EVEN_K: tl.constexpr = K == STEPS * BLOCK_K * SPLIT
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    # past the end the last row is read again: no mask but for K, and those sums are never stored
    w_rows = w + tl.minimum(rows, N - 1).to(tl.int64) * ldw
    x_rows = x + tl.minimum(tokens, m - 1).to(tl.int64) * ldx
    ks = part * (STEPS * BLOCK_K) + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.int32)
    for step in range(0, STEPS):
        k = ks + step * BLOCK_K
        if SWAP:
            wp = w_rows[:, None] + k[None, :]
            xp = x_rows[None, :] + k[:, None]
            if EVEN_K:
                acc = tl.dot(tl.load(wp), tl.load(xp), acc, out_dtype=tl.int32)
            else:
                wt = tl.load(wp, mask=(k < K)[None, :], other=0)
                acc = tl.dot(wt, tl.load(xp, mask=(k < K)[:, None], other=0), acc, out_dtype=tl.int32)
        else:
            wp = w_rows[None, :] + k[:, None]
            xp = x_rows[:, None] + k[None, :]
            if EVEN_K:
                acc = tl.dot(tl.load(xp), tl.load(wp), acc, out_dtype=tl.int32)
            else:
                xt = tl.load(xp, mask=(k < K)[None, :], other=0)
                acc = tl.dot(xt, tl.load(wp, mask=(k < K)[:, None], other=0), acc, out_dtype=tl.int32)
    if SWAP:
        here = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tokens[None, :]
        rows = rows[:, None]
        tokens = tokens[None, :]
    else:
        here = tokens[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        rows = rows[None, :]
        tokens = tokens[:, None]
    inside = (rows < N) & (tokens < m)
    at = tokens.to(tl.int64) * N + rows
    if SPLIT == 1:
        tl.store(y + at, acc, mask=inside)
    else:
        add_slices_and_store(
            acc, partials.to(tl.pointer_type(tl.int32)), counters, tile, part,
            tile.to(tl.int64) * (SPLIT * BLOCK_N * BLOCK_M) + here, None, y, at, rows, rows < N, inside,
            BLOCK_N * BLOCK_M, SPLIT,
        )  # fmt: skip


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    config = KERNEL.checked(config)
    p = problem
    if not is_int_product(p) or p.layout != "nt" or p.k >= _TOO_LONG:
        raise CandidateFailed(f"{p}: kernel int_tiles runs int8 into int32 of layout nt, K below {_TOO_LONG}")
    if p.m > min(MAX_M, config["tokens"]):
        raise CandidateFailed(f"{p} int_tiles: holds {config['tokens']} rows of X (at most {MAX_M})")
    split, count = config["split"], -(-p.n // config["rows"])
    if split > 1 and 4 * count > COUNTERS_BYTES:
        raise CandidateFailed(f"{p} int_tiles: {count} tiles are too many to cut K")
    absent = {"bias"} if split > 1 else {"bias", "partials", "counters"}
    offset = COUNTERS_BYTES if split > 1 else 0
    return LaunchRecord(
        kernel=KERNEL.name,
        dtype=p.dtype,
        grid=(Axis("n", config["rows"]), Axis("", split), Axis("", 1)),
        num_warps=config["warps"],
        num_stages=config["stages"],
        constants={
            "N": p.n,
            "K": p.k,
            "BLOCK_N": config["rows"],
            "BLOCK_M": config["tokens"],
            "BLOCK_K": config["block_k"],
            "SPLIT": split,
            "SWAP": config["swap"],
        },
        arguments=tuple(name for name in PARAMETERS if name not in absent),
        types={"y": p.out_dtype, "partials": "i32"},
        ld_multiple=min(_WIDEST, p.k & -p.k),
        max_m=p.m,
        counters_bytes=4 * count if split > 1 else 0,
        partials_offset=offset,
        workspace_bytes=offset + 4 * split * config["rows"] * config["tokens"] * count if split > 1 else 0,
    )


def scored(problem: Problem, device: Device) -> Scored:
    """What is worth trying: the best of each number of rows and slices, then their second best; numbered, not in us."""
    p = problem
    if not is_int_product(p) or p.layout != "nt" or not 1 < p.m <= MAX_M or p.k >= _TOO_LONG:
        return []
    groups: dict[object, list[dict[str, int]]] = {}
    for _, config in sorted(_estimated(p, device), key=lambda one: one[0]):
        groups.setdefault((config["rows"], config["split"], config["swap"]), []).append(config)
    in_turns = [group[i] for i in range(2) for group in groups.values() if i < len(group)]
    return [(float(i), config) for i, config in enumerate(in_turns, 1)]


def _estimated(problem: Problem, device: Device) -> Scored:
    """Candidates by the estimate of tiles.py for bf16 and half of K, which has the same bytes and instructions."""
    m, n, k = problem.m, problem.n, max(problem.k // 2, 1)
    tokens, units, arch = 32 if m <= 32 else MAX_M, device.units, device.arch
    fit, found = FITS["few" if tokens < MAX_M else "many"], []
    for rows, swap, warps in _SHAPES:
        tiles = -(-n // rows)
        for block_k in _BLOCKS_K:
            step, shared = block_k // 2, (rows + tokens) * block_k
            for split in splits(tiles, k, step, units):
                if split > 1 and 4 * tiles > COUNTERS_BYTES:
                    continue
                steps = -(-k // (step * split))
                for stages in ring_stages(
                    _RING_BYTES, w_bytes=rows * block_k, shared_bytes=shared, steps=steps, blocks=tiles * split,
                    units=units, arch=arch, most=8,
                ):  # fmt: skip
                    config = {"rows": rows, "tokens": tokens, "block_k": block_k, "split": split, "swap": swap}
                    config |= {"warps": warps, "stages": stages}
                    tile = Tile(
                        rows=rows, tokens=tokens, block_k=step, groups=1, split=split, warps=warps, stages=stages,
                        steps=steps, shared=stages * shared, wide=bool(swap),
                    )  # fmt: skip
                    if tile.shared <= shared_limit(arch):
                        found.append((estimate_us(m, n, k, units, tile, fit, arch=arch), config))
    return found


KERNEL: Final = TritonKernel(
    name="int_tiles",
    function=int_tiles,
    families=("dense",),
    archs=("sm_80+", "gfx9*"),
    parameters=(
        Parameter("rows", 16, power=True),
        Parameter("tokens", 16, power=True),
        Parameter("block_k", 32, power=True),
        Parameter("split"),
        Parameter("swap", 0, 1),
        Parameter("warps", most=32, power=True),
        Parameter("stages"),
    ),
    scored=scored,
    record=launch_record,
)
