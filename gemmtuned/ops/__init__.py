"""The public ops, named and called as AITER's are.

    from gemmtuned.ops import fused_moe, gemm_a16w16, gemm_a8w8, gemm_a8w8_blockscale, shuffle_weight, TunedGemm, tgemm

They run what is known to be best and fall back to torch: a miss never fails.  Inside torch.compile they are torch's own
calls, which the hook serves below.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.ops.moe import ActivationType, QuantType, fused_moe
from gemmtuned.ops.quantised import (
    batched_gemm_a8w8,
    batched_gemm_bf16,
    gemm_a4w4,
    gemm_a8w8,
    gemm_a8w8_blockscale,
    gemm_a8w8_bpreshuffle,
    gemm_a16w4,
    gemm_a16w8,
)
from gemmtuned.ops.shuffle import PRESHUFFLE_M_THRESHOLD, ShuffleError, shuffle_weight, unshuffle_weight
from gemmtuned.ops.tensors import some_tensor
from gemmtuned.ops.tuned_gemm import TunedGemm, tgemm

__all__ = [
    "PRESHUFFLE_M_THRESHOLD",
    "ActivationType",
    "QuantType",
    "ShuffleError",
    "TunedGemm",
    "batched_gemm_a8w8",
    "batched_gemm_bf16",
    "fused_moe",
    "gemm_a4w4",
    "gemm_a8w8",
    "gemm_a8w8_blockscale",
    "gemm_a8w8_bpreshuffle",
    "gemm_a16w4",
    "gemm_a16w8",
    "gemm_a16w16",
    "gemm_a16w16_atomic",
    "gemm_afp4wfp4",
    "shuffle_weight",
    "tgemm",
    "triton_gemm_a16w16",
    "unshuffle_weight",
]


def gemm_a16w16(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    otype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    scale_c: Tensor | None = None,
    *,
    bpreshuffle: bool | None = None,
) -> Tensor:
    """Y[..., N] = X[..., K] @ W[N, K].T * scale_a * scale_b + bias, in otype (x's dtype unless given).

    weight: [N, K], or its `.t()` view, which sizes and strides tell.  bias: [N].  scale_a, scale_b: one number each,
    for fp8 operands and any other.  bpreshuffle: whether the weight is in shuffle_weight's order; None believes its
    mark.

    Raises GemmtunedError when no side of the weight is K, for scale_c (fp8 results), and for a view of a shuffled
    weight unless bpreshuffle says what it is.
    """
    return tgemm.gemm_a16w16(x, weight, bias, otype, scale_a, scale_b, scale_c, bpreshuffle=bpreshuffle)


def gemm_a16w16_atomic(
    x: Tensor,
    w: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    y: Tensor | None = None,
    config: dict[str, Any] | None = None,
) -> Tensor:
    """Y[M, N] = X[M, K] @ W[N, K].T, written into y where one is given.

    AITER's kernel of this name splits K and adds the parts up with atomics, in an order that changes from call to call,
    each part rounded first, onto a y that must be zero.  Here the parts of a split are added in a fixed order, in fp32
    and rounded once, and what y held does not matter.  config: tile sizes of AITER's kernel, taken and not used.
    """
    if some_tensor("x", x).dim() != 2 or some_tensor("w", w).dim() != 2 or x.shape[1] != w.shape[1]:
        raise GemmtunedError(f"x is {tuple(x.shape)} and w {tuple(w.shape)}, expected [M, K] and [N, K]")
    return _into(y, tgemm.gemm_a16w16(x, w, otype=dtype))


def triton_gemm_a16w16(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    y: Tensor | None = None,
    config: dict[str, Any] | None = None,
    activation: str | None = None,
    skip_reduce: bool = False,
    kernel_type: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """AITER's Triton op `gemm_a16w16`: as the atomic one, with a bias [N].

    config, kernel_type, backend choose among AITER's kernels: taken and not used, ours chooses itself.  Raises
    GemmtunedError for an activation, and for skip_reduce, which asks for the parts of a split that has not happened.
    """
    if activation is not None or skip_reduce:
        asked = "skip_reduce" if skip_reduce else f"activation={activation!r}"
        raise GemmtunedError(f"{asked} is not done here: leave it out, and apply an activation to the result")
    return _into(y, tgemm.gemm_a16w16(x, w, bias, dtype))


def gemm_afp4wfp4(
    x: Tensor,
    w: Tensor,
    x_scales: Tensor,
    w_scales: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    y: Tensor | None = None,
    config: dict[str, Any] | None = None,
    skip_reduce: bool = False,
    backend: str | None = None,
) -> Tensor:
    """AITER's Triton op of this name: gemm_a4w4 without a bias, written into y where one is given.

    x [M, K/2], w [N, K/2], scales [., K/32] that are not shuffled.  config, backend: taken and not used.  Raises
    GemmtunedError as gemm_a4w4, and for skip_reduce, which asks for the parts of a split that has not happened.
    """
    if skip_reduce:
        raise GemmtunedError("skip_reduce is not done here: leave it out")
    return _into(y, gemm_a4w4(x, w, x_scales, w_scales, dtype=dtype))


def _into(y: Tensor | None, found: Tensor) -> Tensor:
    if y is None:
        return found
    if some_tensor("y", y).shape != found.shape or y.dtype != found.dtype:
        raise GemmtunedError(f"y is {tuple(y.shape)} {y.dtype}, expected {tuple(found.shape)} {found.dtype}")
    return y.copy_(found)
