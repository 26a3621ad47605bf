"""AITER's two levels of padded M, by which neighbouring sizes share one solution, and the rules of its other families.

Source: AITER `getPaddedM(M, N, K, gl)`; `level` is its gl, and K does not matter.  A table row serves a padded look-up
only if it was proven over its whole bucket (`Solution.covers`); in AITER every row does.
"""

from __future__ import annotations

from typing import Final

COVERS: Final = ("exact", "fine", "coarse")  # in look-up order


def fine_step(m: int) -> int:
    """The width of the fine bucket that M is in."""
    return 16 if m <= 256 else 32 if m <= 1024 else 64 if m <= 4096 else 128


def fine_m(m: int) -> int:
    """Level 0: up to a multiple of 16 (M <= 256), 32 (<= 1024), 64 (<= 4096), else 128."""
    step = fine_step(m)
    return -(-m // step) * step


def coarse_m(m: int, n: int) -> int:
    """Level 1: the next power of two; above 8192 with N > 4096 it is 8192 (down, as AITER does)."""
    if m > 8192 and n > 4096:
        return 8192
    return 1 << max(m - 1, 0).bit_length()


def padded_m(m: int, n: int, covers: str) -> int:
    """The M in the key of a row that covers exact, fine or coarse."""
    if covers == "exact":
        return m
    return fine_m(m) if covers == "fine" else coarse_m(m, n)


def ck_m(m: int) -> int:
    """The one padded M of AITER's composable-kernel look-ups (a8w8 and the batched families)."""
    if 1 < m <= 16:
        return 16
    if m <= 16384:
        return coarse_m(m, 1)
    return max(m, 20480)  # beyond the last step M is not padded


def moe_m(tokens: int) -> tuple[int, ...]:
    """The token counts that AITER's fused MoE looks up for this many, in order: no exact one, tiers above 32768."""
    if tokens < 32768:
        return (coarse_m(tokens, 1),)
    return (131072, 32768) if tokens >= 131072 else (32768,)


def lookup_sizes(family: str, m: int, n: int) -> tuple[int, ...]:
    """The M (or tokens) that AITER probes for a table of this family (configs/aiter_headers.py), in order."""
    if family in ("fmoe", "grouped_fmoe", "fhmoe"):
        return moe_m(m)
    if family in ("a8w8", "batched_bf16", "batched_a8w8"):
        return tuple(dict.fromkeys((m, ck_m(m))))
    if family in ("gdn", "hipblaslt_online", "asm_a8w8"):
        return (m,)
    return tuple(dict.fromkeys((m, fine_m(m), coarse_m(m, n))))
