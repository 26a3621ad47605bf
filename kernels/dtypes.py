"""Our short dtype names as torch dtypes, and the rounding each one brings."""

from __future__ import annotations

from typing import Final

import torch

from gemmtuned.configs.errors import CandidateFailed

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "u8": torch.uint8,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
SHORT: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}

FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)  # types of our ops' results
FP8: Final = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
E8M0: Final = torch.float8_e8m0fnu  # powers of two, of blocks
PACKED_FP4: Final = getattr(torch, "float4_e2m1fn_x2", torch.uint8)  # two numbers a byte; younger than our oldest torch

# Half the distance from 1 to the next number: the largest relative error of one rounding. Sums of integers have none.
UNIT_ROUNDOFF: Final[dict[str, float]] = {
    "fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8, "c128": 2.0**-53, "c64": 2.0**-24,
    "i32": 0.0,
}  # fmt: skip


def bits(t: torch.Tensor) -> torch.Tensor:
    """The tensor as one that can be indexed and copied: torch has few operators for 8-bit floats."""
    return t.view(torch.uint8) if t.is_floating_point() and t.element_size() == 1 else t


def wide(t: torch.Tensor) -> torch.Tensor:
    """The values in fp64, or complex128."""
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a short name. Raises CandidateFailed for one that no family makes inputs of."""
    try:
        return TORCH_DTYPES[name]
    except KeyError:
        raise CandidateFailed(f"dtype {name} has no family yet, only {', '.join(TORCH_DTYPES)}") from None
