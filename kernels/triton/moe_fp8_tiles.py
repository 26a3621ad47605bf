"""A fused mixture of experts for many tokens in fp8: X and H are quantised in groups, both products multiply e4m3.

`begin` deals the pairs of a token and one of its experts out to tiles, as moe_tiles.py does, and quantises the rows of
X; `up` multiplies gate and up rows of W1 with them and writes H, quantised in groups of as many columns as a tile has;
`down` multiplies H by W2 and writes one row for each pair; `add` sums the rows of a token, times the routing weights.
Weights are e4m3 with one scale for each 128x128 of them.  No sum is made with atomics, so equal calls give equal bits.

A group's scale is a power of two: it costs e4m3 no precision, which has as many bits after every power, and numbers
that e4m3 can hold stay as they are.
"""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from gemmtuned.kernels.triton.moe_tiles import deal


@triton.jit
def begin(
    ids, order, up_tiles, down_tiles, pairs, up_places, down_places, x, codes, scales, D: tl.constexpr,
    EXPERTS: tl.constexpr, UP_TOKENS: tl.constexpr, DOWN_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One thread block for each expert, which deals out its pairs; then one for each row of X, which quantises it."""
    if tl.program_id(0) < EXPERTS:
        deal(ids, order, up_tiles, down_tiles, pairs, up_places, down_places, EXPERTS, UP_TOKENS, DOWN_TOKENS, BLOCK)
    else:
        row = (tl.program_id(0) - EXPERTS).to(tl.int64)
        for k0 in range(0, D, BLOCK):
            group = k0 // 128 + tl.arange(0, BLOCK // 128)
            k = group[:, None] * 128 + tl.arange(0, 128)[None, :]
            value = tl.load(x + row * D + k, mask=k < D, other=0.0).to(tl.float32)
            code, scale = _quantised(value, 1)
            tl.store(codes + row * D + k, code, mask=k < D)
            tl.store(scales + row * (D // 128) + group, scale, mask=group < D // 128)


@triton.jit
def _quantised(values, AXIS: tl.constexpr):
    """(e4m3 of values over their group's scale, the scale): groups lie along the axis, the largest becomes 2^7 to 2^8.

    What is infinite becomes NaN, since e4m3 has no infinity.
    """
    largest = tl.max(tl.abs(values), AXIS)
    # In fp32 the field of 2^e is e + 127: that of 2^7 / 2^e is 261 less it, that of its inverse 254 less its own
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    field = tl.minimum(261 - exponent, 253)
    factor = (field << 23).to(tl.float32, bitcast=True)
    scale = ((254 - field) << 23).to(tl.float32, bitcast=True)
    made = values * tl.expand_dims(factor, AXIS)
    made = tl.where(made - made == 0.0, made, float("nan"))
    return made.to(tl.float8e4nv), scale


@triton.jit
def up(
    codes, scales, w, scale, gates, order, tiles, places, h, h_scales, D: tl.constexpr, INTER: tl.constexpr,
    TOPK: tl.constexpr, ACT: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """H [pairs in order, INTER] = act of gate and up of X W1[e]^T, quantised in groups of BLOCK_N columns."""
    expert = tl.load(tiles + tl.program_id(1)).to(tl.int64)
    if expert >= 0:
        first = tl.load(tiles + places + tl.program_id(1))
        end = tl.load(tiles + 2 * places + tl.program_id(1))
        across: tl.constexpr = D // 128
        begin = tl.program_id(0) * BLOCK_N
        n = begin + tl.arange(0, BLOCK_N)
        spot = tl.minimum(first + tl.arange(0, BLOCK_M), end - 1)
        pair = tl.load(order + spot)
        token = (pair // TOPK).to(tl.int64)
        high: tl.constexpr = (2 * INTER + 127) // 128
        gate_scale = scale + (expert * high + begin // 128) * across
        up_scale = scale + (expert * high + (INTER + begin) // 128) * across
        k = tl.arange(0, 128)
        xp = codes + token[None, :] * D + k[:, None]
        gp = w + (expert * (2 * INTER) + n)[:, None] * D + k[None, :]
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        other = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k0 in range(0, D, 128):
            xt = tl.load(xp + k0)
            sx = tl.load(scales + token * across + k0 // 128)
            sg = tl.load(gate_scale + k0 // 128)
            su = tl.load(up_scale + k0 // 128)
            gate += tl.dot(tl.load(gp + k0), xt) * (sx * sg)[None, :]
            other += tl.dot(tl.load(gp + INTER * D + k0), xt) * (sx * su)[None, :]
        if WEIGHTED:
            counts = tl.load(gates + pair)[None, :]
            gate *= counts
            other *= counts
        if ACT == 1:
            made = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * other
        else:
            made = gate * tl.sigmoid(gate) * other
        code, of_group = _quantised(made, 0)
        spot = first + tl.arange(0, BLOCK_M)
        tl.store(h + spot.to(tl.int64)[None, :] * INTER + n[:, None], code, mask=(spot < end)[None, :])
        to = h_scales + spot * (INTER // BLOCK_N) + tl.program_id(0)
        tl.store(to, of_group, mask=spot < end)


@triton.jit
def down(
    h, h_scales, w, scale, order, tiles, places, parts, D: tl.constexpr, INTER: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """parts [pair, D] = H W2[e]^T; a thread block makes RUN tiles of BLOCK_N columns, one after the other."""
    expert = tl.load(tiles + tl.program_id(1)).to(tl.int64)
    if expert >= 0:
        first = tl.load(tiles + places + tl.program_id(1))
        end = tl.load(tiles + 2 * places + tl.program_id(1))
        across: tl.constexpr = (INTER + 127) // 128
        steps: tl.constexpr = INTER // GROUP
        spot = tl.minimum(first + tl.arange(0, BLOCK_M), end - 1)
        pair = tl.load(order + spot).to(tl.int64)
        kept = (first + tl.arange(0, BLOCK_M) < end)[None, :]
        k = tl.arange(0, GROUP)
        hp = h + spot.to(tl.int64)[None, :] * INTER + k[:, None]
        start = tl.program_id(0) * (RUN * BLOCK_N)
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for turn in range(RUN * steps):
            at = start + turn // steps * BLOCK_N
            step = turn % steps
            n = tl.minimum(at + tl.arange(0, BLOCK_N), D - 1)
            wt = tl.load(w + (expert * D + n)[:, None] * INTER + (step * GROUP + k)[None, :])
            ht = tl.load(hp + step * GROUP)
            sh = tl.load(h_scales + spot * steps + step)
            sw = tl.load(scale + (expert * (D // 128) + tl.minimum(at, D - 1) // 128) * across + step * GROUP // 128)
            acc += tl.dot(wt, ht) * (sh * sw)[None, :]
            if step == steps - 1:
                n = at + tl.arange(0, BLOCK_N)
                to = parts + pair[None, :] * D + n[:, None]
                tl.store(to, acc.to(parts.dtype.element_ty), mask=(n < D)[:, None] & kept)
                acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
