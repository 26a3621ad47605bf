"""Split-K inside one cluster (NVIDIA, sm_90 and later): programs of a tile read each other's sums from shared memory.

The programs of a cluster are on the device at the same time and their shared memories are one address space, so that
no sum goes through the device's memory: each program leaves its own in its shared memory, all meet at a barrier, and
each adds up and stores its part of the tile.  Sums are added in the order of the slices, so results are bitwise equal
from run to run.  A cluster that is launched runs whole or not at all: nothing can hang.

Triton has no words for this, so it is PTX (ISA 7.8: mapa, ld.shared::cluster, barrier.cluster).  The memory is the
kernel's own, whose loads are done by then: `global_smem` is what Triton calls it.  launch_record's cluster must be
SPLIT, along the grid's first axis.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def leave(at, values):
    """Put fp32 `values` into this program's shared memory, `at` bytes from its start."""
    tl.inline_asm_elementwise(
        "{ .reg .u32 a; mov.u32 a, global_smem; add.u32 a, a, $1; st.shared.f32 [a], $2; mov.u32 $0, 0; }",
        "=r,r,f", [at, values], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def fetch(at, rank):
    """fp32 values from the shared memory of this cluster's program `rank`, `at` bytes from its start."""
    return tl.inline_asm_elementwise(
        "{ .reg .u32 a; mov.u32 a, global_smem; add.u32 a, a, $1; mapa.shared::cluster.u32 a, a, $2; "
        "ld.shared::cluster.f32 $0, [a]; }",
        "=f,r,r", [at, rank], dtype=tl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def arrive(tile):
    """This program has done what the others of its cluster wait for."""
    tl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned; mov.u32 $0, $1;",
        "=r,r", [tile], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait(tile):
    """Until all programs of the cluster have arrived."""
    tl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire.aligned; mov.u32 $0, $1;",
        "=r,r", [tile], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


PAD = tl.constexpr(4)  # fp32 values behind each token's: what a warp leaves at once lies in different banks


@triton.jit
def add_up_and_store(
    sums,
    rows,
    tokens,
    copies,
    first_row,
    first_token,
    part,
    bias,
    y,
    m,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Add up ROWS x TOKENS `sums` over the cluster's programs, and over COPIES that each has; store them in y.

    rows, tokens, copies: what each of `sums` is, counted from 0, shaped to be broadcast.
    """
    WIDE: tl.constexpr = ROWS + PAD
    SHARE: tl.constexpr = triton.next_power_of_2((ROWS * TOKENS + SPLIT - 1) // SPLIT)
    tl.debug_barrier()  # the memory may still be read: as the ring of loads, or for another sum
    leave(((copies * TOKENS + tokens) * WIDE + rows) * 4, sums)
    arrive(part)
    mine = tl.minimum(part * SHARE + tl.arange(0, SHARE), ROWS * TOKENS - 1)
    row = first_row + mine % ROWS
    token = first_token + mine // ROWS
    at = (mine // ROWS * WIDE + mine % ROWS) * 4
    wait(part)
    total = tl.zeros((SHARE,), tl.float32)
    for i in tl.static_range(SPLIT):
        for copy in tl.static_range(COPIES):
            total += fetch(at + copy * (TOKENS * WIDE * 4), at * 0 + i)
    inside = (row < N) & (token < m)
    if bias is not None:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + token.to(tl.int64) * N + row, total.to(y.dtype.element_ty), mask=inside)
    arrive(part)
    wait(part)  # the others may still read this program's memory
