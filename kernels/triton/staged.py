"""M = 2 to 32: as fragments.py, with the program's slice of X brought to shared memory once, for all its warps (sm_90).

Y[M, N] = X[M, K] @ W[N, K].T + bias.  Where each warp loads its own X into registers, X takes as many loads as W at 8
tokens and twice as many at 16, all in flight at once.  Here the warps of a program have rows of W of their own, `rows`
each, and K in common.  Copies that no register waits for (cp.async) bring X in the order in which lanes read it,
16 bytes each: a warp reads 512 bytes side by side.

`split` > 1 cuts K over the programs of a cluster (cluster.py): a program's slice of X has to fit.  `ahead` and `chains`
as in fragments.py.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call,assignment,var-annotated"
# ruff: noqa: RUF005  (Triton knows no unpacking)

from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import MAX_CLUSTER
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.triton.cluster import (
    all_have_begun,
    barrier_of,
    begin,
    collect_and_store,
    end_of_memory,
    place_of,
)
from gemmtuned.kernels.triton.fragments import STEP_K, even_steps, of_parts, products, send_parts, store
from gemmtuned.kernels.triton.issued import issued, issued_and_copied
from gemmtuned.kernels.triton.launch import Axis, Config, Exchange, LaunchRecord, check_config, make_record
from gemmtuned.kernels.triton.limits import shared_limit
from gemmtuned.kernels.triton.space import filled, has_clusters, largest

NAME: Final = "staged"
KEYS: Final = ("rows", "tokens", "split", "warps", "ahead", "chains")
MAX_M: Final = 32
_WASTE: Final = 1.35  # at most this part of K is computed in vain, if not read, at the end of the last slice
_STAGED: Final = 110 << 10  # bytes of X, so that two programs fit
_BANDWIDTH: Final = 4.6e6  # bytes a us
_LATENCY_US: Final = 0.9  # bytes in flight over it are a unit's rate
_START_US: Final = 1.6
_EXCHANGE_US: Final = 0.1
_STEP_K = tl.constexpr(STEP_K)


@triton.jit
def _copy(to, source, left, wanted):
    """16 bytes of global memory to shared, where wanted is not negative; zeros where left is negative.

    Decided here, or the compiler makes a loop of its own for threads that copy and for those that write zeros.
    """
    tl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        .reg .s32 size;
        shr.s32 size, $3, 31;
        not.b32 size, size;
        and.b32 size, size, 16;
        setp.ge.s32 wanted, $4, 0;
        @wanted cp.async.cg.shared.global [$1], [$2], 16, size;
        mov.u32 $0, 0;
        }""",
        "=r,r,l,r,r", [to, source, left, wanted], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _read(at, like):
    """The 8 values at a lane's first address, as those of `like`."""
    return tl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [at], dtype=like.dtype, is_pure=False, pack=8,
    )  # fmt: skip


