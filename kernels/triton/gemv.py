"""M = 1: dot products, on the ordinary FMA units or (`mma` 1) by the tensor core; reading W is most of the work.

y[1, N] = x[1, K] @ W[N, K].T + bias.  A thread block owns `rows` rows of W and walks K in steps of `block_k`, each
thread with 16-byte loads straight to registers: nothing is shared between threads until the final sum.  `split` > 1
cuts K where N alone has too few rows for all units, and the last thread block adds up.  The tensor core (diagonal.py)
takes a tenth of the instructions for the products, which shows where all data arrive at about the same time.

`hold` 1 and 2 keep the loads of `unroll` steps on their way together (load_barrier.py), where the compiler would wait
for some before it issues the others: with 1 those of W and x, with 2 those of W, then those of x.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call,assignment"
# ruff: noqa: RUF005  (Triton knows no unpacking)

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.estimates import even_steps, fits, largest
from gemmtuned.kernels.own_kernel import Config, Parameter, by_size
from gemmtuned.kernels.triton.diagonal import (
    VALUES,
    WARPS_ADDED_UP,
    add_products,
    has_diagonal,
    on_diagonal,
    over_warps,
)
from gemmtuned.kernels.triton.kernel import TritonKernel
from gemmtuned.kernels.triton.launch import Axis, LaunchRecord, make_record
from gemmtuned.kernels.triton.load_barrier import issued
from gemmtuned.kernels.triton.split_k import add_slices_and_store
from gemmtuned.kernels.triton.thread_access import load_first, store_first

_VALUES = tl.constexpr(VALUES)
_MOST_WARPS = tl.constexpr(max(WARPS_ADDED_UP))


@dataclass(frozen=True, slots=True)
class Costs:
    """Constants of the estimate in us; bandwidth in bytes per us.

    latency: the rate is the bytes in flight divided by this.  load: time per value that a thread reads at once.
    beyond: time for what is read beyond the end of K, by its share of K.  whole: what is added where all steps are
    taken at once.
    """

    bandwidth: float
    start: float
    latency: float
    load: float
    row: float
    warp: float
    beyond: float
    whole: float


FITS: Final = fits(__file__, Costs)


@triton.jit
def _of_w(w_rows, k, K: tl.constexpr, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(w_rows + k[None, :], eviction_policy="evict_first")
    else:
        return tl.load(w_rows + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _of_x(x, k, K: tl.constexpr, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(x + k)
    else:
        return tl.load(x + k, mask=k < K, other=0.0)


@triton.jit
def _add(acc, wt, xt, MMA: tl.constexpr):
    if MMA:
        return add_products(wt, xt[None, :], acc)
    else:
        return acc + wt.to(tl.float32) * xt.to(tl.float32)[None, :]


@triton.jit
def gemv(
    x, w, bias, y, partials, counters, ldw, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, UNROLL: tl.constexpr, MMA: tl.constexpr,
    HOLD: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = (K + BLOCK_K * SPLIT - 1) // (BLOCK_K * SPLIT)
    EVEN_K: tl.constexpr = K == STEPS * BLOCK_K * SPLIT
    WARPS: tl.constexpr = BLOCK_K // _VALUES
    ONE: tl.constexpr = MMA and BLOCK_N == 1 and SPLIT == 1 and WARPS > 1 and WARPS <= _MOST_WARPS
    tile = tl.program_id(0)
    part = tl.program_id(1)
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    # rows past the end read the last row again: no mask on the loads, and their sums are never stored
    read = tl.minimum(rows, N - 1) if N % BLOCK_N != 0 else rows
    ks = part * (STEPS * BLOCK_K) + tl.arange(0, BLOCK_K)
    w_rows = w + read.to(tl.int64)[:, None] * ldw
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    if ONE and bias is not None:
        started = load_first(bias + tile + ks[None, :] * 0)
    if HOLD == 0:
        for step in tl.range(0, STEPS, loop_unroll_factor=UNROLL):
            k = ks + step * BLOCK_K
            acc = _add(acc, _of_w(w_rows, k, K, EVEN_K), _of_x(x, k, K, EVEN_K), MMA)
    else:
        WHOLE: tl.constexpr = EVEN_K and STEPS % UNROLL == 0
        for group in tl.range(0, (STEPS + UNROLL - 1) // UNROLL):
            of_w = ()
            of_x = ()
            for u in tl.static_range(UNROLL):
                k = ks + (group * UNROLL + u) * BLOCK_K
                of_w = of_w + (_of_w(w_rows, k, K, WHOLE),)
                if HOLD == 1:
                    of_x = of_x + (_of_x(x, k, K, WHOLE),)
            acc += issued()
            if HOLD == 2:  # x after W: it comes from nearer
                for u in tl.static_range(UNROLL):
                    of_x = of_x + (_of_x(x, ks + (group * UNROLL + u) * BLOCK_K, K, WHOLE),)
                acc += issued()
            for u in tl.static_range(UNROLL):
                acc = _add(acc, of_w[u], of_x[u], MMA)
    if MMA:
        acc = on_diagonal(acc)
    if ONE:  # every thread has the total, the first stores it
        total = over_warps(acc, WARPS)
        if bias is not None:
            total += started
        store_first(y + tile + ks[None, :] * 0, total, (ks == 0)[None, :])
    else:
        add_slices_and_store(
            tl.sum(acc, 1), partials, counters, tile, part, tile * (SPLIT * BLOCK_N) + tl.arange(0, BLOCK_N), bias, y,
            rows, rows, inside, inside, BLOCK_N, SPLIT,
        )  # fmt: skip


def launch_record(config: Config, problem: Problem) -> LaunchRecord:
    """How this config runs the problem. Raises CandidateFailed when it cannot."""
    config = KERNEL.checked(config)
    if problem.m != 1:
        raise CandidateFailed(f"{problem} {KERNEL.name}: runs M = 1 only")
    if config["hold"] and config["split"] > 1:  # a last group of steps may reach into the next slice
        raise CandidateFailed(f"{KERNEL.name}: loads are held together where K is not cut, split is {config['split']}")
    if config["mma"] and (config["block_k"] != VALUES * config["warps"] or problem.k % 8):
        raise CandidateFailed(
            f"{problem} {KERNEL.name}: the tensor core takes {VALUES} values a warp and a K of whole loads, block_k is "
            f"{config['block_k']} for {config['warps']} warps"
        )
    return make_record(
        KERNEL.name,
        problem,
        grid=(Axis("n", config["rows"]), Axis("", config["split"]), Axis("", 1)),
        num_warps=config["warps"],
        num_stages=1,
        constants={
            "BLOCK_N": config["rows"],
            "BLOCK_K": config["block_k"],
            "UNROLL": config["unroll"],
            "MMA": config["mma"],
            "HOLD": config["hold"],
        },
        split=config["split"],
        tile_values=config["rows"],
        drop=("m", "ldx"),
        own_ptx=bool(config["mma"] or config["hold"]),
    )


def scored(m: int, n: int, k: int, units: int, *, arch: str = "sm_90") -> list[tuple[float, dict[str, int]]]:
    """(estimated us, config) of the candidates for a device with this many units, the fastest first."""
    if m != 1:
        return []
    lanes = _lanes(arch)
    found = list(_held(n, k, units)) if has_diagonal(arch) and k % 8 == 0 else []
    found = found or list(_ordinary(n, k, units, lanes))  # also where a warp's load is much more than all of K
    costs = [(estimate(FITS[fit_of(config)], m, n, k, units, config, arch=arch), config) for config in found]
    return sorted(costs, key=lambda item: item[0])


def _ordinary(n: int, k: int, units: int, lanes: int) -> Iterator[dict[str, int]]:
    for rows in (1, 2, 4, 8):
        if rows > 1 and n < 0.75 * rows * units:
            continue
        for block_k in (256, 512, 1024, 2048, 4096, 8192):
            for warps in (1, 2, 4, 8):
                a_thread = rows * block_k // (warps * lanes)
                if 512 < block_k >= 2 * k or not 8 <= a_thread <= 128:
                    continue  # a thread loads 16 bytes at a time, and its sums stay in registers
                for split in (1, 2, 4, 8) if rows == 1 else (1,):
                    steps = -(-k // (block_k * split))
                    if split > 1 and (n * split > 2 * units or steps * block_k * split > 1.1 * k):
                        continue
                    for unroll in _unrolls(steps, a_thread, (8, 16)):
                        yield {"rows": rows, "block_k": block_k, "split": split, "warps": warps, "unroll": unroll}


def _held(n: int, k: int, units: int) -> Iterator[dict[str, int]]:
    """Configs that hold their loads together.

    A thread makes one load of each row of W in a step: a wider block is the same as more steps at once.
    """
    for rows in (1, 2, 4):
        if rows > 1 and n < 0.75 * rows * units:
            continue
        for warps in (1, 2, 4, 8):
            block_k = VALUES * warps
            steps = -(-k // block_k)
            if steps * block_k > 1.25 * k:
                continue
            for unroll in _unrolls(steps, 8 * rows, (4, 8, 16)):
                for mma, hold in ((1, 1), (1, 2), (0, 1)):
                    config = {"rows": rows, "block_k": block_k, "split": 1, "warps": warps, "unroll": unroll}
                    yield config | {"mma": mma, "hold": hold}


def _unrolls(steps: int, a_thread: int, loads: Sequence[int]) -> list[int]:
    """Numbers of steps at once that put about this many loads per thread in flight.

    Where a number that divides all steps evenly is not much smaller, that one is taken.
    """
    return sorted({even_steps(steps, max(1, 8 * count // a_thread)) for count in loads})


def _lanes(arch: str) -> int:
    return 64 if arch.startswith("gfx") else 32


def fit_of(config: Config) -> str:
    """As estimates.py says."""
    return "tensor_core" if config.get("mma") else "held" if config.get("hold") else "ordinary"


def estimate(costs: Costs, m: int, n: int, k: int, units: int, config: Config, *, arch: str = "sm_90") -> float:
    """As to_shared.estimate_us, for loads that go to registers."""
    rows, block_k, split, warps, unroll = (config[key] for key in ("rows", "block_k", "split", "warps", "unroll"))
    lanes = _lanes(arch)
    a_thread = rows * block_k // (warps * lanes)
    steps = -(-k // (block_k * split))
    at_once = min(unroll, steps)
    busiest = -(-(-(-n // rows) * split) // units)
    sums = 8 * rows if config.get("mma") else a_thread
    registers = 24 + sums + (a_thread + a_thread // rows) * unroll // 2  # and W and X on their way
    here = min(busiest, 32, 64 // warps, max(1, 2048 // (warps * min(registers, 255))))
    memory = n * k * 2 / costs.bandwidth
    rate = min(1.15 * costs.bandwidth / units, here * rows * min(block_k, k) * 2 * at_once / costs.latency)
    loads = busiest * rows * k / split * 2 / rate
    beyond = steps * block_k * split / k - 1
    other = costs.load * a_thread * unroll + costs.row * rows + costs.warp * warps + costs.beyond * beyond
    return costs.start + largest(memory, loads) + other + costs.whole * (unroll >= steps) + (1.0 if split > 1 else 0.0)


KERNEL: Final = TritonKernel(
    name="gemv",
    function=gemv,
    families=("dense",),
    archs=("sm_70+", "gfx9*"),
    parameters=(
        Parameter("rows", power=True),
        Parameter("block_k", power=True),
        Parameter("split"),
        Parameter("warps", most=32, power=True),
        Parameter("unroll"),
        Parameter("mma", 0, 1, default=0),
        Parameter("hold", 0, 2, default=0),
    ),
    scored=by_size(scored),
    tokens=1,
    record=launch_record,
)
