"""Any M, N, K: plain tiles of the tensor core, with K cut over thread blocks where there are too few tiles.

Y[M, N] = X[M, K] @ W[N, K].T + bias.  `swap` puts rows of W on the long side of the matrix instruction and tokens on
the short one (16 tokens then still use the warp-group instruction of sm_90); without it rows of X are on the long
side.  `split` > 1 cuts K: with `cluster` 1 thread blocks put their sums into each other's memory (cluster.py), without
it the last thread block of a tile adds up (split_k.py).  `group` is Triton's GROUP_SIZE_M: the search leaves it at 1,
seeds from other tools' tables have more.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.arch import shared_limit
from gemmtuned.kernels.estimates import fits
from gemmtuned.kernels.own_kernel import Config, Parameter, by_size
from gemmtuned.kernels.triton.cluster import add_up_and_store, begin
from gemmtuned.kernels.triton.kernel import TritonKernel
from gemmtuned.kernels.triton.launch import Axis, Exchange, LaunchRecord, make_record
from gemmtuned.kernels.triton.split_k import add_slices_and_store
from gemmtuned.kernels.triton.to_shared import Constants, Tile, cuts, estimate_us, ring_stages

_SMALL_M: Final = 64  # up to here one tile holds all rows of X, and reading W is the work
_RING_BYTES: Final = (24 << 10, 36 << 10, 48 << 10, 64 << 10, 96 << 10)
FITS: Final = fits(__file__, Constants)


@triton.jit
def tiles(
    x, w, bias, y, partials, counters, m, ldx, ldw, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    GROUP: tl.constexpr, SWAP: tl.constexpr, CLUSTER: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    EVEN_K: tl.constexpr = K == STEPS * BLOCK_K * SPLIT
    LINES: tl.constexpr = BLOCK_N if SWAP else BLOCK_M  # lines of sums
    WIDE: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(2) * TILES_N + tl.program_id(0) // CLUSTER
    part = tl.program_id(1) if CLUSTER == 1 else tl.program_id(0) % CLUSTER
    tiles_m = tl.num_programs(2)
    if GROUP > 1:  # neighbours in time share rows of X and of W in L2
        group = tile // (GROUP * TILES_N)
        high = tl.minimum(tiles_m - group * GROUP, GROUP)
        tile_m = group * GROUP + (tile % (GROUP * TILES_N)) % high
        tile_n = (tile % (GROUP * TILES_N)) // high
    else:
        tile_m = tl.program_id(2)
        tile_n = tl.program_id(0) // CLUSTER
    if CLUSTER > 1:
        begin(part, LINES, WIDE, CLUSTER, 1)
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
    if CLUSTER > 1:
        add_up_and_store(
            acc, tl.arange(0, LINES)[:, None], tl.arange(0, WIDE)[None, :], 0, SWAP,
            tile_n * BLOCK_N, tile_m * BLOCK_M, part, bias, y, m, N, LINES, WIDE, CLUSTER, 1,
        )  # fmt: skip
    else:
        if SWAP:
            here = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        else:
            here = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        add_slices_and_store(
            acc, partials, counters, tile, part, tile.to(tl.int64) * (SPLIT * BLOCK_N * BLOCK_M) + here, bias, y, at,
            rows, rows < N, inside, BLOCK_N * BLOCK_M, SPLIT,
        )  # fmt: skip


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    config = KERNEL.checked(config)
    return make_record(
        KERNEL.name,
        problem,
        grid=(
            Axis("n", config["rows"]),
            Axis("", 1 if config["cluster"] else config["split"]),
            Axis("m", config["tokens"]),
        ),
        num_warps=config["warps"],
        num_stages=config["stages"],
        constants={
            "BLOCK_N": config["rows"],
            "BLOCK_M": config["tokens"],
            "BLOCK_K": config["block_k"],
            "GROUP": config["group"],
            "SWAP": config["swap"],
        },
        exchange=_exchange(config["rows"], config["tokens"], config["swap"]) if config["cluster"] else None,
        split=config["split"],
        tile_values=config["rows"] * config["tokens"],
    )


def _exchange(rows: int, tokens: int, swap: int) -> Exchange:
    return Exchange(rows, tokens, 1) if swap else Exchange(tokens, rows, 1)


def scored(m: int, n: int, k: int, units: int, *, arch: str = "sm_90") -> list[tuple[float, dict[str, int]]]:
    """(estimated us, config) of the candidates for a device with this many units, the fastest first."""
    tokens = max(16, min(1 << (m - 1).bit_length(), _SMALL_M))
    found = []
    for rows, wide_tokens, swap, warp_choices in _shapes(m, tokens):
        tiles_mn = -(-n // rows) * -(-m // wide_tokens)
        for block_k in (64, 128, 256) if rows <= 32 else (64, 128):
            w_bytes, shared_bytes = rows * block_k * 2, (rows + wide_tokens) * block_k * 2
            for split, cluster in cuts(tiles_mn, k, block_k, units, arch=arch):
                steps = -(-k // (block_k * split))
                for stages in ring_stages(
                    _RING_BYTES, w_bytes=w_bytes, shared_bytes=shared_bytes, steps=steps, blocks=tiles_mn * split,
                    units=units, arch=arch, most=8,
                ):  # fmt: skip
                    for warps in warp_choices:
                        config = {"rows": rows, "tokens": wide_tokens, "block_k": block_k, "split": split, "group": 1}
                        config |= {"swap": swap, "warps": warps, "stages": stages}
                        config |= {"cluster": 1} if cluster else {}
                        if _tile(k, config).shared <= shared_limit(arch):
                            found.append((estimate(FITS[fit_of(config)], m, n, k, units, config, arch=arch), config))
    found.sort(key=lambda item: item[0])
    return found


def fit_of(config: Config) -> str:
    """As estimates.py says."""
    return "few" if config["tokens"] < _SMALL_M else "many"


def estimate(fit: Constants, m: int, n: int, k: int, units: int, config: Config, *, arch: str = "sm_90") -> float:
    """As estimates.py says."""
    return estimate_us(m, n, k, units, _tile(k, config), fit, arch=arch)


def _tile(k: int, config: Config) -> Tile:
    """The config, for this K, in the terms of the estimate (to_shared.Tile)."""
    rows, tokens, block_k, split, swap, warps, stages = (
        config[key] for key in ("rows", "tokens", "block_k", "split", "swap", "warps", "stages")
    )
    cluster = bool(config.get("cluster"))
    group_mma = bool(swap) and warps >= 4
    shared = (stages if group_mma else stages - 1) * (rows + tokens) * block_k * 2
    if cluster:
        shared += _exchange(rows, tokens, swap).bytes(split)
    return Tile(
        rows=rows, tokens=tokens, block_k=block_k, groups=1, split=split, warps=warps, stages=stages,
        steps=-(-k // (block_k * split)), shared=shared, wide=group_mma, cluster=cluster,
    )  # fmt: skip


def _shapes(m: int, tokens: int) -> tuple[tuple[int, int, int, tuple[int, ...]], ...]:
    """(rows, tokens, swap, choices of warps) of the tiles worth trying."""
    if m > _SMALL_M:
        return ((32, 64, 0, (4,)), (64, 64, 0, (4,)), (64, 64, 1, (4,)), (64, 128, 1, (4,)), (128, 128, 1, (8,)))
    if tokens == _SMALL_M:  # four warps won at each of twenty shapes
        return ((16, 64, 0, (4,)), (32, 64, 0, (4,)), (64, 64, 1, (4,)), (128, 64, 1, (8,)))
    return ((32, tokens, 0, (2, 4)), (64, tokens, 1, (2, 4)), (128, tokens, 1, (8,)))


def _alike(config: Config) -> object:
    by_warp_groups = config["swap"] == 1 and config["warps"] >= 4  # another instruction of the tensor core
    return config["rows"], config["split"], by_warp_groups


KERNEL: Final = TritonKernel(
    name="tiles",
    function=tiles,
    families=("dense",),
    archs=("sm_70+", "gfx9*"),
    parameters=(
        Parameter("rows", power=True),
        Parameter("tokens", power=True),
        Parameter("block_k", power=True),
        Parameter("split"),
        Parameter("group"),
        Parameter("swap", 0, 1),
        Parameter("cluster", 0, 1, default=0),
        Parameter("warps", most=32, power=True),
        Parameter("stages"),
    ),
    scored=by_size(scored),
    record=launch_record,
    alike=_alike,
)