@triton.jit
def _stage(x, at, first, end, m, ldx, SIDES: tl.constexpr, STEPS: tl.constexpr, THREADS: tl.constexpr):
    """Ask for the slice of X from `first` to `end`, zeros behind it, as warps read it for each step and four tokens."""
    CHUNKS: tl.constexpr = 32 * SIDES * STEPS
    for i in tl.range(0, (CHUNKS + THREADS - 1) // THREADS, loop_unroll_factor=2):  # whole, it takes too many registers
        chunk = i * THREADS + tl.arange(0, THREADS)
        token = chunk // 32 % SIDES * 4 + chunk % 32 // 8
        k = first + chunk // (32 * SIDES) * _STEP_K + chunk % 8 * 8
        left = (m - 1 - token) | (end - 1 - k)
        source = x + tl.minimum(token, m - 1).to(tl.int64) * ldx + tl.minimum(k, end - 8)
        _copy(at + chunk * 16, source.to(tl.int64), left, CHUNKS - 1 - chunk)


@triton.jit
def staged(
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
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    CHAINS: tl.constexpr,
    BEHIND: tl.constexpr,
    CLUSTER: tl.constexpr,
):
    STEPS: tl.constexpr = (K + _STEP_K * SPLIT - 1) // (_STEP_K * SPLIT)
    GROUPS: tl.constexpr = (STEPS + AHEAD - 1) // AHEAD
    WHOLE: tl.constexpr = K == _STEP_K * STEPS * SPLIT and STEPS % AHEAD == 0
    BLOCK_N: tl.constexpr = ROWS * WARPS
    BLOCKS: tl.constexpr = ROWS // 8  # of a warp, of eight rows of W: four even, four odd ones
    SIDES: tl.constexpr = BLOCK_M // 4  # of four rows of X
    tile = tl.program_id(0) // CLUSTER
    part = tl.program_id(0) % CLUSTER
    if CLUSTER > 1:
        begin(part, BLOCK_M, BLOCK_N, CLUSTER, 2, True)
    place = tl.arange(0, 4 * WARPS)
    line = place % 4
    first_row = tile * BLOCK_N + place // 4 * ROWS
    first = part * (STEPS * _STEP_K)
    end = tl.minimum(first + STEPS * _STEP_K, K)
    ks = (first + tl.arange(0, _STEP_K))[None, :] + place[:, None] * 0
    w_rows = ()
    for b in tl.static_range(2 * BLOCKS):
        row = first_row + (b // 2) * 8 + 2 * line + b % 2
        # rows past the end read the last row again: no mask but for K, and their sums are never stored
        read = tl.minimum(row, N - 1) if N % BLOCK_N != 0 else row
        w_rows = w_rows + (w + read.to(tl.int64)[:, None] * ldw,)
    lane = (tl.arange(0, _STEP_K) // 8)[None, :]
    here = end_of_memory(True) - BEHIND - 512 * SIDES * GROUPS * AHEAD
    x_of_lane = here + (line[:, None] * 8 + lane) * 16
    sums = (tl.zeros((4 * WARPS, _STEP_K), tl.float32),) * (CHAINS * BLOCKS * SIDES)
    for group in tl.range(0, GROUPS):
        of_w = ()
        for u in tl.static_range(AHEAD):
            k = ks + (group * AHEAD + u) * _STEP_K
            for b in tl.static_range(2 * BLOCKS):
                if WHOLE:
                    of_w = of_w + (tl.load(w_rows[b] + k, eviction_policy="evict_first"),)
                else:
                    of_w = of_w + (tl.load(w_rows[b] + k, mask=k < end, other=0.0, eviction_policy="evict_first"),)
        if group == 0:
            issued()  # W first: it comes from farther
            _stage(x, here, first, end, m, ldx, SIDES, GROUPS * AHEAD, 32 * WARPS)
        nothing = issued_and_copied()
        begun = ()
        for i in tl.static_range(CHAINS * BLOCKS * SIDES):
            begun = begun + (sums[i] + nothing,)
        sums = begun
        for u in tl.static_range(AHEAD):
            of_x = ()
            for side in tl.static_range(SIDES):
                at = x_of_lane + ((group * AHEAD + u) * SIDES + side) * 512
                of_x = of_x + (_read(at, of_w[0]),)
            grown = ()
            for i in tl.static_range(CHAINS * BLOCKS * SIDES):
                if i // (BLOCKS * SIDES) == u % CHAINS:
                    even = of_w[2 * (u * BLOCKS + i // SIDES % BLOCKS)]
                    odd = of_w[2 * (u * BLOCKS + i // SIDES % BLOCKS) + 1]
                    grown = grown + (products(even, odd, of_x[i % SIDES], sums[i]),)
                else:
                    grown = grown + (sums[i],)
            sums = grown
    if CLUSTER > 1:
        all_have_begun(True)
    for b in tl.static_range(BLOCKS):
        for side in tl.static_range(SIDES):
            total = sums[b * SIDES + side]
            for chain in tl.static_range(1, CHAINS):
                total += sums[(chain * BLOCKS + b) * SIDES + side]
            total = of_parts(total)
            if CLUSTER > 1:
                token = side * 4 + lane % 4 + place[:, None] * 0
                row = (place // 4 * ROWS + b * 8 + 2 * line)[:, None]
                to = place_of(token, row, lane // 4, part, BLOCK_M, BLOCK_N, CLUSTER, 2, True)
                send_parts(to, barrier_of(token, BLOCK_M, CLUSTER, True), total)
            else:
                i = tl.arange(0, 8 * WARPS)
                row = (tile * BLOCK_N + i // 8 * ROWS + b * 8 + i % 8)[:, None]
                store(_tile_of(total, WARPS), row, side * 4 + tl.arange(0, 4)[None, :], bias, y, m, N)
    if CLUSTER > 1:
        collect_and_store(False, tile * BLOCK_N, 0, part, bias, y, m, N, BLOCK_M, BLOCK_N, CLUSTER, 2, True)


@triton.jit
def _tile_of(sums, WARPS: tl.constexpr):
    """[8 rows of each warp, 4 tokens] of what `of_parts` gives, added up over parts."""
    # [warp, pair of rows, part, token, four of which the first is not zero, row of the pair]
    pairs = tl.sum(tl.sum(tl.reshape(sums, (WARPS, 4, 2, 4, 4, 2)), 4), 2)  # [warp, pair, token, row]
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (8 * WARPS, 4))


KERNEL: Final = staged


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    check_config(config, KEYS, NAME)
    if problem.m > min(MAX_M, config["tokens"]):
        raise CandidateFailed(f"{problem} {NAME}: holds {config['tokens']} rows of X (at most {MAX_M})")
    for name, of in (("rows", 8), ("tokens", 4), ("split", 1), ("warps", 1)):
        if config[name] % of or not config[name]:
            raise CandidateFailed(f"{NAME}: {name} is {config[name]}, expected a multiple of {of}")
    if problem.k % 8:
        raise CandidateFailed(f"{problem} {NAME}: reads 8 values at a time, K is no multiple")
    if not 1 <= config["chains"] <= config["ahead"]:
        raise CandidateFailed(f"{NAME}: chains is {config['chains']}, expected 1 to the {config['ahead']} steps ahead")
    rows = config["rows"] * config["warps"]
    exchange = Exchange(config["tokens"], rows, 2) if config["split"] > 1 else None
    return make_record(
        NAME,
        problem,
        grid=(Axis("n", rows), Axis("", 1), Axis("", 1)),
        num_warps=config["warps"],
        num_stages=1,
        constants={
            "ROWS": config["rows"],
            "BLOCK_M": config["tokens"],
            "WARPS": config["warps"],
            "AHEAD": config["ahead"],
            "CHAINS": config["chains"],
            "BEHIND": exchange.bytes(config["split"]) if exchange else 0,
            "HOLD": 1,
        },
        exchange=exchange,
        split=config["split"],
        tile_values=rows * config["tokens"],
        own_shared_bytes=_staged_bytes(problem.k, config),
    )


def _staged_bytes(k: int, config: Config) -> int:
    """Shared memory of a program's slice of X, with zeros up to the last group of steps."""
    steps = -(-k // (STEP_K * config["split"]))
    return -(-steps // config["ahead"]) * config["ahead"] * STEP_K * config["tokens"] * 2


def scored(m: int, n: int, k: int, units: int, *, arch: str = "sm_90") -> list[tuple[float, dict[str, int]]]:
    """(estimated us, config) of the candidates for a device with this many units, the fastest first."""
    if not 1 < m <= MAX_M or k % 8 or not has_clusters(arch):
        return []
    tokens = max(4, 1 << (m - 1).bit_length())
    found = []
    for rows in (8, 16):
        for warps in (1, 2, 4, 8):
            tiles = -(-n // (rows * warps))
            for split in range(1, MAX_CLUSTER + 1):
                steps = -(-k // (STEP_K * split))
                busy = tiles * split * warps / units
                if steps * STEP_K * split > max(_WASTE * k, k + STEP_K) or (busy > 32 and split > 2):
                    continue
                for ahead in {even_steps(steps, most) for most in (4, 8, 14)}:
                    chains = 2 if rows * tokens <= 64 and ahead >= 4 else 1
                    config = {"rows": rows, "tokens": tokens, "split": split, "warps": warps, "ahead": ahead}
                    config |= {"chains": chains}
                    registers = 48 + rows * ahead + rows * tokens // 4 * chains + 2 * tokens
                    shared = _staged_bytes(k, config)
                    shared += Exchange(tokens, rows * warps, 2).bytes(split) if split > 1 else 0
                    if registers <= 240 and shared <= min(_STAGED, shared_limit(arch)):
                        found.append((_estimate_us(n, k, units, config, registers, shared, arch), busy, config))
    enough = min(1.0, max((busy for _, busy, _ in found), default=0.0))
    return sorted(((us, config) for us, busy, config in found if busy >= enough), key=lambda item: item[0])


def _estimate_us(n: int, k: int, units: int, config: dict[str, int], registers: int, shared: int, arch: str) -> float:
    """As space.estimate_us, for W in registers and X in shared memory; the constants are guesses, not measured."""
    rows, split, warps, ahead = (config[key] for key in ("rows", "split", "warps", "ahead"))
    steps = -(-k // (STEP_K * split))
    tile = rows * warps
    at_once = filled(units, split) if split > 1 else units
    busiest = -(-(-(-n // tile) * split) // at_once)
    here = min(busiest, max(1, shared_limit(arch) // (shared + 1024)), 64 // warps, max(1, 2048 // (warps * registers)))
    each = steps * STEP_K * 2  # bytes of a row in a program
    memory = n * k * 2 / _BANDWIDTH
    loads = busiest * tile * each / min(1.15 * _BANDWIDTH / units, here * tile * 128 * min(ahead, steps) / _LATENCY_US)
    waits = 0.15 * -(-busiest // max(here, 1))  # until X has come, in each round of programs
    return _START_US + largest(memory, loads) + waits + (_EXCHANGE_US + 0.003 * 2 * split if split > 1 else 0.0)


def run(x: Any, w: Any, bias: Any, config: Config, workspace: Any = None) -> Any:
    """Y [M, N] from tensors x [M, K], w [N, K], bias [N] or None. See `gemmtuned.kernels.triton.python_launch`."""
    from gemmtuned.kernels.triton.python_launch import launch

    return launch(KERNEL, launch_record, x, w, bias, config, workspace)
