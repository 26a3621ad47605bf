"""vLLM's kernels for 8-bit linears, where vLLM is installed: CUTLASS, DeepGEMM as vLLM calls it, and its Triton kernel.

CUTLASS adds up as the tensor core does where scales are of rows or tensors (use_fast_accum), and blocks of 128 of K
exactly (csrc/quantization/w8a8/cutlass).  Schemas as in vLLM 0.32; another schema is another candidate.
"""

from __future__ import annotations

from typing import Final

from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.backends.torch_op import OUT_DTYPE, OperatorBackend
from gemmtuned.kernels.peers import (
    COLUMNS,
    FP8,
    INT8,
    is_cutlass_blocks,
    is_deep_gemms,
    is_in_blocks,
    is_scaled,
    may_sum_fast,
)


def _cutlass(p: Problem) -> bool:
    by_row = (("row", "row"), ("tensor", "tensor"), ("row", "tensor"), ("tensor", "row"))
    return is_scaled(p, INT8, by_row) or (is_scaled(p, FP8, by_row) and may_sum_fast(p))


BACKENDS: Final = (
    OperatorBackend(
        name="vllm_cutlass", package="vllm", imports=("vllm._custom_ops",), operator="_C::cutlass_scaled_mm",
        arguments=("y", "x", "b", "scale_x", "scale_b", "bias"), suits=_cutlass,
    ),
    OperatorBackend(
        name="vllm_cutlass_blocks", package="vllm", imports=("vllm._custom_ops",), operator="_C::cutlass_scaled_mm",
        arguments=("y", "x", "b", "scale_x", "scale_b", "bias"), suits=is_cutlass_blocks, conditions=(COLUMNS,),
        contiguous=("x", "w", "scale_w"),
    ),
    OperatorBackend(
        name="vllm_cutlass_zero", package="vllm", imports=("vllm._custom_ops",), operator="_C::cutlass_scaled_mm_azp",
        arguments=("y", "x", "b", "scale_x", "scale_b", "sums_w", "zero_x", "bias"),
        suits=lambda p: is_scaled(p, INT8, (("row+zero", "row"),)),
    ),
    OperatorBackend(
        name="vllm_cutlass_zero_tensor", package="vllm", imports=("vllm._custom_ops",),
        operator="_C::cutlass_scaled_mm_azp",
        arguments=("y", "x", "b", "scale_x", "scale_b", "sums_w", None, "bias"),
        suits=lambda p: is_scaled(p, INT8, (("tensor+zero", "tensor"), ("tensor+zero", "row"))),
    ),
    OperatorBackend(
        name="vllm_deep_gemm", package="vllm",
        imports=("vllm.model_executor.kernels.linear.scaled_mm.deep_gemm",), operator="vllm::fp8_gemm_nt_op",
        arguments=("x", "scale_x", "w", "scale_w", "y", False), suits=is_deep_gemms, conditions=(COLUMNS,),
        contiguous=("x", "w", "scale_w"), compiles=True,
    ),
    OperatorBackend(
        name="vllm_triton_blocks", package="vllm", imports=("vllm.model_executor.kernels.linear.scaled_mm.triton",),
        operator="vllm::w8a8_triton_block_scaled_mm_func",
        arguments=("x", "w", "scale_x", "scale_w", (128, 128), OUT_DTYPE), suits=is_in_blocks, contiguous=("x",),
        compiles=True,
    ),
)  # fmt: skip
