"""Stamps of version 0.1.0, which had one for all kernels of a backend, as they are said now: one for each kernel.

That version's kernels are known, so what was measured with them keeps its solutions as long as they are not edited.
db/migrations does the same to the rows of a database.
"""

from __future__ import annotations

from typing import Final

_OF_ALL: Final = {"triton": "f64e03e6295b", "cuda": "6813ed7ea8aa"}  # hash of all kernels' source then
_OF_EACH: Final = {  # hash of each kernel's own source then
    ("triton", "fragments"): "e01ad9bc2e69",
    ("triton", "gemv"): "fec7791c4bcf",
    ("triton", "selected"): "4a3ae267f00c",
    ("triton", "tiles"): "7bd927ca6285",
    ("triton", "warp_split_k"): "feabeb54b0c5",
    ("cuda", "one_shot"): "6813ed7ea8aa",
}


def of_kernel(backend: str, kernel: str, stamp: str) -> str:
    """The stamp as it is said now; one that is so already, and one of a backend without kernels, stays."""
    if backend not in _OF_ALL or not kernel or stamp.startswith(f"{kernel}/"):
        return stamp
    before, _, source = stamp.rpartition("/")
    if source == _OF_ALL[backend]:
        stamp = f"{before}/{_OF_EACH.get((backend, kernel), source)}"
    return f"{kernel}/{stamp}"
