"""AITER's two levels of padded M, by which sizes near each other share one solution.

Source: AITER `getPaddedM(M, N, K, gl)`; `level` is its gl.  K takes no part.  A table row serves a padded look-up
only if it was proven over its whole bucket (`Solution.covers`); AITER lets every row do that.
"""

from __future__ import annotations

from typing import Final

COVERS: Final = ("exact", "fine", "coarse")  # in look-up order


def fine_m(m: int) -> int:
    """Level 0: up to a multiple of 16 (M <= 256), 32 (<= 1024), 64 (<= 4096), else 128."""
    step = 16 if m <= 256 else 32 if m <= 1024 else 64 if m <= 4096 else 128
    return -(-m // step) * step


def coarse_m(m: int, n: int) -> int:
    """Level 1: the next power of two; above 8192 with N > 4096 it is 8192 (down, as AITER does)."""
    if m > 8192 and n > 4096:
        return 8192
    return 1 << max(m - 1, 0).bit_length()


def padded_m(m: int, n: int, covers: str) -> int:
    """M under which a row that covers exact, fine or coarse is filed."""
    if covers == "exact":
        return m
    return fine_m(m) if covers == "fine" else coarse_m(m, n)
