# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"
"""The usual fused mixture of experts in Triton, to be compared with: sort pairs by expert, two grouped products,
activation, sum.  For FP8 both operands of each product are quantised in groups of 128 before it, as servers do.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def sort_pairs(
    ids,
    order,
    block_expert,
    many,
    P,
    E: tl.constexpr,
    EP: tl.constexpr,
    BM: tl.constexpr,
    MOST: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One program for each expert: its pairs in order, padded to whole blocks of BM, and whose each block is."""
    mine = tl.program_id(0)
    experts = tl.arange(0, EP)
    counts = tl.zeros((EP,), tl.int32)
    for begin in range(0, P, AT_ONCE):
        p = begin + tl.arange(0, AT_ONCE)
        counts += tl.histogram(tl.load(ids + p, mask=p < P, other=EP - 1), EP)
    blocks = tl.where(experts < E, (counts + BM - 1) // BM, 0)
    first = tl.sum(tl.where(experts < mine, blocks, 0), 0)
    has = tl.sum(tl.where(experts == mine, blocks, 0), 0)
    count = tl.sum(tl.where(experts == mine, counts, 0), 0)
    if mine == 0:
        tl.store(many, tl.sum(blocks, 0))
    b = tl.arange(0, MOST)
    tl.store(block_expert + first + b, mine, mask=b < has)
    pad = count + tl.arange(0, BM)
    tl.store(order + first * BM + pad, 1 << 30, mask=pad < has * BM)
    at = first * BM
    for begin in range(0, P, AT_ONCE):
        p = begin + tl.arange(0, AT_ONCE)
        here = (tl.load(ids + p, mask=p < P, other=-1) == mine).to(tl.int32)
        tl.store(order + at + tl.cumsum(here, 0) - 1, p, mask=here != 0)
        at += tl.sum(here, 0)


@triton.jit
def grouped(
    x, xs, w, ws, y, order, block_expert, many, weights, P, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    TOPK: tl.constexpr, FROM_PAIR: tl.constexpr, WEIGHTED: tl.constexpr, KIND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Y[pair] = X[token or pair] W[expert]^T.  KIND: 0 plain, 1 FP8 by blocks of 128, 2 int4 in groups, 3 MXFP4."""
    block = tl.program_id(1)
    if block >= tl.load(many):
        return
    e = tl.load(block_expert + block).to(tl.int64)
    pair = tl.load(order + block * BM + tl.arange(0, BM))
    there = pair < P
    row = tl.where(there, pair if FROM_PAIR else pair // TOPK, 0)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    nn = tl.minimum(n, N - 1)
    for k0 in tl.range(0, K, BK):
        kk = k0 + k
        a = tl.load(x + row[:, None].to(tl.int64) * K + kk[None, :], mask=there[:, None] & (kk < K)[None, :], other=0.0)
        if KIND <= 1:
            b = tl.load(w + e * N * K + nn[None, :].to(tl.int64) * K + kk[:, None], mask=(kk < K)[:, None], other=0.0)
            if KIND == 1:
                sa = tl.load(xs + row * (K // 128) + k0 // 128, mask=there, other=0.0)
                sb = tl.load(ws + e * (-(-N // 128)) * (-(-K // 128)) + nn // 128 * (-(-K // 128)) + k0 // 128)
                acc += tl.dot(a, b) * sa[:, None] * sb[None, :]
            else:
                acc = tl.dot(a, b, acc)
        else:
            q = tl.load(
                w + e * N * (K // 2) + nn[None, :].to(tl.int64) * (K // 2) + kk[:, None] // 2,
                mask=(kk < K)[:, None],
                other=0,
            )
            code = (q >> (4 * (kk[:, None] % 2))) & 0xF
            at = ws + e * N * (K // GROUP) + nn[None, :].to(tl.int64) * (K // GROUP) + kk[:, None] // GROUP
            if KIND == 2:
                s = tl.load(at, mask=(kk < K)[:, None], other=0.0).to(tl.float32)
                b = ((code.to(tl.float32) - 8) * s).to(x.dtype.element_ty)
            else:
                s = tl.load(at, mask=(kk < K)[:, None], other=0)
                bits = ((code & 8).to(tl.uint16) << 12) | ((code & 7).to(tl.uint16) << 6)
                value = bits.to(tl.bfloat16, bitcast=True) * 8.507059173023462e37
                b = (value * ((s.to(tl.uint16) << 7).to(tl.bfloat16, bitcast=True))).to(x.dtype.element_ty)
            acc = tl.dot(a, b, acc)
    if WEIGHTED:
        acc *= tl.load(weights + pair, mask=there, other=0.0)[:, None]
    tl.store(
        y + pair[:, None].to(tl.int64) * N + n[None, :],
        acc.to(y.dtype.element_ty),
        mask=there[:, None] & (n < N)[None, :],
    )


@triton.jit
def activate(both, h, q, qs, INTER: tl.constexpr, ACT: tl.constexpr, QUANTISE: tl.constexpr, B: tl.constexpr):
    """H = act of both halves; quantised in groups of 128 where asked for."""
    pair = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * B + tl.arange(0, B)
    ok = i < INTER
    if ACT == 2:
        g = tl.minimum(tl.load(both + pair * 2 * INTER + 2 * i, mask=ok, other=0.0).to(tl.float32), 7.0)
        u = tl.load(both + pair * 2 * INTER + 2 * i + 1, mask=ok, other=0.0).to(tl.float32)
        u = tl.minimum(tl.maximum(u, -7.0), 7.0)
        v = g * tl.sigmoid(1.702 * g) * (u + 1.0)
    else:
        g = tl.load(both + pair * 2 * INTER + i, mask=ok, other=0.0).to(tl.float32)
        v = g * tl.sigmoid(g) * tl.load(both + pair * 2 * INTER + INTER + i, mask=ok, other=0.0).to(tl.float32)
    if QUANTISE:
        s = tl.maximum(tl.max(tl.abs(v), 0) / 448.0, 1e-10)
        tl.store(q + pair * INTER + i, (v / s).to(q.dtype.element_ty), mask=ok)
        tl.store(qs + pair * (INTER // 128) + tl.program_id(1), s)
    else:
        tl.store(h + pair * INTER + i, v.to(h.dtype.element_ty), mask=ok)


@triton.jit
def quantise(x, q, qs, D: tl.constexpr):
    """X in groups of 128."""
    i = tl.program_id(1) * 128 + tl.arange(0, 128)
    v = tl.load(x + tl.program_id(0) * D + i).to(tl.float32)
    s = tl.maximum(tl.max(tl.abs(v), 0) / 448.0, 1e-10)
    tl.store(q + tl.program_id(0) * D + i, (v / s).to(q.dtype.element_ty))
    tl.store(qs + tl.program_id(0) * (D // 128) + tl.program_id(1), s)


@triton.jit
def add_up(pairs, y, D: tl.constexpr, TOPK: tl.constexpr, B: tl.constexpr):
    """Y[token] = sum of its pairs."""
    i = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for j in tl.static_range(TOPK):
        total += tl.load(pairs + (tl.program_id(0).to(tl.int64) * TOPK + j) * D + i, mask=i < D, other=0.0).to(
            tl.float32
        )
    tl.store(y + tl.program_id(0) * D + i, total.to(y.dtype.element_ty), mask=i < D)


class Usual:
    """The layer for up to so many tokens, with one configuration a product: (BM, BN, BK, warps, stages)."""

    def __init__(self, layer: Any, tokens: int, first: tuple[int, ...], second: tuple[int, ...]) -> None:
        self.layer, self.tokens, self.first, self.second = layer, tokens, first, second
        self.kind = {"fp8_e4m3": 1, "int4": 2, "mxfp4": 3}.get(layer.weight, 0)
        pairs, device = tokens * layer.topk, "cuda"
        dtype = torch.bfloat16 if layer.dtype == "bf16" else torch.float16
        self.bm = first[0]
        self.most = triton.next_power_of_2(min(pairs, layer.experts) + pairs // self.bm + 1)
        self.order = torch.full((self.most * self.bm,), 1 << 30, dtype=torch.int32, device=device)
        self.block_expert = torch.empty(self.most, dtype=torch.int32, device=device)
        self.many = torch.empty(1, dtype=torch.int32, device=device)
        self.both = torch.empty(pairs, 2 * layer.inter, dtype=dtype, device=device)
        self.h = torch.empty(pairs, layer.inter, dtype=dtype, device=device)
        self.y_pairs = torch.empty(pairs, layer.width, dtype=dtype, device=device)
        self.y = torch.empty(tokens, layer.width, dtype=dtype, device=device)
        if self.kind == 1:
            self.q = torch.empty(tokens, layer.width, dtype=torch.float8_e4m3fn, device=device)
            self.qs = torch.empty(tokens, layer.width // 128, device=device)
            self.hq = torch.empty(pairs, layer.inter, dtype=torch.float8_e4m3fn, device=device)
            self.hqs = torch.empty(pairs, layer.inter // 128, device=device)

    def __call__(self, x, ids, weights, w13, s13, w2, s2):
        """Y; ids [T, topk] of int32, each launch of its own."""
        layer, pairs = self.layer, self.tokens * self.layer.topk
        ep = triton.next_power_of_2(layer.experts + 1)
        sort_pairs[(layer.experts,)](
            ids, self.order, self.block_expert, self.many, pairs, E=layer.experts, EP=ep, BM=self.bm, MOST=self.most,
            AT_ONCE=1024,
        )  # fmt: skip
        a, s = x, x
        if self.kind == 1:
            quantise[(self.tokens, layer.width // 128)](x, self.q, self.qs, D=layer.width, num_warps=1)
            a, s = self.q, self.qs
        blocks = min(pairs, layer.experts + pairs // self.bm)
        group = layer.group or 32
        h, hs = (self.hq, self.hqs) if self.kind == 1 else (self.h, self.h)
        first = (self.first, 2 * layer.inter, layer.width, a, s, w13, s13, self.both)
        second = (self.second, layer.width, layer.inter, h, hs, w2, s2, self.y_pairs)
        for (bm, bn, bk, warps, stages), n, k, given, scale, w, ws, to in (first, second):
            is_second = to is self.y_pairs
            grouped[(-(-n // bn), blocks)](
                given, scale, w, ws if ws is not None else w, to, self.order, self.block_expert, self.many, weights,
                pairs, N=n, K=k, GROUP=group, TOPK=layer.topk, FROM_PAIR=is_second, WEIGHTED=is_second, KIND=self.kind,
                BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages,
            )  # fmt: skip
            if not is_second:
                b = 128 if self.kind == 1 else 1024
                act = 2 if layer.act == "swiglu_clamped" else 0
                activate[(pairs, -(-layer.inter // b))](
                    self.both, self.h, getattr(self, "hq", self.h), getattr(self, "hqs", self.h), INTER=layer.inter,
                    ACT=act, QUANTISE=self.kind == 1, B=b, num_warps=1 if b == 128 else 4,
                )  # fmt: skip
        add_up[(self.tokens, -(-layer.width // 1024))](self.y_pairs, self.y, D=layer.width, TOPK=layer.topk, B=1024)
        return self.y
