"""Split-K inside one cluster (NVIDIA, sm_90 on): thread blocks of a tile put their sums into each other's memory.

The thread blocks of a cluster are on the device at the same time, and each can write to the others' shared memory, so
that no sum goes through the device's memory.  Each thread block owns some lines of the tile: it gets their sums from
all, adds them up in the order of the slices of K, so that results are bitwise equal from run to run, and stores them.

Triton has no words for this, so it is PTX (ISA 8.1: mapa, st.async, mbarrier).  A thread block's barrier counts the
bytes that have come, which makes them visible without a fence over the whole device; how many will come is known before
the launch, and compile.py checks that no more and no fewer are sent.  A cluster runs whole or not at all.  The sums and
the barrier lie behind the shared memory that Triton has allotted, at the end of what the kernel is launched with
(launch.py: Exchange).  The cluster is SPLIT thread blocks along the grid's first axis.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from gemmtuned.kernels.triton.inline_ptx import inline_ptx, moves
from gemmtuned.kernels.triton.launch import BARRIER_BYTES, EXCHANGE_PAD, SHARED_BEGINS

_PAD = tl.constexpr(EXCHANGE_PAD)
_BARRIER = tl.constexpr(BARRIER_BYTES)
_BEGINS = tl.constexpr(SHARED_BEGINS)

_END, _END_OPERANDS = inline_ptx(
    "=r end",
    "{ .reg .u32 size; mov.u32 $end, global_smem; mov.u32 size, %dynamic_smem_size; add.u32 $end, $end, size; }",
)
_END_ALONE, _END_ALONE_OPERANDS = inline_ptx(
    "=r end, r begin",
    """{
    .reg .u32 size, rank;
    mov.u32 size, %dynamic_smem_size;
    mov.u32 rank, %cluster_ctarank;
    add.u32 size, size, $begin;
    mapa.shared::cluster.u32 $end, size, rank;
    }""",
)
_OF, _OF_OPERANDS = inline_ptx("=r there, r here, r rank", "mapa.shared::cluster.u32 $there, $here, $rank;")
_BEGIN, _BEGIN_OPERANDS = inline_ptx(
    "=r none, r barrier, r bytes",
    """{
    .reg .pred first;
    .reg .u32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first mbarrier.init.shared::cta.b64 [$barrier], 1;
    @first fence.mbarrier_init.release.cluster;
    @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$barrier], $bytes;
    barrier.cluster.arrive.relaxed.aligned;
    mov.u32 $none, 0;
    }""",
)
_SEND, _SEND_OPERANDS = inline_ptx(
    "=r none<2>, r to<2>, r barrier<2>, f value<2>",
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [$to0], {$value0, $value1}, [$barrier0]; "
    + moves("none", range(2), "0"),
)
_WAIT_FOR_ALL, _WAIT_FOR_ALL_OPERANDS = inline_ptx(
    "=r none, r barrier",
    """{
    .reg .pred done;
    again:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$barrier], 0;
    @!done bra again;
    mov.u32 $none, 0;
    }""",
)
_READ, _READ_OPERANDS = inline_ptx("=f value, r address", "ld.shared.f32 $value, [$address];")
# Triton wants a value of each element from an instruction, and one to take its shape from: an address that nobody uses
_WAIT_FOR_BEGIN, _WAIT_FOR_BEGIN_OPERANDS = inline_ptx(
    "=r same, r address", "barrier.cluster.wait.aligned; mov.u32 $same, $address;"
)


@triton.jit
def _end(ALONE: tl.constexpr):
    """Where this thread block's shared memory ends.

    ALONE: Triton has allotted none, so its symbol for the begin is missing, and the address is made from the sizes.  An
    address in a cluster names the thread block that it belongs to, also where that is the one that uses it.
    """
    if ALONE:
        return tl.inline_asm_elementwise(
            _END_ALONE, _END_ALONE_OPERANDS, [_BEGINS], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(_END, _END_OPERANDS, [], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _of(address, rank):
    """The same address in the shared memory of the cluster's thread block `rank`."""
    return tl.inline_asm_elementwise(_OF, _OF_OPERANDS, [address, rank], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def begin(
    part,
    LINES: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    COPIES: tl.constexpr,
    ALONE: tl.constexpr = False,
):
    """Set up this thread block's barrier, and tell the cluster that sums may be sent to it."""
    EACH: tl.constexpr = (LINES + SPLIT - 1) // SPLIT
    mine = tl.maximum(tl.minimum(LINES - part * EACH, EACH), 0)
    tl.inline_asm_elementwise(
        _BEGIN, _BEGIN_OPERANDS, [_end(ALONE) - _BARRIER, mine * (WIDE * SPLIT * COPIES * 4)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _send(address, barrier, values):
    """Send pairs of fp32 values, neighbours in `values` and at their addresses in another thread block's memory."""
    tl.inline_asm_elementwise(_SEND, _SEND_OPERANDS, [address, barrier, values], dtype=tl.int32, is_pure=False, pack=2)


@triton.jit
def _all_has_come(barrier):
    tl.inline_asm_elementwise(_WAIT_FOR_ALL, _WAIT_FOR_ALL_OPERANDS, [barrier], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _read(address):
    return tl.inline_asm_elementwise(_READ, _READ_OPERANDS, [address], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def _slots(LINES: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr, COPIES: tl.constexpr, ALONE: tl.constexpr):
    """Where the sums that come to this thread block begin; its barrier lies behind them."""
    EACH: tl.constexpr = (LINES + SPLIT - 1) // SPLIT
    return _end(ALONE) - (SPLIT * COPIES * EACH * (WIDE + _PAD) * 4 + _BARRIER)


@triton.jit
def place_of(
    line,
    place,
    copy,
    part,
    LINES: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    COPIES: tl.constexpr,
    ALONE: tl.constexpr = False,
):
    """The address of a sum, in the memory of the thread block that adds up its line."""
    STRIDE: tl.constexpr = (WIDE + _PAD) * 4
    EACH: tl.constexpr = (LINES + SPLIT - 1) // SPLIT
    SLOT: tl.constexpr = EACH * STRIDE
    owner = line // EACH
    to = _of(_slots(LINES, WIDE, SPLIT, COPIES, ALONE) + (part * COPIES) * SLOT, owner) + (line - owner * EACH) * STRIDE
    return to + copy * SLOT + place * 4


@triton.jit
def barrier_of(line, LINES: tl.constexpr, SPLIT: tl.constexpr, ALONE: tl.constexpr = False):
    """The barrier of the thread block that adds up this line."""
    EACH: tl.constexpr = (LINES + SPLIT - 1) // SPLIT
    return _of(_end(ALONE) - _BARRIER, line // EACH)


@triton.jit
def own_place(OWN: tl.constexpr, LINES: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr, ALONE: tl.constexpr):
    """The address of the OWN values that a thread block keeps for itself, where it sends a single copy of its sums."""
    return _slots(LINES, WIDE, SPLIT, 1, ALONE) - OWN * 4


@triton.jit
def all_have_begun(ALONE: tl.constexpr = False):
    """Wait until all thread blocks of the cluster have begun, so that sums can be sent to them."""
    tl.inline_asm_elementwise(
        _WAIT_FOR_BEGIN, _WAIT_FOR_BEGIN_OPERANDS, [_end(ALONE)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def collect_and_store(
    line_is_row: tl.constexpr,
    first_row,
    first_token,
    part,
    bias,
    y,
    m,
    N: tl.constexpr,
    LINES: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    COPIES: tl.constexpr,
    ALONE: tl.constexpr = False,
):
    """Add up what has been sent of this thread block's own lines, and store it in y."""
    STRIDE: tl.constexpr = (WIDE + _PAD) * 4
    EACH: tl.constexpr = (LINES + SPLIT - 1) // SPLIT
    SLOT: tl.constexpr = EACH * STRIDE
    mine = tl.arange(0, triton.next_power_of_2(EACH))
    i = (part * EACH + mine)[:, None]
    j = tl.arange(0, WIDE)[None, :]
    row = first_row + (i if line_is_row else j)
    token = first_token + (j if line_is_row else i)
    inside = (mine < EACH)[:, None] & (i < LINES) & (row < N) & (token < m)
    if bias is not None:
        start = tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    at = _slots(LINES, WIDE, SPLIT, COPIES, ALONE) + tl.minimum(mine, EACH - 1)[:, None] * STRIDE + j * 4
    _all_has_come(_end(ALONE) - _BARRIER)
    total = _read(at)
    for other in tl.static_range(1, SPLIT * COPIES):
        total += _read(at + other * SLOT)
    if bias is not None:
        total += start
    tl.store(y + token.to(tl.int64) * N + row, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def add_up_and_store(
    sums,
    line,
    place,
    copy,
    line_is_row: tl.constexpr,
    first_row,
    first_token,
    part,
    bias,
    y,
    m,
    N: tl.constexpr,
    LINES: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Add up LINES x WIDE `sums` over the cluster's thread blocks, and over COPIES that each has; store them in y.

    `line`, `place`, `copy`: indices of `sums`, shaped to be broadcast.  line_is_row: of W, else it is a token.
    """
    to = place_of(line, place, copy, part, LINES, WIDE, SPLIT, COPIES)
    all_have_begun()
    _send(to, barrier_of(line, LINES, SPLIT) + (copy + place) * 0, sums)
    collect_and_store(line_is_row, first_row, first_token, part, bias, y, m, N, LINES, WIDE, SPLIT, COPIES)
