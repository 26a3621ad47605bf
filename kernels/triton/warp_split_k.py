"""M <= 32: each warp of a thread block takes its own share of K, and tensor cores do the dot products.

Y[M, N] = X[M, K] @ W[N, K].T + bias.  Rows of W lie on the long side of the matrix instruction and the few tokens on
the short one.  The three-dimensional dot puts `warps` on its batch axis, so that a tile of 16 or 32 rows still
keeps all warps busy with a deep ring of loads each; their sums meet once at the end.  `split` > 1 cuts K over
thread blocks too: with `cluster` 1 they put their sums into each other's memory (cluster.py), with 0 the last thread
block of a tile adds up (split_k.py).
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.arch import shared_limit
from gemmtuned.kernels.estimates import fits
from gemmtuned.kernels.own_kernel import Config, Parameter, by_size
from gemmtuned.kernels.triton.cluster import add_up_and_store, begin
from gemmtuned.kernels.triton.kernel import TritonKernel
from gemmtuned.kernels.triton.launch import Axis, Exchange, LaunchRecord, make_record
from gemmtuned.kernels.triton.split_k import add_slices_and_store
from gemmtuned.kernels.triton.to_shared import Constants, Tile, cuts, estimate_us, ring_stages

MAX_M: Final = 32
_RING_BYTES: Final = (20 << 10, 30 << 10, 44 << 10, 56 << 10, 80 << 10)
FITS: Final = fits(__file__, Constants)


@triton.jit
def warp_split_k(
    x, w, bias, y, partials, counters, m, ldx, ldw, N: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    WARPS: tl.constexpr, CLUSTER: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = (K + BLOCK_K * WARPS * SPLIT - 1) // (BLOCK_K * WARPS * SPLIT)
    EVEN_K: tl.constexpr = K == STEPS * BLOCK_K * WARPS * SPLIT
    tile = tl.program_id(0) // CLUSTER
    part = tl.program_id(1) if CLUSTER == 1 else tl.program_id(0) % CLUSTER
    if CLUSTER > 1:
        begin(part, BLOCK_N, BLOCK_M, CLUSTER, WARPS)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows past the end read the last row again: no mask on W, and their sums are never stored
    read = tl.minimum(rows, N - 1) if N % BLOCK_N != 0 else rows
    tokens = tl.arange(0, BLOCK_M)
    warp = tl.arange(0, WARPS)
    # the warps walk along K side by side; a stretch of K for each was never faster
    first = part * (STEPS * WARPS * BLOCK_K) + warp * BLOCK_K
    ks = first[:, None] + tl.arange(0, BLOCK_K)[None, :]
    w_rows = w + read.to(tl.int64)[None, :, None] * ldw
    x_rows = x + tokens.to(tl.int64)[None, None, :] * ldx
    real = (tokens < m)[None, None, :]
    acc = tl.zeros((WARPS, BLOCK_N, BLOCK_M), tl.float32)
    for step in range(0, STEPS):
        k = ks + step * (BLOCK_K * WARPS)
        if EVEN_K:
            wt = tl.load(w_rows + k[:, None, :])
            xt = tl.load(x_rows + k[:, :, None], mask=real, other=0.0)
        else:  # both sides masked: 0 * NaN of the other side's padding would be NaN
            wt = tl.load(w_rows + k[:, None, :], mask=(k < K)[:, None, :], other=0.0)
            xt = tl.load(x_rows + k[:, :, None], mask=real & (k < K)[:, :, None], other=0.0)
        acc = tl.dot(wt, xt, acc)
    total = tl.sum(acc, 0)
    inside = (rows < N)[:, None] & (tokens < m)[None, :]
    at = tokens[None, :] * N + rows[:, None]
    if CLUSTER > 1:
        add_up_and_store(
            acc, tl.arange(0, BLOCK_N)[None, :, None], tokens[None, None, :], warp[:, None, None], True,
            tile * BLOCK_N, 0, part, bias, y, m, N, BLOCK_N, BLOCK_M, CLUSTER, WARPS,
        )  # fmt: skip
    else:
        here = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tokens[None, :]
        add_slices_and_store(
            total, partials, counters, tile, part, tile.to(tl.int64) * (SPLIT * BLOCK_N * BLOCK_M) + here, bias, y, at,
            rows[:, None], (rows < N)[:, None], inside, BLOCK_N * BLOCK_M, SPLIT,
        )  # fmt: skip


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    config = KERNEL.checked(config)
    if problem.m > min(MAX_M, config["tokens"]):
        raise CandidateFailed(f"{problem} {KERNEL.name}: holds {config['tokens']} rows of X (at most {MAX_M})")
    return make_record(
        KERNEL.name,
        problem,
        grid=(Axis("n", config["rows"]), Axis("", 1 if config["cluster"] else config["split"]), Axis("", 1)),
        num_warps=config["warps"],
        num_stages=config["stages"],
        constants={
            "BLOCK_N": config["rows"],
            "BLOCK_M": config["tokens"],
            "BLOCK_K": config["block_k"],
            "WARPS": config["warps"],
        },
        exchange=Exchange(config["rows"], config["tokens"], config["warps"]) if config["cluster"] else None,
        split=config["split"],
        tile_values=config["rows"] * config["tokens"],
    )


def scored(m: int, n: int, k: int, units: int, *, arch: str = "sm_90") -> list[tuple[float, dict[str, int]]]:
    """(estimated us, config) of the candidates for a device with this many units, the fastest first."""
    if m > MAX_M:
        return []
    tokens = max(16 if arch.startswith("gfx") else 8, 1 << (m - 1).bit_length())
    found = []
    for rows in (16, 32, 64):
        tiles = -(-n // rows)
        if rows == 64 and tiles <= units:
            continue
        for block_k, warps in ((64, 2), (128, 2), (256, 2), (64, 4), (128, 4), (256, 4)):
            if (rows * tokens > 1024 and block_k > 64) or (rows + tokens) * block_k > 1 << 14:
                continue  # more registers than a thread has
            w_bytes, shared_bytes = warps * rows * block_k * 2, warps * (rows + tokens) * block_k * 2
            for split, cluster in cuts(tiles, k, block_k * warps, units, arch=arch):
                steps = -(-k // (block_k * warps * split))
                for stages in ring_stages(
                    _RING_BYTES, w_bytes=w_bytes, shared_bytes=shared_bytes, steps=steps, blocks=tiles * split,
                    units=units, arch=arch, most=12,
                ):  # fmt: skip
                    config = {"rows": rows, "tokens": tokens, "block_k": block_k, "split": split, "warps": warps}
                    config |= {"stages": stages} | ({"cluster": 1} if cluster else {})
                    if _tile(k, config).shared <= shared_limit(arch):
                        found.append((estimate(FITS[fit_of(config)], m, n, k, units, config, arch=arch), config))
    found.sort(key=lambda item: item[0])
    return found


def fit_of(config: Config) -> str:
    """As estimates.py says."""
    return "all"


def estimate(fit: Constants, m: int, n: int, k: int, units: int, config: Config, *, arch: str = "sm_90") -> float:
    """As estimates.py says."""
    return estimate_us(m, n, k, units, _tile(k, config), fit, arch=arch)


def _tile(k: int, config: Config) -> Tile:
    """The config, for this K, in the terms of the estimate (to_shared.Tile)."""
    rows, tokens, block_k, split, warps, stages = (
        config[key] for key in ("rows", "tokens", "block_k", "split", "warps", "stages")
    )
    cluster = bool(config.get("cluster"))
    shared = (stages - 1) * warps * (rows + tokens) * block_k * 2
    if cluster:
        shared += Exchange(rows, tokens, warps).bytes(split)
    return Tile(
        rows=rows, tokens=tokens, block_k=block_k, groups=warps, split=split, warps=warps, stages=stages,
        steps=-(-k // (block_k * warps * split)), shared=shared, cluster=cluster,
    )  # fmt: skip


KERNEL: Final = TritonKernel(
    name="warp_split_k",
    function=warp_split_k,
    families=("dense",),
    archs=("sm_70+", "gfx9*"),
    parameters=(
        Parameter("rows", power=True),
        Parameter("tokens", power=True),
        Parameter("block_k", power=True),
        Parameter("split"),
        Parameter("cluster", 0, 1, default=0),
        Parameter("warps", most=32, power=True),
        Parameter("stages"),
    ),
    scored=by_size(scored),
    record=launch_record,
)
