"""Products of rows of X and rows of W, step by step of K, for kernels whose weights may lie either way."""
# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from collections.abc import Iterable

import triton
import triton.language as tl

from gemmtuned.kernels.arch import shared_limit
from gemmtuned.kernels.own_kernel import Scored


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


def in_order(configs: Iterable[dict[str, int]], n: int, arch: str, *, value_bytes: int = 2) -> Scored:
    """Configs in this order, each once: those whose ring fits, and that are not too wide for N.

    value_bytes: of X and W.
    """
    if arch.startswith("gfx"):  # its pipeline has no more stages
        configs = [config | {"stages": min(config["stages"], 2)} for config in configs]
    unlike = [dict(one) for one in dict.fromkeys(tuple(config.items()) for config in configs)]
    fit = [c for c in unlike if value_bytes * _ring_values(c) <= shared_limit(arch) and c["rows"] <= 2 * n]
    return [(float(i), config) for i, config in enumerate(fit, 1)]


def _ring_values(config: dict[str, int]) -> int:
    return config["stages"] * (config["rows"] + config["tokens"]) * config["block_k"]
