"""A fused mixture of experts for many tokens: pairs sorted by expert, two grouped products, a sum.

A pair is a token and one of its experts.  `begin` writes the pairs in the order of their experts and the tiles that
they make; `up` gathers their rows of X, multiplies gate and up rows of W1 in one tile and writes H in that order;
`down` multiplies H by W2 and writes one row for each pair; `add` sums the rows of a token, times the routing weights.
No sum is made with atomics, so equal calls give equal bits.  How many pairs an expert has is known on the device alone,
so the grid has a block for every tile there can be.

Rows of W lie on the long side of the matrix instruction, tokens on the short one.  Coded weights are decoded in
registers (coded_weights.py): e4m3 to fp16, for which rows of X and H are divided by a power of two each, 4 bits to X's
type.  Scales of 128x128 multiply the fp32 sums of each block of K, those of a tensor or a row the sums at the end, and
those of groups the decoded values.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from gemmtuned.kernels.triton.coded_weights import (
    k_of_4_bit,
    k_of_fp8,
    of_fp8,
    row_order,
    tile_of_fp8,
    values_of_4_bit,
)  # fmt: skip


@triton.jit
def begin(
    ids, order, up_tiles, down_tiles, pairs, up_places, down_places, x, to, factor, K: tl.constexpr,
    PADDED: tl.constexpr, EXPERTS: tl.constexpr, WEIGHT: tl.constexpr, UP_TOKENS: tl.constexpr,
    DOWN_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One thread block for each expert, which deals out its pairs; for coded weights then one for each row of X."""
    if tl.program_id(0) < EXPERTS:
        deal(ids, order, up_tiles, down_tiles, pairs, up_places, down_places, EXPERTS, UP_TOKENS, DOWN_TOKENS, BLOCK)
    else:
        _made_ready(x, to, factor, tl.program_id(0) - EXPERTS, K, PADDED, WEIGHT, BLOCK)


