"""The two products of moe_tiles.py where weights are of X's type: gate and up apart, several tiles of W2 in turn."""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from gemmtuned.kernels.triton.moe_tiles import activated, row_of


@triton.jit
def _of_x(x_rows, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_K, BLOCK_M] of these rows, zeros behind K."""
    xp = x_rows[None, :] + k[:, None]
    return tl.load(xp) if K % BLOCK_K == 0 else tl.load(xp, mask=(k < K)[:, None], other=0.0)


@triton.jit
def _of_w(w, rows, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_N, BLOCK_K] of these rows, zeros behind K."""
    wp = w + rows[:, None] * K + k[None, :]
    return tl.load(wp) if K % BLOCK_K == 0 else tl.load(wp, mask=(k < K)[None, :], other=0.0)


@triton.jit
def up(
    x, w, bias, gates, order, tiles, places, h, D: tl.constexpr, INTER: tl.constexpr, TOPK: tl.constexpr,
    ACT: tl.constexpr, INTERLEAVED: tl.constexpr, WEIGHTED: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """H [pairs in order, INTER] = act of gate and up of X W1[e]^T + bias1[e], of BLOCK_N rows of W1."""
    expert = tl.load(tiles + tl.program_id(1)).to(tl.int64)
    if expert >= 0:
        first = tl.load(tiles + places + tl.program_id(1))
        end = tl.load(tiles + 2 * places + tl.program_id(1))
        columns: tl.constexpr = BLOCK_N // 2
        pair = tl.load(order + tl.minimum(first + tl.arange(0, BLOCK_M), end - 1))
        x_rows = x + (pair // TOPK).to(tl.int64) * D
        n = tl.program_id(0) * columns + tl.arange(0, columns)
        gate_rows = expert * (2 * INTER) + row_of(2 * n, INTER, INTERLEAVED)
        up_rows = expert * (2 * INTER) + row_of(2 * n + 1, INTER, INTERLEAVED)
        gate = tl.zeros((columns, BLOCK_M), tl.float32)
        other = tl.zeros((columns, BLOCK_M), tl.float32)
        for k0 in range(0, D, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            xt = _of_x(x_rows, k, D, BLOCK_K)
            gate = tl.dot(_of_w(w, gate_rows, k, D, BLOCK_K), xt, gate)
            other = tl.dot(_of_w(w, up_rows, k, D, BLOCK_K), xt, other)
        if WEIGHTED:
            counts = tl.load(gates + pair)[None, :]
            gate *= counts
            other *= counts
        if BIAS:
            gate += tl.load(bias + gate_rows).to(tl.float32)[:, None]
            other += tl.load(bias + up_rows).to(tl.float32)[:, None]
        made = activated(gate, other, ACT)
        to = h + (first + tl.arange(0, BLOCK_M)).to(tl.int64)[None, :] * INTER + n[:, None]
        kept = (n < INTER)[:, None] & (first + tl.arange(0, BLOCK_M) < end)[None, :]
        tl.store(to, made.to(h.dtype.element_ty), mask=kept)


@triton.jit
def down(
    h, w, bias, order, tiles, places, parts, D: tl.constexpr, INTER: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """parts [pair, D] = H W2[e]^T + bias2[e]; a thread block makes RUN tiles of BLOCK_N columns in turn."""
    expert = tl.load(tiles + tl.program_id(1)).to(tl.int64)
    if expert >= 0:
        first = tl.load(tiles + places + tl.program_id(1))
        end = tl.load(tiles + 2 * places + tl.program_id(1))
        spot = tl.minimum(first + tl.arange(0, BLOCK_M), end - 1)
        h_rows = h + spot.to(tl.int64) * INTER
        to_rows = parts + tl.load(order + spot).to(tl.int64)[None, :] * D
        there = (first + tl.arange(0, BLOCK_M) < end)[None, :]
        steps: tl.constexpr = (INTER + BLOCK_K - 1) // BLOCK_K
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for turn in range(RUN * steps):
            n = (tl.program_id(0) * RUN + turn // steps) * BLOCK_N + tl.arange(0, BLOCK_N)
            rows = expert * D + tl.minimum(n, D - 1)
            k = turn % steps * BLOCK_K + tl.arange(0, BLOCK_K)
            acc = tl.dot(_of_w(w, rows, k, INTER, BLOCK_K), _of_x(h_rows, k, INTER, BLOCK_K), acc)
            if turn % steps == steps - 1:
                if BIAS:
                    acc += tl.load(bias + rows).to(tl.float32)[:, None]
                tl.store(to_rows + n[:, None], acc.to(parts.dtype.element_ty), mask=(n < D)[:, None] & there)
                acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
