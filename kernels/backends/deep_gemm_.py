"""DeepGEMM's FP8 product of blocks, where it is installed: SGLang's build of it, an operator, and DeepSeek's own.

DeepSeek's has no operator: kernels/from_deep_gemm.py registers one, which a program has after
`gemmtuned.patch("deep_gemm")`.  On GPUs after Hopper the cast of scales to powers of two is left out, which would be
another product.
"""

from __future__ import annotations

from typing import Final

from gemmtuned.kernels.backends.torch_op import OperatorBackend
from gemmtuned.kernels.peers import COLUMNS, is_deep_gemms

BACKENDS: Final = (
    OperatorBackend(
        name="deep_gemm_sglang", package="sgl-deep-gemm", imports=("deep_gemm",),
        operator="deep_gemm::fp8_fp4_gemm_nt",
        arguments={
            "a": "x", "a_sf": "scale_x", "b": "w", "b_sf": "scale_w", "d": "y", "compiled_dims": "=nk",
            "disable_ue8m0_cast": True, "epilogue_kind?": 0,  # none; an argument since sgl-deep-gemm 0.2.5
        },
        suits=is_deep_gemms, conditions=(COLUMNS,), contiguous=("x", "w", "scale_w"), compiles=True,
    ),
    OperatorBackend(
        name="deep_gemm", package=("deep-gemm", "deep_gemm"), imports=("gemmtuned.kernels.from_deep_gemm",),
        operator="gemmtuned_deep_gemm::fp8_gemm_nt", arguments=("x", "scale_x", "w", "scale_w", "y"),
        suits=is_deep_gemms, conditions=(COLUMNS,), contiguous=("x", "w", "scale_w"), compiles=True,
    ),
)  # fmt: skip
