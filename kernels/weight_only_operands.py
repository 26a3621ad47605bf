"""What our kernels for weights of 8 and 4 bits have in common: the problems that they run, and what lies how.

Standard library only, as own_kernel.py.
"""

from __future__ import annotations

from typing import Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import Condition
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tunable import PACKED, WEIGHT_ONLY
from gemmtuned.kernels.own_kernel import rows_apart

WEIGHTS: Final = {"i8": 0, "fp8_e4m3": 1, "i4": 2, "fp4_e2m1": 3}  # as the kernels number types and kinds of scales
SCALES: Final = {"tensor": 0, "row": 1, "128x128": 2, "1x32": 3, "1x64": 3, "1x128": 3}
BLOCK: Final = 128  # rows of W, and values of K, with one scale of 128x128
_MAX_K: Final = 1 << 24


def check(problem: Problem, name: str, max_m: int) -> None:
    """Raise CandidateFailed unless it is a weight-only problem of at most max_m rows of X. name: of the kernel."""
    p = problem
    if p.family != "weight_only" or p.layout != "nt" or p.weight_state != "plain" or p.batch != 1 or p.scale != "none":
        raise CandidateFailed(f"{p} {name}: it runs weight_only problems of layout nt with plain weights")
    if p.out_dtype != p.dtype or (p.wscale, p.wscale_dtype) not in WEIGHT_ONLY.get((p.dtype, p.wdtype), ()):
        raise CandidateFailed(f"{p} {name}: it runs bf16 and fp16 by i8, fp8_e4m3, i4 and fp4_e2m1 with their scales")
    if p.m > max_m or p.k % (32 if p.wdtype in PACKED else 16) or p.k > _MAX_K:
        raise CandidateFailed(f"{p} {name}: it runs M up to {max_m}, and K that is whole pieces of 16 bytes of W")
    group = group_of(p)
    if group and p.k % group:
        raise CandidateFailed(f"{p} {name}: K is whole groups of scales")


def group_of(problem: Problem) -> int:
    """Values of K that a scale holds for; 0 where it is none of a group's."""
    return int(problem.wscale.partition("x")[2]) if problem.wdtype in PACKED else 0


def conditions(problem: Problem, m: int, x_multiple: int = 8) -> tuple[Condition, ...]:
    """Rows of X, m at most, and W without gaps, 16 bytes of W a piece, scales of this kind for all of N and K.

    x_multiple: of values, that rows of X lie apart.
    """
    p = problem
    found = [
        *rows_apart(("x", "w", *(("bias",) if p.bias else ())), x_multiple, m),
        Condition("w.stride0", "%", 16),
        Condition("x.size1", "==", p.k), Condition("w.size0", "==", p.n),
        Condition("w.size1", "==", p.k // (2 if p.wdtype in PACKED else 1)), Condition("scale_w.ptr", "%", 16),
    ]  # fmt: skip
    if p.wscale == "tensor":
        return (*found, Condition("scale_w.numel", "==", 1))
    rows = -(-p.n // BLOCK) if p.wscale == "128x128" else p.n
    many = 1 if p.wscale == "row" else -(-p.k // (group_of(p) or BLOCK))
    sizes = (Condition("scale_w.size0", "==", rows), Condition("scale_w.size1", "==", many))
    return (*found, *sizes, Condition("scale_w.contiguous", "==", 1))
