"""M <= 32: each warp of a program takes its own share of K, and tensor cores do the dot products.

Y[M, N] = X[M, K] @ W[N, K].T + bias.  Rows of W lie on the long side of the matrix instruction and the few tokens on
the short one.  The three-dimensional dot puts `warps` on its batch axis, so that a tile of 16 or 32 rows still
keeps all warps busy with a deep ring of loads each; their sums meet once at the end.  `split` > 1 cuts K
over programs too, and the last program of a tile adds up (split_k.py).
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.triton.launch import Axis, Config, LaunchRecord, check_config, make_record
from gemmtuned.kernels.triton.limits import shared_limit
from gemmtuned.kernels.triton.split_k import arrived_last, reset

NAME: Final = "warp_split_k"
KEYS: Final = ("rows", "tokens", "block_k", "split", "warps", "stages", "chunked")
MAX_M: Final = 32


@triton.jit
def warp_split_k(
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
    CHUNKED: tl.constexpr,
):
    STEPS: tl.constexpr = (K + BLOCK_K * WARPS * SPLIT - 1) // (BLOCK_K * WARPS * SPLIT)
    EVEN_K: tl.constexpr = K == STEPS * BLOCK_K * WARPS * SPLIT
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows past the end read the last row again: no mask on W, and their sums are never stored
    read = tl.minimum(rows, N - 1) if N % BLOCK_N != 0 else rows
    tokens = tl.arange(0, BLOCK_M)
    warp = tl.arange(0, WARPS)
    STRIDE: tl.constexpr = BLOCK_K if CHUNKED else BLOCK_K * WARPS
    # chunked: each warp has one stretch of K; else the warps walk side by side
    first = part * (STEPS * WARPS * BLOCK_K) + warp * (STEPS * BLOCK_K if CHUNKED else BLOCK_K)
    ks = first[:, None] + tl.arange(0, BLOCK_K)[None, :]
    w_rows = w + read.to(tl.int64)[None, :, None] * ldw
    x_rows = x + tokens.to(tl.int64)[None, None, :] * ldx
    real = (tokens < m)[None, None, :]
    acc = tl.zeros((WARPS, BLOCK_N, BLOCK_M), tl.float32)
    for step in range(0, STEPS):
        k = ks + step * STRIDE
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
    if SPLIT == 1:
        if bias is not None:
            total += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
        tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)
    else:
        here = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tokens[None, :]
        sums = partials + tile.to(tl.int64) * (SPLIT * BLOCK_N * BLOCK_M) + here
        tl.store(sums + part * (BLOCK_N * BLOCK_M), total)
        if arrived_last(counters, tile, SPLIT):
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for i in tl.static_range(SPLIT):
                total += tl.load(sums + i * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
            if bias is not None:
                total += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
            tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)
            reset(counters, tile)


KERNEL: Final = warp_split_k


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    check_config(config, KEYS, NAME)
    if problem.m > min(MAX_M, config["tokens"]):
        raise CandidateFailed(f"{problem} {NAME}: holds {config['tokens']} rows of X (at most {MAX_M})")
    return make_record(
        NAME,
        problem,
        grid=(Axis("n", config["rows"]), Axis("", config["split"]), Axis("", 1)),
        num_warps=config["warps"],
        num_stages=config["stages"],
        constants={
            "BLOCK_N": config["rows"],
            "BLOCK_M": config["tokens"],
            "BLOCK_K": config["block_k"],
            "WARPS": config["warps"],
            "CHUNKED": config["chunked"],
        },
        split=config["split"],
        tile_values=config["rows"] * config["tokens"],
    )


def configs(m: int, n: int, k: int, units: int, *, arch: str = "sm_90", limit: int = 48) -> list[dict[str, int]]:
    """At most `limit` candidates for a device with this many units, the cheapest by the cost model first."""
    if m > MAX_M:
        return []
    amd = arch.startswith("gfx")
    tokens = max(16 if amd else 8, 1 << (m - 1).bit_length())
    stage_choices = (2,) if amd else (3, 4, 5, 6, 8, 10)
    scored = []
    for rows in (16, 32, 64):
        for block_k in (64, 128, 256):
            for warps in (2, 4, 8):
                for split in (1, 2, 3, 4, 5, 6, 7, 8, 14):
                    steps = -(-k // (block_k * warps * split))
                    waste = steps * block_k * warps * split / k
                    programs = -(-n // rows) * split
                    if (waste > 1.15 and steps > 1) or programs > 6 * units or (split > 1 and programs > 4 * units):
                        continue
                    for stages in stage_choices:
                        shared = max(stages - 1, 1) * warps * (rows + tokens) * block_k * 2
                        if stages > max(steps + 1, 3) or shared > shared_limit(arch) or shared < 12 << 10:
                            continue
                        cost = _cost_us(n, k, units, rows, tokens, m, split, steps, stages, shared, waste, arch)
                        config = {"rows": rows, "tokens": tokens, "block_k": block_k, "split": split, "warps": warps}
                        scored.append((cost, {**config, "stages": stages, "chunked": 0}))
    scored.sort(key=lambda item: item[0])
    return [config for _, config in scored[:limit]]


def _cost_us(
    n: int,
    k: int,
    units: int,
    rows: int,
    tokens: int,
    m: int,
    split: int,
    steps: int,
    stages: int,
    shared: int,
    waste: float,
    arch: str,
) -> float:
    """Estimated device time: streaming bounded by loads in flight and by L2, plus start and reduction."""
    programs = -(-n // rows) * split
    resident = max(1, min(8, shared_limit(arch) // (shared + 1024)))
    busiest = -(-programs // units)  # programs of the busiest unit
    here = min(busiest, resident)
    ring = shared * rows / (rows + tokens)
    rate = min(4.4e6 / units, here * ring / 1.0)  # bytes a us and unit
    w_bytes = busiest * rows * k / split * 2 * waste
    x_bytes = busiest * min(m, tokens) * k / split * 2
    stream = max(w_bytes / rate, (w_bytes + x_bytes) / (7e6 / units))
    issue = 0.06 * steps * (busiest / here)
    reduce = (0.9 + 8 * split * m * n / 3e6) if split > 1 else 0.0
    return 2.2 + stream + issue + reduce + 0.05 * stages


def run(x: Any, w: Any, bias: Any, config: Config, workspace: Any = None) -> Any:
    """Y [M, N] from tensors x [M, K], w [N, K], bias [N] or None. See `gemmtuned.kernels.triton.python_launch`."""
    from gemmtuned.kernels.triton.python_launch import launch

    return launch(KERNEL, launch_record, x, w, bias, config, workspace)
