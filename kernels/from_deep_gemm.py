"""DeepGEMM's functions as operators: `gemmtuned_deep_gemm::fp8_gemm_nt` calls deep_gemm.fp8_gemm_nt.

Importing this file imports DeepGEMM and registers them; workers do, and programs that ask by
gemmtuned.patch("deep_gemm").
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import deep_gemm  # type: ignore[import-not-found]
from torch import Tensor
from torch.library import Library

LIBRARY: Final[Any] = Library("gemmtuned_deep_gemm", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define("fp8_gemm_nt(Tensor x, Tensor scale_x, Tensor w, Tensor scale_w, Tensor(a!) y) -> ()")


def fp8_gemm_nt(x: Tensor, scale_x: Tensor, w: Tensor, scale_w: Tensor, y: Tensor) -> None:
    """y [M, N] = (x [M, K] * scale_x [M, K/128]) @ (w [N, K] * scale_w [N/128, K/128]).T, scales in fp32."""
    deep_gemm.fp8_gemm_nt((x, scale_x), (w, scale_w), y, disable_ue8m0_cast=True)


LIBRARY.impl("fp8_gemm_nt", fp8_gemm_nt, "CUDA")


def is_ready(module: ModuleType) -> bool:
    """As Patch.is_ready (gemmtuned/patches.py)."""
    return hasattr(module, "fp8_gemm_nt")


def apply(module: ModuleType) -> Callable[[], None]:
    """As Patch.apply: to import this file was all. The operators stay: torch cannot be rid of one without harm."""
    return lambda: None
