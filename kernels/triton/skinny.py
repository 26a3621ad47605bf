"""M = 2 to 4: the GEMV with a sum for each row of X, on the ordinary FMA units.

Y[M, N] = X[M, K] @ W[N, K].T + bias.  As gemv.py: a program owns `rows` rows of W and walks all of K, each thread with
16-byte loads straight to registers, those of W `ahead` steps before they are needed.  What is read of W is multiplied
with every row of X at once, so nothing is shared until the final sums, and K is never cut over programs.  Where N
is small this spares what tensor cores make necessary there: cutting K, and a second round through memory to add up.
What is left is arithmetic: about three instructions for each value of W and as many for each of its products; at M = 4
they take 1.3 times as long as reading W and more where N is large.
"""
# mypy: disable-error-code="misc,assignment,untyped-decorator,no-untyped-def,no-untyped-call"
# ruff: noqa: RUF005  Triton knows no stars

from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.triton.launch import Axis, Config, LaunchRecord, check_config, make_record
from gemmtuned.kernels.triton.space import largest

NAME: Final = "skinny"
KEYS: Final = ("rows", "tokens", "block_k", "warps", "ahead")
MAX_M: Final = 4
_BANDWIDTH: Final = 4.76e6  # bytes a us
_LATENCY_US: Final = 0.55  # bytes in flight over this is the rate
_UNIT_ISSUE: Final = 220e3  # instructions of a lane a us and unit: 128 a cycle
# instructions for each value of W, each product and each value of X; fitted to 160 timings at M = 4 on an H200
_OF_W: Final = 3.3
_OF_PRODUCT: Final = 3.0
_OF_X: Final = 1.3


