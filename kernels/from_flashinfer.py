"""FlashInfer's functions as operators, in the namespace `gemmtuned_flashinfer` under their own names.

Importing this file imports FlashInfer and registers them; workers do, and programs that ask by
gemmtuned.patch("flashinfer").
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import flashinfer.gemm  # type: ignore[import-not-found]
from torch import Tensor
from torch.library import Library

LIBRARY: Final[Any] = Library("gemmtuned_flashinfer", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define("fp8_blockscale_gemm_sm90(Tensor x, Tensor w, Tensor scale_x, Tensor scale_w, Tensor(a!) y) -> ()")
LIBRARY.define("bmm_fp8(Tensor x, Tensor b, Tensor scale_x, Tensor scale_b, Tensor(a!) y) -> ()")


def fp8_blockscale_gemm_sm90(x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, y: Tensor) -> None:
    """y [M, N] = (x [M, K] * scale_x [M, K/128]) @ (w [N, K] * scale_w [N/128, K/128]).T on Hopper."""
    flashinfer.gemm.fp8_blockscale_gemm_sm90(x, w, scale_x, scale_w, out=y)


def bmm_fp8(x: Tensor, b: Tensor, scale_x: Tensor, scale_b: Tensor, y: Tensor) -> None:
    """y [M, N] = (x [M, K] * scale_x) @ (b [K, N] * scale_b), with one scale each."""
    flashinfer.gemm.bmm_fp8(x[None], b[None], scale_x.reshape(()), scale_b.reshape(()), y.dtype, out=y[None])


for function in (fp8_blockscale_gemm_sm90, bmm_fp8):
    LIBRARY.impl(function.__name__, function, "CUDA")


def is_ready(module: ModuleType) -> bool:
    """As Patch.is_ready (gemmtuned/patches.py)."""
    return hasattr(module, "bmm_fp8")


def apply(module: ModuleType) -> Callable[[], None]:
    """As Patch.apply: to import this file was all. The operators stay: torch cannot be rid of one without harm."""
    return lambda: None
