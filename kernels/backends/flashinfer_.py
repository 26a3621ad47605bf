"""FlashInfer's FP8 products, where it is installed: blocks on Hopper, and one scale a tensor.

FlashInfer registers no operators: kernels/from_flashinfer.py does, which a program has after
`gemmtuned.patch("flashinfer")`.
"""

from __future__ import annotations

from typing import Final

from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.backends.torch_op import OperatorBackend
from gemmtuned.kernels.peers import COLUMNS, FP8, is_deep_gemms, is_scaled, may_sum_fast

TENSORS: Final = (("tensor", "tensor"),)


def _blocks(p: Problem) -> bool:
    return is_deep_gemms(p) and p.m % 4 == 0  # it reads the scales of X in fours


def _tensors(p: Problem) -> bool:
    return is_scaled(p, FP8, TENSORS) and may_sum_fast(p) and not p.bias


BACKENDS: Final = (
    OperatorBackend(
        name="flashinfer_blocks", package="flashinfer-python", imports=("gemmtuned.kernels.from_flashinfer",),
        operator="gemmtuned_flashinfer::fp8_blockscale_gemm_sm90", arguments=("x", "w", "scale_x", "scale_w", "y"),
        suits=_blocks, conditions=(COLUMNS,), contiguous=("x", "w", "scale_w"), compiles=True,
    ),
    OperatorBackend(
        name="flashinfer_tensors", package="flashinfer-python", imports=("gemmtuned.kernels.from_flashinfer",),
        operator="gemmtuned_flashinfer::bmm_fp8", arguments=("x", "b", "scale_x", "scale_b", "y"), suits=_tensors,
        compiles=True,
    ),
)  # fmt: skip