@triton.jit
def ready(
    x, to, factor, K: tl.constexpr, PADDED: tl.constexpr, WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One thread block for each row of H."""
    _made_ready(x, to, factor, tl.program_id(0), K, PADDED, WEIGHT, BLOCK)


@triton.jit
def deal(
    ids, order, up_tiles, down_tiles, pairs, up_places, down_places, EXPERTS: tl.constexpr, UP_TOKENS: tl.constexpr,
    DOWN_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The expert's pairs, ascending, behind those of the experts before in `order`; and the tiles that they make."""
    e = tl.program_id(0)
    before = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, pairs, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        expert = tl.load(ids + at, mask=at < pairs, other=-1)
        before += ((expert >= 0) & (expert < e)).to(tl.int32)
    start = tl.sum(before, 0)
    end = start
    for begin in range(0, pairs, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        mine = (tl.load(ids + at, mask=at < pairs, other=-1) == e).to(tl.int32)
        tl.store(order + end + tl.cumsum(mine, 0) - 1, at, mask=mine != 0)
        end += tl.sum(mine, 0)
    _place(up_tiles, up_places, e, start, end, EXPERTS, UP_TOKENS)
    _place(down_tiles, down_places, e, start, end, EXPERTS, DOWN_TOKENS)


@triton.jit
def _place(tiles, places, e, start, end, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """(expert or -1, first pair, end) of the thread blocks from number e + start / TOKENS on, which are this expert's.

    Those up to the next expert's first are as many as its tiles, or one more, so no expert needs to know of others.
    """
    first = e + start // TOKENS
    many = tl.where(e == EXPERTS - 1, places, e + 1 + end // TOKENS) - first
    for begin in range(0, many, 64):
        at = begin + tl.arange(0, 64)
        pair = start + at * TOKENS
        tl.store(tiles + first + at, tl.where(pair < end, e, -1), mask=at < many)
        tl.store(tiles + places + first + at, pair, mask=at < many)
        tl.store(tiles + 2 * places + first + at, end, mask=at < many)


@triton.jit
def _made_ready(
    x, to, factor, at, K: tl.constexpr, PADDED: tl.constexpr, WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A row's values where decoded weights meet them, zeros behind K up to PADDED.

    For W in 8 bits, which is decoded to fp16, the row is divided by a power of two, `factor`, so that its largest
    value is about 2^14: what fp16 cannot hold of it then is less than fp32 sums lose.
    """
    row = at.to(tl.int64)
    scale = 1.0
    if WEIGHT == 1:
        largest = tl.zeros((BLOCK,), tl.float32)
        for k0 in range(0, PADDED, BLOCK):
            k = k0 + tl.arange(0, BLOCK)
            largest = tl.maximum(largest, tl.abs(tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32)))
        # In fp32 the field of 2^e is e + 127.  That of 2^14 / 2^e is then 268 less that of 2^e, and that of its inverse
        # is 254 less its own, which has to be 1 or more
        exponent = tl.max(largest, 0).to(tl.int32, bitcast=True) >> 23  # 255 for something infinite, or NaN
        field = tl.where(exponent == 255, 127, tl.minimum(268 - exponent, 253))
        scale = (field << 23).to(tl.float32, bitcast=True)
        tl.store(factor + row, ((254 - field) << 23).to(tl.float32, bitcast=True))
    for k0 in range(0, PADDED, BLOCK):
        spot = k0 + tl.arange(0, BLOCK)
        k = k_of_fp8(spot) if WEIGHT == 1 else k_of_4_bit(spot)
        value = tl.load(x + row * K + k, mask=k < K, other=0.0)
        if WEIGHT == 1:
            wide = value.to(tl.float32) * scale
            fits = tl.minimum(tl.maximum(wide, -65504.0), 65504.0)
            value = tl.where(wide - wide == 0.0, fits, wide).to(tl.float16)  # what is infinite stays so
        tl.store(to + row * PADDED + spot, value, mask=spot < PADDED)


@triton.jit
def _decoded_sums(
    x_rows, w, scale, expert, rows, wanted, ROWS: tl.constexpr, K: tl.constexpr, WEIGHT: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_M] in fp32: these rows of the expert's coded W, of which there are ROWS, times the rows of X.

    x_rows: made for them.  rows: in the order of the bytes' tile, wanted: of the sums'.
    """
    to: tl.constexpr = x_rows.dtype.element_ty
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    row = expert.to(tl.int64) * ROWS + rows
    step: tl.constexpr = 64 if WEIGHT == 1 else 128  # values of K in 64 bytes
    a_row: tl.constexpr = K * 64 // step
    groups: tl.constexpr = 128 // GROUP
    kind: tl.constexpr = scale.dtype.element_ty
    across: tl.constexpr = (K + 127) // 128
    down: tl.constexpr = (ROWS + 127) // 128
    for k0 in range(0, K, BLOCK_K):
        for piece in tl.static_range(BLOCK_K // step):
            begin = k0 + piece * step
            at = begin * 64 // step + tl.arange(0, 64)
            wp = w + row[:, None] * a_row + at[None, :]
            xt = tl.load(x_rows[None, :] + begin + tl.arange(0, step)[:, None])
            wt = tl.load(wp) if K % BLOCK_K == 0 else tl.load(wp, mask=(at < a_row)[None, :], other=0)
            if WEIGHT == 1:
                values = tile_of_fp8(of_fp8(wt, ASM), BLOCK_N, WARPS)
            else:
                group = begin // GROUP + tl.arange(0, groups)
                sp = scale + row[:, None] * (K // GROUP) + group[None, :]
                s = tl.load(sp) if K % BLOCK_K == 0 else tl.load(sp, mask=(group < K // GROUP)[None, :], other=0)
                values = values_of_4_bit(wt, s, to, WEIGHT == 3, kind, BLOCK_N, groups, WARPS, ASM)
            if SCALES != 3:
                acc = tl.dot(values, xt, acc)
            elif piece % 2 == 0:
                part = tl.dot(values, xt)
            else:
                part = tl.dot(values, xt, part)
                block = (expert.to(tl.int64) * down + wanted // 128) * across + begin // 128
                there = (wanted >= 0) & (begin // 128 < across)  # behind K the next scale is of other rows
                acc += part * tl.load(scale + block, mask=there, other=0.0)[:, None]
    if SCALES == 1:
        acc *= tl.load(scale + expert)
    elif SCALES == 2:
        acc *= tl.load(scale + expert.to(tl.int64) * ROWS + wanted)[:, None]
    return acc


@triton.jit
def row_of(at, INTER: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rows of W1 so that gate and up take turns; those past the end are made, and not stored."""
    rows = tl.minimum(at, 2 * INTER - 1)
    if not INTERLEAVED:
        rows = rows % 2 * INTER + rows // 2
    return rows


@triton.jit
def activated(gate, other, ACT: tl.constexpr):
    """Columns of H: SwiGLU of gpt-oss (2), GELU by erf (1) or SiLU (0) of gate, times up."""
    if ACT == 2:
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        other = tl.minimum(other, 7.0, propagate_nan=tl.PropagateNan.ALL)
        other = tl.maximum(other, -7.0, propagate_nan=tl.PropagateNan.ALL)
        made = gate * tl.sigmoid(1.702 * gate) * (other + 1.0)
    elif ACT == 1:
        made = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * other
    else:
        made = gate * tl.sigmoid(gate) * other
    return made


@triton.jit
def up(
    x,
    factor,
    w,
    scale,
    bias,
    gates,
    order,
    tiles,
    places,
    h,
    D: tl.constexpr,
    INTER: tl.constexpr,
    TOPK: tl.constexpr,
    WEIGHT: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    ACT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PADDED: tl.constexpr,
    WARPS: tl.constexpr,
    ASM: tl.constexpr,
):
    """H [pairs in order, INTER] = act of gate and up of X W1[e]^T + bias1[e]; from two rows of W1 comes one column."""
    expert = tl.load(tiles + tl.program_id(1))
    if expert >= 0:
        first = tl.load(tiles + places + tl.program_id(1))
        end = tl.load(tiles + 2 * places + tl.program_id(1))
        columns: tl.constexpr = BLOCK_N // 2
        height: tl.constexpr = 2 * INTER
        begin = tl.program_id(0) * BLOCK_N
        rows = row_of(begin + tl.arange(0, BLOCK_N), INTER, INTERLEAVED)
        spot = tl.minimum(first + tl.arange(0, BLOCK_M), end - 1)
        pair = tl.load(order + spot)
        x_rows = x + (pair // TOPK).to(tl.int64) * PADDED
        given = row_of(begin + row_order(BLOCK_N, WARPS), INTER, INTERLEAVED)
        acc = _decoded_sums(x_rows, w, scale, expert, given, rows, height, D, WEIGHT, SCALES, GROUP,
                            BLOCK_M, BLOCK_N, BLOCK_K, WARPS, ASM)  # fmt: skip
        if WEIGHT == 1:
            acc *= tl.load(factor + pair // TOPK)[None, :]
        if WEIGHTED:
            acc *= tl.load(gates + pair)[None, :]
        if BIAS:
            acc += tl.load(bias + expert.to(tl.int64) * height + rows).to(tl.float32)[:, None]
        gate, other = tl.split(acc.reshape(columns, 2, BLOCK_M).permute(0, 2, 1))
        made = activated(gate, other, ACT)
        n = tl.program_id(0) * columns + tl.arange(0, columns)
        to = h + (first + tl.arange(0, BLOCK_M)).to(tl.int64)[None, :] * INTER + n[:, None]
        kept = (n < INTER)[:, None] & (first + tl.arange(0, BLOCK_M) < end)[None, :]
        tl.store(to, made.to(h.dtype.element_ty), mask=kept)


@triton.jit
def down(
    h,
    factor,
    w,
    scale,
    bias,
    order,
    tiles,
    places,
    parts,
    D: tl.constexpr,
    INTER: tl.constexpr,
    WEIGHT: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PADDED: tl.constexpr,
    WARPS: tl.constexpr,
    ASM: tl.constexpr,
):
    """parts [pair, D] = H W2[e]^T + bias2[e]."""
    expert = tl.load(tiles + tl.program_id(1))
    if expert >= 0:
        first = tl.load(tiles + places + tl.program_id(1))
        end = tl.load(tiles + 2 * places + tl.program_id(1))
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = tl.minimum(n, D - 1)
        spot = tl.minimum(first + tl.arange(0, BLOCK_M), end - 1)
        h_rows = h + spot.to(tl.int64) * PADDED
        given = tl.minimum(tl.program_id(0) * BLOCK_N + row_order(BLOCK_N, WARPS), D - 1)
        acc = _decoded_sums(h_rows, w, scale, expert, given, rows, D, INTER, WEIGHT, SCALES, GROUP,
                            BLOCK_M, BLOCK_N, BLOCK_K, WARPS, ASM)  # fmt: skip
        if WEIGHT == 1:
            acc *= tl.load(factor + spot)[None, :]
        if BIAS:
            acc += tl.load(bias + expert.to(tl.int64) * D + rows).to(tl.float32)[:, None]
        to = parts + tl.load(order + spot).to(tl.int64)[None, :] * D + n[:, None]
        kept = (n < D)[:, None] & (first + tl.arange(0, BLOCK_M) < end)[None, :]
        tl.store(to, acc.to(parts.dtype.element_ty), mask=kept)


@triton.jit
def add(
    parts,
    ids,
    gates,
    y,
    D: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Y [token, D] = sum of its pairs' rows, times their routing weights unless WEIGHTED says that H has them."""
    token = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOPK):
        pair = token * TOPK + slot
        expert = tl.load(ids + pair)
        there = (expert >= 0) & (expert < EXPERTS)
        part = tl.load(parts + pair.to(tl.int64) * D + n, mask=there & (n < D), other=0.0).to(tl.float32)
        if not WEIGHTED:
            part = tl.where(there, part * tl.load(gates + pair), 0.0)
        total += part
    tl.store(y + token.to(tl.int64) * D + n, total.to(y.dtype.element_ty), mask=n < D)
