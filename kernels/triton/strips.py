"""M <= 32: tiles of W of 24, 40, 56 .. rows, so that N makes as many programs as the device has units.

Y[M, N] = X[M, K] @ W[N, K].T + bias.  Triton's tiles are powers of two high: of N = 5120 the 132 units of an H200 get
80 programs of 64 rows or 160 of 32, and a third of them stand still.  Here a program owns the sum of up to three
powers of two, 40 = 32 + 8, and multiplies X with each part in turn; what is read of X is read once.  K is not cut.
With more rows of X what every program reads of it would be more than its share of W.
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
from gemmtuned.kernels.triton.space import Tile, estimate_us, ring_stages
from gemmtuned.kernels.triton.tiles import FITTED, RING_BYTES

NAME: Final = "strips"
KEYS: Final = ("rows", "tokens", "block_k", "warps", "stages")
MAX_M: Final = 32
_HEIGHTS: Final = (24, 40, 48, 56, 80, 96, 112)
_WORTH_IT: Final = 1.06  # times the share of the units that powers of two keep busy


@triton.jit
def strips(
    x,
    w,
    bias,
    y,
    m,
    ldx,
    ldw,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
):
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    begin = tl.program_id(0) * BLOCK_N
    tokens = tl.arange(0, BLOCK_M)
    x_rows = x + tokens.to(tl.int64) * ldx
    real = (tokens < m)[:, None]
    ks = tl.arange(0, BLOCK_K)
    first = tl.zeros((BLOCK_M, FIRST), tl.float32)
    second = tl.zeros((BLOCK_M, SECOND), tl.float32)
    if THIRD > 0:
        third = tl.zeros((BLOCK_M, THIRD), tl.float32)
    for step in range(0, STEPS):
        k = ks + step * BLOCK_K
        if K % BLOCK_K == 0:
            xt = tl.load(x_rows[:, None] + k[None, :], mask=real, other=0.0)
        else:
            xt = tl.load(x_rows[:, None] + k[None, :], mask=real & (k < K)[None, :], other=0.0)
        first = tl.dot(xt, _w_of(w, begin, k, ldw, N, K, BLOCK_K, FIRST), first)
        second = tl.dot(xt, _w_of(w, begin + FIRST, k, ldw, N, K, BLOCK_K, SECOND), second)
        if THIRD > 0:
            third = tl.dot(xt, _w_of(w, begin + FIRST + SECOND, k, ldw, N, K, BLOCK_K, THIRD), third)
    _store(y, bias, first, tokens, begin, m, N, FIRST)
    _store(y, bias, second, tokens, begin + FIRST, m, N, SECOND)
    if THIRD > 0:
        _store(y, bias, third, tokens, begin + FIRST + SECOND, m, N, THIRD)


@triton.jit
def _w_of(w, begin, k, ldw, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr):
    """[BLOCK_K, ROWS] of W: past the end of N the last row again, its sums are never stored; past that of K zeros."""
    rows = tl.minimum(begin + tl.arange(0, ROWS), N - 1).to(tl.int64)
    if K % BLOCK_K == 0:
        return tl.load(w + rows[None, :] * ldw + k[:, None])
    else:
        return tl.load(w + rows[None, :] * ldw + k[:, None], mask=(k < K)[:, None], other=0.0)


@triton.jit
def _store(y, bias, sums, tokens, begin, m, N: tl.constexpr, ROWS: tl.constexpr):
    rows = (begin + tl.arange(0, ROWS))[None, :]
    if bias is not None:
        sums += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
    at = tokens[:, None].to(tl.int64) * N + rows
    tl.store(y + at, sums.to(y.dtype.element_ty), mask=(rows < N) & (tokens < m)[:, None])


KERNEL: Final = strips


def parts(rows: int) -> tuple[int, ...]:
    """The powers of two that add up to it, the largest first."""
    return tuple(1 << bit for bit in range(rows.bit_length() - 1, -1, -1) if rows >> bit & 1)


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    check_config(config, KEYS, NAME)
    if problem.m > min(MAX_M, config["tokens"]):
        raise CandidateFailed(f"{problem} {NAME}: holds {config['tokens']} rows of X (at most {MAX_M})")
    of = parts(config["rows"])
    if not 2 <= len(of) <= 3 or of[-1] < 8:
        raise CandidateFailed(f"{problem} {NAME}: {config['rows']} is not the sum of two or three of 8, 16, 32 ..")
    return make_record(
        NAME,
        problem,
        grid=(Axis("n", config["rows"]), Axis("", 1), Axis("", 1)),
        num_warps=config["warps"],
        num_stages=config["stages"],
        constants={
            "BLOCK_N": config["rows"],
            "BLOCK_M": config["tokens"],
            "BLOCK_K": config["block_k"],
            "FIRST": of[0],
            "SECOND": of[1],
            "THIRD": of[2] if len(of) > 2 else 0,
        },
        split=1,
        tile_values=config["rows"] * config["tokens"],
    )


def scored(m: int, n: int, k: int, units: int, *, arch: str = "sm_90") -> list[tuple[float, dict[str, int]]]:
    """(estimated us, config) of the candidates for a device with this many units, the fastest first."""
    if not 1 < m <= MAX_M:
        return []
    tokens = max(16, 1 << (m - 1).bit_length())
    narrowest = 16 if arch.startswith("gfx") else 8  # of a matrix instruction
    even = max(_busy(n, rows, units) for rows in (16, 32, 64, 128))
    heights = [rows for rows in _HEIGHTS if parts(rows)[-1] >= narrowest and _busy(n, rows, units) > _WORTH_IT * even]
    found = []
    for rows in heights:
        programs = -(-n // rows)
        for block_k in (64, 128):
            w_bytes, shared_bytes = rows * block_k * 2, (rows + tokens) * block_k * 2
            for stages in ring_stages(
                RING_BYTES, w_bytes=w_bytes, shared_bytes=shared_bytes, steps=-(-k // block_k), programs=programs,
                units=units, arch=arch, most=8,
            ):  # fmt: skip
                for warps in (2, 4):
                    shared = (stages - 1) * shared_bytes
                    if shared > shared_limit(arch):
                        continue
                    config = {"rows": rows, "tokens": tokens, "block_k": block_k, "warps": warps}
                    tile = Tile(
                        **config, groups=1, split=1, stages=stages, steps=-(-k // block_k), shared=shared, wide=False
                    )
                    cost = estimate_us(m, n, k, units, tile, FITTED, arch=arch)
                    found.append((cost, {**config, "stages": stages}))
    found.sort(key=lambda item: item[0])
    return found


def _busy(n: int, rows: int, units: int) -> float:
    """Share of the units' time that goes into rows of W there are, when each program takes as long as any other."""
    programs = -(-n // rows)
    return n / (rows * units * -(-programs // units))


def run(x: Any, w: Any, bias: Any, config: Config, workspace: Any = None) -> Any:
    """Y [M, N] from tensors x [M, K], w [N, K], bias [N] or None. See `gemmtuned.kernels.triton.python_launch`."""
    from gemmtuned.kernels.triton.python_launch import launch

    return launch(KERNEL, launch_record, x, w, bias, config, workspace)
