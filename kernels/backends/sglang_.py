"""SGLang's kernels for 8-bit linears, where its package of kernels is installed (sgl-kernel/csrc/common_extension.cc).

Its FP8 kernel for scales of rows adds up as the tensor core does; its kernel for blocks adds blocks of 128 up exactly,
and is in sglang-kernel 0.4.4 and no longer in 0.4.10.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.backends.torch_op import OperatorBackend
from gemmtuned.kernels.peers import COLUMNS, FP8, INT8, is_cutlass_blocks, is_scaled, may_sum_fast

ROWS: Final = (("row", "row"),)


def _blocks(p: Problem) -> bool:
    return is_cutlass_blocks(p) and not p.n % 128  # it checks the scales of W against N // 128


_operator = partial(OperatorBackend, package=("sglang-kernel", "sgl-kernel"), imports=("sgl_kernel",))


BACKENDS: Final = (
    _operator(
        name="sglang_fp8", operator="sgl_kernel::fp8_scaled_mm",
        arguments=("x", "b", "scale_x", "scale_b", "out_dtype", "bias"),
        suits=lambda p: is_scaled(p, FP8, ROWS) and may_sum_fast(p),
    ),
    _operator(
        name="sglang_int8", operator="sgl_kernel::int8_scaled_mm",
        arguments=("x", "b", "scale_x", "scale_b", "out_dtype", "bias"), suits=lambda p: is_scaled(p, INT8, ROWS),
    ),
    _operator(
        name="sglang_blocks", operator="sgl_kernel::fp8_blockwise_scaled_mm",
        arguments=("x", "b", "scale_x", "scale_b", "out_dtype"), suits=_blocks, conditions=(COLUMNS,),
        contiguous=("x", "w", "scale_w"),
    ),
)  # fmt: skip
