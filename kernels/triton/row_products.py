"""Products of rows of X and rows of W, step by step of K, for kernels whose weights may lie either way."""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_products(
    x_rows, w_rows, ldw, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """fp32 sums over K: [BLOCK_N, BLOCK_M] with SWAP, else [BLOCK_M, BLOCK_N].

    x_rows, w_rows: pointers to where each row begins.  TURNED: K of W lies without gaps, else ldw values apart.
    """
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, (K + BLOCK_K - 1) // BLOCK_K):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        wk = k if TURNED else k.to(tl.int64) * ldw
        if SWAP:
            wp = w_rows[:, None] + wk[None, :]
            xp = x_rows[None, :] + k[:, None]
            if K % BLOCK_K == 0:
                acc = tl.dot(tl.load(wp), tl.load(xp), acc)
            else:
                wt = tl.load(wp, mask=(k < K)[None, :], other=0.0)
                acc = tl.dot(wt, tl.load(xp, mask=(k < K)[:, None], other=0.0), acc)
        else:
            wp = w_rows[None, :] + wk[:, None]
            xp = x_rows[:, None] + k[None, :]
            if K % BLOCK_K == 0:
                acc = tl.dot(tl.load(xp), tl.load(wp), acc)
            else:
                xt = tl.load(xp, mask=(k < K)[None, :], other=0.0)
                acc = tl.dot(xt, tl.load(wp, mask=(k < K)[:, None], other=0.0), acc)
    return acc
