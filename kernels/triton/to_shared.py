"""Which tile parameters are worth trying, and how long each will take, estimated.

Rules make the space small, read off some 10,000 timings on an H200 (20 weights, M = 1 to 64).  K is split so that the
thread blocks fill one, two or three waves of the device: a third of a wave more costs a whole one.  In clusters more
cuts are worth trying, for one costs less and no size of a cluster fills a device in the same way as another.  The ring
of loads holds 20 to 96 KiB of W per SM: less cannot hide the latency of memory, more fills slower than it helps.  What
is left, some 15 to 310 candidates, is ordered by the estimate, whose constants were fitted to the same timings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gemmtuned.configs.launch import PORTABLE_CLUSTER
from gemmtuned.kernels.arch import filled, has_clusters, shared_limit
from gemmtuned.kernels.estimates import largest

WAVES: Final = (1, 2, 3)
MAX_SPLIT: Final = 16
_CLUSTER_WAVES: Final = (0.6, 3.0)
_WASTE: Final = 1.1  # at most this part of K is computed in vain at the end of the last slice
_EVEN: Final = 0.85  # an even split needs no mask in the loop: worth this many thread blocks fewer


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants that were fitted for one kernel's estimate; times in us, rates in bytes per us.

    bandwidth: of the whole device.  latency: an SM's rate is its bytes in flight divided by this.  unit_l2: rate of one
    SM from L2.  reread: weight of X in the traffic of L2.  step: time of one step of the loop, without what the
    warp-group instruction does by itself; mma: how it grows with a thread's share of the products.  reduce, partial_mb,
    tail_10kb: time of the sum over slices, and what it takes for the bytes of all partial sums and of one tile's.
    exchange, sent_10kb: time of the sum in a cluster, and for the bytes that a thread block sends.  stage, warp: for
    each more of them.  masked: loss of a masked loop, in steps of 3 %.
    """

    bandwidth: float
    latency: float
    unit_l2: float
    start: float
    step: float
    reduce: float
    partial_mb: float
    tail_10kb: float
    stage: float
    reread: float
    masked: float
    mma: float
    warp: float
    exchange: float = 0.0
    sent_10kb: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One candidate as the estimate sees it: a thread block reads rows x block_k of W `groups` times per step.

    groups: warps that have a share of K of their own, else 1.  shared: bytes per thread block.
    """

    rows: int
    tokens: int
    block_k: int
    groups: int
    split: int
    warps: int
    stages: int
    steps: int
    shared: int
    wide: bool = False
    cluster: bool = False


def splits(tiles: int, k: int, step_k: int, units: int) -> list[int]:
    """Into how many slices to cut K, so that `tiles` tiles of Y fill WAVES waves of SMs; step_k: K of one step."""
    found = []
    for waves in WAVES:
        allowed = [1]
        for split in range(2, MAX_SPLIT + 1):
            steps = -(-k // (step_k * split))
            if tiles * split <= waves * units and steps >= 2 and steps * step_k * split <= _WASTE * k:
                allowed.append(split)
        most = allowed[-1]
        even = [split for split in allowed if split >= _EVEN * most and k % (step_k * split) == 0]
        found.append(even[-1] if even else most)
    return list(dict.fromkeys(found))


def cuts(tiles: int, k: int, step_k: int, units: int, *, arch: str) -> list[tuple[int, int]]:
    """(split, cluster) worth trying: K cut over the blocks of a cluster, over memory where clusters do not fit."""
    over_memory = splits(tiles, k, step_k, units)
    if not has_clusters(arch):
        return [(split, 0) for split in over_memory]
    found = []
    for split in range(2, PORTABLE_CLUSTER + 1):
        steps = -(-k // (step_k * split))
        waves = tiles * split / units
        if steps >= 2 and steps * step_k * split <= _WASTE * k and _CLUSTER_WAVES[0] <= waves <= _CLUSTER_WAVES[1]:
            found.append((split, 1))
    for split in over_memory:
        blocks = tiles * split
        if (split, 1) not in found or -(-blocks // filled(units, split)) > -(-blocks // units):
            found.append((split, 0))
    return found


def ring_stages(
    ring_bytes: Sequence[int],
    *,
    w_bytes: int,
    shared_bytes: int,
    steps: int,
    blocks: int,
    units: int,
    arch: str,
    most: int,
) -> list[int]:
    """Numbers of stages whose loads of W add up to each of ring_bytes per SM, as far as shared memory allows.

    w_bytes, shared_bytes: W, and W and X, that a thread block loads in one step.  most: stages.  One stage is computed
    on while the others are loaded.  AMD's pipeline has no more than two.
    """
    if arch.startswith("gfx"):
        return [2]
    here = min(-(-blocks // units), 4)
    found = set()
    for size in ring_bytes:
        loads = max(2, min(round(size / (here * w_bytes)), max(steps, 2), most - 1))
        while loads > 2 and (loads * shared_bytes + 1024) * here > shared_limit(arch):
            loads -= 1
        if loads * shared_bytes <= shared_limit(arch):
            found.add(loads + 1)
    return sorted(found)


def estimate_us(m: int, n: int, k: int, units: int, tile: Tile, c: Constants, *, arch: str) -> float:
    """Device time in us: the slowest of memory, one SM's loads in flight, L2 and the loop, plus start and reduction."""
    blocks = -(-n // tile.rows) * -(-m // tile.tokens) * tile.split
    resident = max(1, min(16, shared_limit(arch) // (tile.shared + 1024), 64 // tile.warps))
    at_once = filled(units, tile.split) if tile.cluster else units
    busiest = -(-blocks // at_once)  # thread blocks of the busiest SM
    here = min(busiest, resident)
    read = tile.groups * tile.rows * tile.block_k * 2  # bytes of W in a step
    whole_k = tile.steps * tile.block_k * tile.groups * tile.split
    memory = n * k * 2 * (whole_k / k) / c.bandwidth
    in_flight = here * min(tile.stages - 1, tile.steps) * read
    w_bytes = busiest * tile.steps * read
    x_bytes = busiest * tile.steps * tile.groups * tile.tokens * tile.block_k * 2
    loads = w_bytes / min(1.4 * c.bandwidth / units, in_flight / c.latency)
    cache = (w_bytes + c.reread * x_bytes) / c.unit_l2
    mma = tile.rows * tile.tokens * tile.block_k / 65536 / (tile.warps / tile.groups)
    step = 0.3 * c.mma * mma if tile.wide else c.step * (1 + c.mma * mma)
    loop = step * tile.steps * busiest / here
    time = largest(memory, loads, cache, loop)
    if whole_k != k:
        time *= 1 + 0.03 * c.masked
    if tile.cluster:
        time += c.exchange + c.sent_10kb * (tile.groups * tile.rows * tile.tokens * 4 / 1e4)
    elif tile.split > 1:
        partial_mb = tile.split * tile.tokens * -(-m // tile.tokens) * n * 4 / 1e6
        tail_10kb = tile.split * tile.rows * tile.tokens * 4 / 1e4
        time += c.reduce + c.partial_mb * partial_mb + c.tail_10kb * tail_10kb
    return c.start + time + 0.1 * (c.stage * tile.stages + c.warp * tile.warps)
