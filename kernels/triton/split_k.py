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
