"""The shapes that tests use: sizes that have broken kernels before, and layers of real models cut small.

M: 1, odd, around 16 and 64.  N: 1, multiples of 16 and beside them.  K: below a tile, a tile, tiles plus 8 and 16, odd.
"""

from __future__ import annotations

from typing import Any

import torch

from gemmtuned.configs.problem import Problem

EDGES = [
    (1, 1, 1), (1, 16, 8), (1, 256, 128), (2, 8, 136), (3, 17, 33), (7, 40, 24), (15, 48, 64), (16, 64, 72),
    (17, 56, 80), (31, 24, 200), (33, 129, 65), (63, 72, 144), (65, 32, 520), (5, 1, 96), (128, 16, 16),
]  # fmt: skip

# (N, K): Qwen3-0.6B's q, kv, gate_up and down projections and a vocabulary's tail, at an eighth
LAYERS = [(256, 128), (128, 128), (768, 128), (128, 384), (1187, 128)]


def dense(dtype: str, *, threads: int = 2) -> list[Problem]:
    """Edges and layers as plain linear calls, with and without bias."""
    shapes = EDGES + [(m, n, k) for n, k in LAYERS for m in (1, 4, 8)]
    return [Problem(m=m, n=n, k=k, dtype=dtype, bias=i % 2 == 1, threads=threads) for i, (m, n, k) in enumerate(shapes)]


def layouts(dtype: str, *, threads: int = 2) -> list[Problem]:
    """One odd shape in every layout."""
    return [
        Problem(m=9, n=40, k=72, dtype=dtype, layout=first + second, threads=threads)
        for first in "nts"
        for second in "nts"
    ]


def batched(dtype: str, *, threads: int = 2) -> list[Problem]:
    """Attention-like batches."""
    shapes = [(1, 4, 8, 16), (3, 1, 33, 24), (4, 17, 40, 72), (8, 8, 64, 32)]
    return [
        Problem(family="batched", batch=b, m=m, n=n, k=k, dtype=dtype, layout=layout, threads=threads)
        for b, m, n, k in shapes
        for layout in ("nt", "nn")
    ]


# A launch record (configs/launch.py) with nothing wrong in it
LAUNCH: dict[str, Any] = {
    "binary": "0a" * 32, "name": "warp_split_k", "shared": 65536, "warps": 4, "warp_size": 32, "cluster": 1,
    "grid": [{"over": "n", "block": 16}, {"over": "", "block": 4}, {"over": "", "block": 1}],
    "arguments": ["x", "w", "y", "partials", "counters", "m", "ldx", "ldw"], "null_pointers": 2, "ld_multiple": 8,
    "max_m": 8, "partials_offset": 65536, "counters_bytes": 64, "workspace_bytes": 131072, "pointer_align": 16,
}  # fmt: skip
LIBRARY_LAUNCH: dict[str, Any] = {
    "library": "cublaslt", "algo": "0102030405060708" * 8, "dtype": "bf16", "layout": "nt", "tf32": False, "max_m": 8,
    "workspace_bytes": 1024, "ld_multiple": 8, "pointer_align": 16,
}  # fmt: skip


def reads_beyond_rows() -> bool:
    """Whether torch's own product in bf16 takes what lies beyond a row for part of it, as torch 2.13 does with AMX."""
    x = torch.ones(17, 80, dtype=torch.bfloat16)
    x[1:] = torch.nan
    y = torch.nn.functional.linear(x, torch.ones(56, 80, dtype=torch.bfloat16))
    return bool(y[0].isnan().any())
