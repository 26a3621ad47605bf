"""Any M, N, K: plain tiles of the tensor core, with K cut over programs where there are too few tiles.

Y[M, N] = X[M, K] @ W[N, K].T + bias.  `swap` puts rows of W on the long side of the matrix instruction and tokens on
the short one (16 tokens then still use the warp-group instruction of sm_90); without it rows of X are on the long
side.  `split` > 1 cuts K; the last program of a tile adds up (split_k.py).
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl

from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.triton.launch import Axis, Config, LaunchRecord, check_config, make_record
from gemmtuned.kernels.triton.limits import shared_limit
from gemmtuned.kernels.triton.split_k import arrived_last, reset

NAME: Final = "tiles"
KEYS: Final = ("rows", "tokens", "block_k", "split", "group", "swap", "warps", "stages")


@triton.jit
def tiles(
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
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
):
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    EVEN_K: tl.constexpr = K == STEPS * BLOCK_K * SPLIT
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(2) * TILES_N + tl.program_id(0)
    part = tl.program_id(1)
    tiles_m = tl.num_programs(2)
    if GROUP > 1:  # neighbours in time share rows of X and of W in L2
        group = tile // (GROUP * TILES_N)
        high = tl.minimum(tiles_m - group * GROUP, GROUP)
        tile_m = group * GROUP + (tile % (GROUP * TILES_N)) % high
        tile_n = (tile % (GROUP * TILES_N)) // high
    else:
        tile_m = tl.program_id(2)
        tile_n = tl.program_id(0)
    rows = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    # past the end the last row is read again: no mask but for K, and those sums are never stored
    w_rows = w + tl.minimum(rows, N - 1).to(tl.int64) * ldw if N % BLOCK_N != 0 else w + rows.to(tl.int64) * ldw
    x_rows = x + tl.minimum(tokens, m - 1).to(tl.int64) * ldx
    ks = part * (STEPS * BLOCK_K) + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, STEPS):
        k = ks + step * BLOCK_K
        if SWAP:
            wp = w_rows[:, None] + k[None, :]
            xp = x_rows[None, :] + k[:, None]
            if EVEN_K:
                acc = tl.dot(tl.load(wp), tl.load(xp), acc)
            else:
                wt = tl.load(wp, mask=(k < K)[None, :], other=0.0)
                acc = tl.dot(wt, tl.load(xp, mask=(k < K)[:, None], other=0.0), acc)
        else:
            wp = w_rows[None, :] + k[:, None]
            xp = x_rows[:, None] + k[None, :]
            if EVEN_K:
                acc = tl.dot(tl.load(xp), tl.load(wp), acc)
            else:
                xt = tl.load(xp, mask=(k < K)[None, :], other=0.0)
                acc = tl.dot(xt, tl.load(wp, mask=(k < K)[:, None], other=0.0), acc)
    if SWAP:
        rows = rows[:, None]
        tokens = tokens[None, :]
    else:
        rows = rows[None, :]
        tokens = tokens[:, None]
    inside = (rows < N) & (tokens < m)
    at = tokens.to(tl.int64) * N + rows
    if SPLIT == 1:
        if bias is not None:
            acc += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
        tl.store(y + at, acc.to(y.dtype.element_ty), mask=inside)
    else:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        if SWAP:
            here = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        else:
            here = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        sums = partials + tile.to(tl.int64) * (SPLIT * SIZE) + here
        tl.store(sums + part * SIZE, acc)
        if arrived_last(counters, tile, SPLIT):
            acc = tl.zeros_like(acc)
            for i in tl.static_range(SPLIT):
                acc += tl.load(sums + i * SIZE, cache_modifier=".cg")
            if bias is not None:
                acc += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
            tl.store(y + at, acc.to(y.dtype.element_ty), mask=inside)
            reset(counters, tile)


KERNEL: Final = tiles


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    check_config(config, KEYS, NAME)
    return make_record(
        NAME,
        problem,
        grid=(Axis("n", config["rows"]), Axis("", config["split"]), Axis("m", config["tokens"])),
        num_warps=config["warps"],
        num_stages=config["stages"],
        constants={
            "BLOCK_N": config["rows"],
            "BLOCK_M": config["tokens"],
            "BLOCK_K": config["block_k"],
            "GROUP": config["group"],
            "SWAP": config["swap"],
        },
        split=config["split"],
        tile_values=config["rows"] * config["tokens"],
    )


def configs(m: int, n: int, k: int, units: int, *, arch: str = "sm_90", limit: int = 48) -> list[dict[str, int]]:
    """At most `limit` candidates for a device with this many units, the cheapest by the cost model first."""
    amd = arch.startswith("gfx")
    smallest = max(16, 1 << (m - 1).bit_length()) if m <= 64 else 64
    scored = []
    for rows, tokens, swap in _tile_shapes(m, smallest):
        for block_k in (32, 64, 128, 256):
            for split in (1, 2, 3, 4, 6, 7, 8, 12, 14, 16):
                steps = -(-k // (block_k * split))
                waste = steps * block_k * split / k
                tiles_mn = -(-n // rows) * -(-m // tokens)
                if split > 1 and (steps < 4 or waste > 1.1 or tiles_mn * split > 4 * units):
                    continue
                for warps in (2, 4, 8):
                    if not 256 <= rows * tokens // warps <= (1024 if split > 1 else 2048 if m <= 64 else 4096) or (
                        swap and warps > 4 and rows < 128
                    ):
                        continue
                    for stages in (2,) if amd else (3, 4, 5, 6, 8):
                        shared = (stages - (1 if amd else 0)) * (rows + tokens) * block_k * 2
                        if shared > shared_limit(arch) or stages > steps + 2:
                            continue
                        cost = _cost_us(m, n, k, units, rows, tokens, block_k, split, steps, shared, waste, arch)
                        config = {"rows": rows, "tokens": tokens, "block_k": block_k, "split": split}
                        group = 8 if m > 2 * tokens else 1
                        scored.append(
                            (cost, {**config, "group": group, "swap": swap, "warps": warps, "stages": stages})
                        )
    scored.sort(key=lambda item: item[0])
    return [config for _, config in scored[:limit]]


def _tile_shapes(m: int, smallest: int) -> list[tuple[int, int, int]]:
    """(rows of W, tokens, swap) worth trying for this M."""
    if m <= 64:
        plain = [(rows, smallest, 0) for rows in (32, 64, 128)]
        return [(rows, smallest, 1) for rows in (64, 128)] + plain
    return [(64, 64, 0), (128, 64, 0), (128, 64, 1), (128, 128, 0), (256, 64, 0), (256, 128, 0), (128, 256, 0)]


def _cost_us(
    m: int,
    n: int,
    k: int,
    units: int,
    rows: int,
    tokens: int,
    block_k: int,
    split: int,
    steps: int,
    shared: int,
    waste: float,
    arch: str,
) -> float:
    """Estimated device time: the slowest of DRAM, L2, tensor cores and issue, plus start and reduction."""
    programs = -(-n // rows) * -(-m // tokens) * split
    resident = max(1, min(8, shared_limit(arch) // (shared + 1024)))
    busiest = -(-programs // units)
    here = min(busiest, resident)
    a_program = (rows + tokens) * steps * block_k * 2
    rate = min(4.4e6 / units, here * shared * 0.75)
    dram = min(busiest * rows * steps * block_k * 2, (n * k + m * k) * 2 * waste / units * 1.5) / rate
    l2 = busiest * a_program / (7e6 / units)
    math = busiest * 2 * rows * max(tokens, 64) * steps * block_k / (450e6 / units)
    issue = 0.1 * steps * busiest / here
    reduce = (1.0 + 8 * split * m * n / 3e6) if split > 1 else 0.0
    return 2.2 + max(dram, l2, math, issue) + reduce


def run(x: Any, w: Any, bias: Any, config: Config, workspace: Any = None) -> Any:
    """Y [M, N] from tensors x [M, K], w [N, K], bias [N] or None. See `gemmtuned.kernels.triton.python_launch`."""
    from gemmtuned.kernels.triton.python_launch import launch

    return launch(KERNEL, launch_record, x, w, bias, config, workspace)
