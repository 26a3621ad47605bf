"""Split-K inside one launch: the last thread block of a tile adds up what all of them left in the workspace.

No thread block waits for another, so nothing can hang whatever order the device runs them in.  The partial sums
are added in the order of the slices, so results are bitwise equal from run to run.  Where thread blocks can be in a
cluster they need not go through memory: cluster.py.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def arrived_last(counters, tile, SPLIT: tl.constexpr):
    """Count this thread block in for its tile; true in the one that arrives last, which must call `reset`.

    The barrier puts all threads' stores before the one atomic; acq_rel makes them visible to the last thread block.
    """
    tl.debug_barrier()
    return tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1


@triton.jit
def reset(counters, tile):
    """Leave the counter as the next launch expects it."""
    tl.store(counters + tile, 0)


@triton.jit
def store_sums(sums, bias, y, at, rows, there, inside):
    """Store sums at y + at, where `inside`, with the bias of their rows of W.

    bias: None, or a pointer that is read where the rows are `there`.  rows, there: shaped to be broadcast to the sums.
    """
    if bias is not None:
        sums += tl.load(bias + rows, mask=there, other=0.0).to(tl.float32)
    tl.store(y + at, sums.to(y.dtype.element_ty), mask=inside)


@triton.jit
def add_slices_and_store(
    sums, partials, counters, tile, part, places, bias, y, at, rows, there, inside, SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Add up what the SPLIT thread blocks of a tile have of its SIZE sums, and store it as `store_sums` does.

    places: of the sums of the tile's first slice in the workspace `partials`; that of the next lies SIZE further.  They
    and `counters` are looked at where SPLIT is more than 1.
    """
    if SPLIT == 1:
        store_sums(sums, bias, y, at, rows, there, inside)
    else:
        slices = partials + places
        tl.store(slices + part * SIZE, sums)
        if arrived_last(counters, tile, SPLIT):
            total = tl.zeros_like(sums)
            for i in tl.static_range(SPLIT):
                total += tl.load(slices + i * SIZE, cache_modifier=".cg")
            store_sums(total, bias, y, at, rows, there, inside)
            reset(counters, tile)
