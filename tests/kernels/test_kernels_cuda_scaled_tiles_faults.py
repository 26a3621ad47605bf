"""Faults planted in scaled_tiles show when it runs on the CPU, as PTX: in copies, in order, in sums, in results."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")  # ptx.py needs it

import ptx_code
from scaled_tiles_cases import (
    ACROSS,
    GROUPS,
    HALVES,
    PARTS,
    QUARTERS,
    SHARED,
    SHARED_W,
    SHARED_X,
    THREE_PARTS,
    TURNS,
    config,
    of_int8,
    run,
)

from gemmtuned.kernels.cuda import nvrtc

pytestmark = pytest.mark.skipif(nvrtc.version() is None, reason="needs NVRTC")
WAIT = "wait_for(ring.loaded + 8 * ring.slot, ring.phase);"
COPIES = {
    "are not waited for": (TURNS, WAIT, "", "far off|wait for ever|nobody waited|more arrivals"),
    "of fewer bytes are announced": (TURNS, "announce(barrier, W_BYTES)", "announce(barrier, W_BYTES / 2)", "for ever"),
    "of more bytes are announced": (TURNS, "announce(barrier, X_BYTES)", "announce(barrier, X_BYTES + 16)", "for ever"),
    "of its own part are announced": (
        SHARED_W,
        "announce(barrier, W_BYTES)",
        "announce(barrier, W_BYTES / 2)",
        "read|ever",
    ),
    "of W come to itself alone": (
        SHARED_W,
        "((1u << SHARE_W) - 1) << (me.rank - me.w_part)",
        "1u << me.rank",
        "for ever",
    ),
    "of W come to the wrong blocks": (
        SHARED,
        "<< (me.rank - me.w_part)",
        "<< 0",
        "more arrivals|for ever|far off|read",
    ),
    "of X come to the wrong blocks": (SHARED, "blocks << (me.rank - me.x_part * SHARE_W)", "blocks", "ever|off|read"),
    "of X come to more blocks": (SHARED, "1u << (i * SHARE_W)", "3u << (i * SHARE_W)", "there is no|for ever|off|read"),
    "go to the first part of W": (SHARED_W, "to + me.w_part * PART * 128", "to", "far off"),
    "go to the first part of X": (SHARED_X, "to + me.x_part * PART * 128", "to", "far off"),
    "are of the first part of W": (SHARED_W, "row + me.w_part * PART", "row", "far off"),
    "are of the first part of X": (SHARED_X, "token + me.x_part * PART", "token", "far off"),
    "are of the step before": (TURNS, "&x, i * 128, token", "&x, i * 128 - 128, token", "far off"),
    "of W by the map of X": (
        TURNS,
        "copy_w(me, ws + slot * W_BYTES, &w",
        "copy_w(me, ws + slot * W_BYTES, &x",
        "off|ever",
    ),
    "drop the tail of K": (TURNS, "STEPS = (K + 127) / 128", "STEPS = K / 128", "far off"),
}
RING = {
    "is not waited for": (TURNS, "wait_for(free + 8 * slot, phase);", "", "still read|more arrivals"),
    "is not waited for where a tile begins": (
        TURNS,
        "wait_for(free + 8 * slot, phase);\n      copy",
        "if (i) wait_for(free + 8 * slot, phase);\n copy",
        "still read",
    ),
    "is free before products are over": (
        TURNS,
        "wait_group.sync.aligned 1",
        "wait_group.sync.aligned 2",
        "still read|off",
    ),
    "is free a step too early": (
        TURNS,
        "if (i > 0) ring.release(before);\n      before",
        "ring.release(ring.slot);\n before",
        "still read|more arrivals",
    ),
    "is never free": (TURNS, "if (tells) asm", "if (false) asm", "for ever"),
    "is free for oneself alone": (
        SHARED_W,
        "in_block(free, reader < 0 ? 0 : reader)",
        "free",
        "still read|arrivals|ever",
    ),
    "is free when some have read": (
        SHARED,
        "4 * MATH * (SHARE_W + SHARE_X - 1)",
        "4 * MATH",
        "still read|more arrivals|for ever",
    ),
    "is free when more have read": (SHARED, "(SHARE_W + SHARE_X - 1)", "(SHARE_W + SHARE_X)", "for ever"),
    "is told to another's neighbour": (
        SHARED,
        "rank + (other - x_part) * SHARE_W",
        "rank ^ 1",
        "read|arrivals|ever|off",
    ),
    "goes round in one phase": (TURNS, "slot = 0, phase ^= 1", "slot = 0", "more arrivals|read|ever"),
    "begins anew with each tile": (
        TURNS,
        "Sum sums[MINE / 2];",
        "ring.slot = ring.phase = 0; Sum sums[MINE / 2];",
        "more arrivals|read|ever",
    ),
    "is of one slot more": (TURNS, "xs = ws + DEPTH * W_BYTES", "xs = ws + (DEPTH - 1) * W_BYTES", "read|off"),
}
MEETING = "cluster_meets();\n        send("
CLUSTER = {
    "does not meet at first": (SHARED_W, "  cluster_meets();\n\n  if (group", "  if (group", "set up|not begun"),
    "leaves before the others have told": (
        SHARED_W,
        "i < DEPTH; i++) {\n    wait_for(free",
        "i < 0; i++) {\n    wait_for(free",
        "leaves while|has ended",
    ),
    "meets without the copies": (PARTS, "group == MATH || blockIdx.x", "blockIdx.x", "for ever|ended|leaves"),
    "adds sums of another part": (THREE_PARTS, "(part * EACH + unit - owner * EACH)", "(part * EACH)", "off|read"),
    "adds other steps": (PARTS, "(me.part() + 1) * STEPS / PARTS", "(me.part() + 1) * STEPS / PARTS - 1", "off"),
    "announces fewer sums": (
        PARTS,
        "units * (PARTS - 1) * UNIT_BYTES",
        "units * (PARTS - 2) * UNIT_BYTES",
        "without a barrier|still read|has ended",
    ),
    "expects more threads": (PARTS, "expect(all_sums, 1 + MATH", "expect(all_sums, 2 + MATH", "for ever"),
    "does not wait for sums": (PARTS, "wait_for_cluster(all_sums, 0);", "", "without a barrier|far off"),
    "waits for sums of its own alone": (
        PARTS,
        "try_wait.parity.acquire.cluster.",
        "try_wait.parity.",
        "without a barrier",
    ),
    "has no fence": (SHARED_W, 'asm volatile("fence.mbarrier_init.release.cluster;");', "", "before it is set up"),
    "sends to another": (
        THREE_PARTS,
        "me.rank + (owner - part) * SHARING",
        "(me.rank + 1) % BLOCKS",
        "off|ever|arrivals",
    ),
    "has too many registers": (GROUPS, "sync.aligned.u32 232", "sync.aligned.u32 240", "registers for ever"),
    "gives up too few registers": (GROUPS, "sync.aligned.u32 40", "sync.aligned.u32 64", "registers for ever"),
}
RESULTS = {
    "past the last token": (
        TURNS,
        "const bool there = token + on < m",
        "const bool there = true",
        "no tensor|off",
    ),
    "past the last row": (TURNS, "if (row + q * 8 < N && there)", "if (there)", "no tensor|off"),
    "of pairs past the last row": (QUARTERS, "row + i * 8 + q * 2 < N && there", "there", "no tensor|off"),
    "in fours that are not aligned": (QUARTERS, "N % 8 == 0 && ", "", "not aligned|off"),
    "of another lane": (TURNS, "upper = q & far", "upper = !(q & far)", "off"),
    "with a neighbour's scale": (TURNS, "second * of_w.y", "second * of_w.x", "off"),
    "with one scale for all tokens": (TURNS, "SCALES == ROW ? at : 0", "0", "off"),
    "with a neighbour's bias": (TURNS, "second += added.y", "second += added.x", "off"),
    "of the first half twice": (HALVES, "w_mine = ws + half * MINE * 128", "w_mine = ws", "off"),
    "of the first tokens twice": (GROUPS, "x_mine = xs + group / HALVES * 64 * 128", "x_mine = xs", "off"),
    "with the tokens of another tile": (SHARED_W, "* SHARE_W + me.w_part) * TOKENS", "* SHARE_W) * TOKENS", "off"),
    "with the rows of another tile": (SHARED_X, "* SHARE_X + me.x_part) * ROWS", "* SHARE_X) * ROWS", "off"),
    "of all tiles but the last": (TURNS, "tiles = token_tiles * (", "tiles = token_tiles * (-1 + ", "off"),
}
STORE = "to.store(sums, row + half * MINE, lane);"
OF_EPILOGUE = "wait_for(epilogue_there, tile / mine.clusters & 1);"
EPILOGUE = {
    "is not waited for": (TURNS, OF_EPILOGUE, "", "without a barrier|off"),
    "is waited for in one phase": (
        TURNS,
        OF_EPILOGUE,
        "wait_for(epilogue_there, 0);",
        "without a barrier|off|for ever",
    ),
    "is read while the one before is used": (
        TURNS,
        "wait_for(free, phase);\n    read(",
        "read(",
        "more arrivals|without a barrier|off|for ever",
    ),
    "is free before it is used": (
        TURNS,
        f"{STORE}\n        if (HAS_EPILOGUE) arrive(epilogue_free);",
        f"arrive(epilogue_free);\n        {STORE}",
        "without a barrier|may still read|off",
    ),
    "is never free": (TURNS, "if (HAS_EPILOGUE) arrive(epilogue_free);", "", "for ever"),
    "is free when some have used it": (
        GROUPS,
        "expect(epilogue_free, MATH_THREADS)",
        "expect(epilogue_free, 128)",
        "more arrivals|without a barrier|may still read|off",
    ),
    "is there when a lane has read": (
        TURNS,
        "expect(epilogue_there, 32)",
        "expect(epilogue_there, 1)",
        "more arrivals|without a barrier|off",
    ),
    "is of another tile": (
        TURNS,
        "read(mine.token_of(tile), mine.row_of(tile))",
        "read(mine.token_of(0), mine.row_of(0))",
        "off",
    ),
    "has rows past the last": (TURNS, "const int at = min(row + i, N - 1);", "const int at = row + i;", "no tensor"),
    "has tokens past the last": (
        TURNS,
        "const int at = min(token + i, m - 1);",
        "const int at = token + i;",
        "no tensor",
    ),
    "lies where barriers are": (
        TURNS,
        "loaded = my_epilogue + (HAS_EPILOGUE ? (u32)sizeof(Epilogue) : 0)",
        "loaded = my_epilogue",
        "over a barrier",
    ),
}
KINDS = {
    "copies": COPIES, "ring": RING, "cluster": CLUSTER, "results": RESULTS, "epilogue": EPILOGUE,
}  # fmt: skip
FAULTS = {f"{of}: {name}": fault for of, faults in KINDS.items() for name, fault in faults.items()}


@pytest.mark.part(12)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    shape, what, instead, seen = FAULTS[fault]
    with pytest.raises(ptx_code.Wrong, match=seen):
        y, exact = run(config(*shape, kind="ROW", promoted=False), (what, instead))
        if not torch.equal(y, exact):
            raise ptx_code.Wrong("far off")


SCALE_FAULTS = {
    "are not waited for": (TURNS, WAIT, ""),
    "of the step before": (TURNS, "promote(sums, last, of_last", "promote(sums, last, of_now"),
    "are free before they are read": (
        TURNS,
        "of_now.read(scales + ring.slot * S_BYTES, token);",
        "ring.release(ring.slot);",
    ),
    "of one token": (TURNS, "low = scale[token], high", "low = scale[0], high"),
    "of the first rows for all": (ACROSS, "low_next = low * scale[TOKENS + 1]", "low_next = low * scale[TOKENS]"),
    "of the next rows too early": (ACROSS, "|| u < edge;", "|| u < edge - 1;"),
    "with one edge for both halves": (ACROSS, "/ 8 - half * (MINE / 8);", "/ 8;"),
    "of tokens past the last": (TURNS, "min(token + i + lane, m - 1)", "(token + i + lane)"),
    "of another tile": (TURNS, "min(token + i + lane, m - 1)", "min(i + lane, m - 1)"),
    "are no arrivals": (TURNS, "2 + (SCALES == BLOCK ? 32 : 0)", "2"),
    "of steps are added to the sums as they are": (TURNS, "step[u * 4 + 3] * b", "step[u * 4 + 3]"),
    "of a step's sums that stay": (TURNS, "w + ring.slot * W_BYTES, true)", "w + ring.slot * W_BYTES, false)"),
}


@pytest.mark.part(3)
@pytest.mark.parametrize("fault", SCALE_FAULTS)
def test_a_fault_in_scales_of_blocks_is_seen(fault: str) -> None:
    shape, *change = SCALE_FAULTS[fault]
    with pytest.raises(ptx_code.Wrong):
        y, exact = run(config(*shape, kind="BLOCK", promoted=True), (change[0], change[1]))
        if not torch.equal(y, exact):
            raise ptx_code.Wrong("far off")


def test_sums_that_are_sent_before_all_have_read_the_ring_are_seen() -> None:
    one = config(*PARTS, kind="ROW", promoted=False)
    with pytest.raises(ptx_code.Wrong, match="others may still read"):
        run(one, (MEETING, "send("), ("if (PARTS > 1 && (group", "if (false && (group"))


ZERO_FAULTS = {
    "a neighbour's sum of W": ("(u32)of_zero.y", "(u32)of_zero.x"),
    "one for all tokens": ("epilogue->zx[t]", "epilogue->zx[0]"),
    "no zero point": ("zero = (u32)epilogue->zx[t]", "zero = 0"),
}


@pytest.mark.part(1)
@pytest.mark.parametrize("fault", ZERO_FAULTS)
def test_a_fault_in_zero_points_is_seen(fault: str) -> None:
    y, exact = run(of_int8(QUARTERS, zero=2), ZERO_FAULTS[fault])
    assert not torch.equal(y, exact)


def test_results_that_lie_at_a_multiple_of_four_bytes_are_stored_in_pairs() -> None:
    one = config(*TURNS, kind="ROW", promoted=False)
    y, exact = run(one, y_at=2)
    assert torch.equal(y, exact)
    with pytest.raises(ptx_code.Wrong, match="not aligned"):
        run(one, (" && ((u64)y & 15) == 0", ""), y_at=2)
