"""Which scaled products of ours other libraries' kernels run: what their backends' files have in common."""

from __future__ import annotations

from typing import Final

from gemmtuned.configs.launch import Condition
from gemmtuned.configs.problem import Problem

BLOCKS: Final = ("1x128", "128x128")
FP8: Final = ("fp8_e4m3", "fp8_e4m3")
INT8: Final = ("i8", "i8")
OUTPUTS: Final = ("bf16", "fp16")
COLUMNS: Final = Condition("scale_x.stride0", "==", 1)  # the scales of X with those of one block of K side by side


def is_scaled(p: Problem, types: tuple[str, str], scales: tuple[tuple[str, str], ...]) -> bool:
    """Whether it is a scaled product of these types and scales, W as [N, K] and sizes that tensor cores take."""
    is_of = (
        p.family == "scaled"
        and p.weight_state == "plain"
        and (p.dtype, p.wdtype) == types
        and (p.scale, p.wscale) in scales
    )
    return is_of and p.layout == "nt" and p.out_dtype in OUTPUTS and not p.k % 16 and not p.n % 16


def may_sum_fast(p: Problem) -> bool:
    """Whether sums in the tensor core's few bits are allowed."""
    return p.math_mode == "reduced"


def is_in_blocks(p: Problem) -> bool:
    """Whether it has scales of blocks, however they lie."""
    return is_scaled(p, FP8, (BLOCKS,)) and not p.bias


def is_in_columns(p: Problem) -> bool:
    """The same with scales of X that meet COLUMNS, and scales of W without gaps."""
    return is_in_blocks(p) and (p.scale_layout.startswith("col") or p.m == 1) and p.wscale_layout == "row"


def is_cutlass_blocks(p: Problem) -> bool:
    """Whether vLLM's CUTLASS kernel for blocks of scales runs it: the last block of N may be a part of one."""
    return is_in_columns(p) and not (p.m % 4 or p.k % 128)


def is_deep_gemms(p: Problem) -> bool:
    """Whether DeepGEMM's product of blocks runs it."""
    return is_in_columns(p) and p.out_dtype == "bf16" and not (p.k % 128 or p.n % 64)