@triton.jit
def skinny(
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
    BLOCK_K: tl.constexpr,
    TOKENS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EVEN_K: tl.constexpr = K == STEPS * BLOCK_K
    ROOM: tl.constexpr = 2 if TOKENS <= 2 else 4
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # past the end the last row is read again, of W and of X: no mask but for K, and those sums are never stored
    read = tl.minimum(rows, N - 1) if N % BLOCK_N != 0 else rows
    ks = tl.arange(0, BLOCK_K)
    w_rows = w + read.to(tl.int64)[:, None] * ldw
    sums = (tl.zeros((BLOCK_N, BLOCK_K), tl.float32),) * TOKENS
    coming = ()
    for step in tl.static_range(AHEAD):
        coming = coming + (_w_of(w_rows, ks, step, STEPS, K, BLOCK_K, EVEN_K),)
    for step in tl.range(0, STEPS, loop_unroll_factor=AHEAD):  # unrolled, the queue is but names of registers
        wt = coming[0].to(tl.float32)
        left = ()
        for i in tl.static_range(1, AHEAD):
            left = left + (coming[i],)
        coming = left + (_w_of(w_rows, ks, step + AHEAD, STEPS, K, BLOCK_K, EVEN_K),)
        k = ks + step * BLOCK_K
        grown = ()
        for token in tl.static_range(TOKENS):
            x_row = x + tl.minimum(token, m - 1).to(tl.int64) * ldx
            xt = tl.load(x_row + k) if EVEN_K else tl.load(x_row + k, mask=k < K, other=0.0)
            grown = grown + (sums[token] + wt * xt.to(tl.float32)[None, :],)
        sums = grown
    total = tl.reshape(tl.sum(_side_by_side(sums, TOKENS, ROOM), 1), (BLOCK_N, ROOM))
    rows = rows[:, None]
    tokens = tl.arange(0, ROOM)[None, :]
    if bias is not None:
        total += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(y + tokens * N + rows, total.to(y.dtype.element_ty), mask=(rows < N) & (tokens < m))


@triton.jit
def _w_of(w_rows, ks, step, STEPS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """W of one step, zeros after the last one."""
    k = ks + step * BLOCK_K
    if EVEN_K:
        return tl.load(w_rows + k[None, :], mask=step < STEPS, other=0.0, eviction_policy="evict_first")
    else:
        return tl.load(w_rows + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _side_by_side(sums, TOKENS: tl.constexpr, ROOM: tl.constexpr):
    """[.., 2] or [.., 2, 2] of the sums in the order of tokens, so that one reduction serves all."""
    if ROOM == 2:
        return _pair(sums, 0, 1, TOKENS)
    else:
        return tl.join(_pair(sums, 0, 2, TOKENS), _pair(sums, 1, 3, TOKENS))


@triton.jit
def _pair(sums, a: tl.constexpr, b: tl.constexpr, TOKENS: tl.constexpr):
    return tl.join(_sum_of(sums, a, TOKENS), _sum_of(sums, b, TOKENS))


@triton.jit
def _sum_of(sums, token: tl.constexpr, TOKENS: tl.constexpr):
    return sums[token if token < TOKENS else 0]  # what is beyond the last one is not stored


KERNEL: Final = skinny


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    check_config(config, KEYS, NAME)
    if problem.m > config["tokens"] or config["tokens"] > MAX_M:
        raise CandidateFailed(f"{problem} {NAME}: holds {config['tokens']} rows of X (at most {MAX_M})")
    return make_record(
        NAME,
        problem,
        grid=(Axis("n", config["rows"]), Axis("", 1), Axis("", 1)),
        num_warps=config["warps"],
        num_stages=1,
        constants={
            "BLOCK_N": config["rows"],
            "BLOCK_K": config["block_k"],
            "TOKENS": config["tokens"],
            "AHEAD": config["ahead"],
        },
        split=1,
        tile_values=config["rows"] * config["tokens"],
    )


def scored(m: int, n: int, k: int, units: int, *, arch: str = "sm_90") -> list[tuple[float, dict[str, int]]]:
    """(estimated us, config) of the candidates for a device with this many units, the fastest first."""
    if not 1 < m <= MAX_M:
        return []
    lanes = 64 if arch.startswith("gfx") else 32
    found = []
    for rows in (1, 2, 4):
        if rows > 1 and n < 0.75 * rows * units:
            continue
        for block_k in (512, 1024, 2048, 4096):
            if not (1024 <= block_k < 2 * k or block_k == 512 >= k // 2):
                continue
            for warps in (2, 4, 8):
                a_thread = rows * block_k // (warps * lanes)
                if not 8 * rows <= a_thread <= 32:
                    continue  # a thread's loads are 16 bytes, and its sums stay in registers
                steps = -(-k // block_k)
                for ahead in (2, 4, 8):
                    registers = 40 + a_thread * m + a_thread // rows * m // 2 + a_thread * ahead // 2
                    if (ahead > 2 and ahead > steps + 1) or registers > 240:
                        continue
                    config = {"rows": rows, "tokens": m, "block_k": block_k, "warps": warps, "ahead": ahead}
                    found.append((_estimate_us(m, n, units, config, steps, registers), config))
    found.sort(key=lambda item: item[0])
    return found


def _estimate_us(m: int, n: int, units: int, config: dict[str, int], steps: int, registers: int) -> float:
    """The slowest of memory, a unit's loads in flight and its instructions, plus start."""
    rows, warps = config["rows"], config["warps"]
    k = steps * config["block_k"]
    programs = -(-n // rows)
    busiest = -(-programs // units)
    here = min(busiest, 64 // warps, max(1, 2048 // (warps * registers)))
    memory = n * 2 * k / _BANDWIDTH
    in_flight = here * rows * config["block_k"] * 2 * min(config["ahead"], steps)
    loads = busiest * rows * k * 2 / min(1.3 * _BANDWIDTH / units, in_flight / _LATENCY_US)
    issue = busiest * rows * k * (_OF_W + _OF_PRODUCT * m + _OF_X * m / rows) / _UNIT_ISSUE
    return 2.3 + largest(memory, loads, issue) + 0.02 * rows * m


def run(x: Any, w: Any, bias: Any, config: Config, workspace: Any = None) -> Any:
    """Y [M, N] from tensors x [M, K], w [N, K], bias [N] or None. See `gemmtuned.kernels.triton.python_launch`."""
    from gemmtuned.kernels.triton.python_launch import launch

    return launch(KERNEL, launch_record, x, w, bias, config, workspace)
