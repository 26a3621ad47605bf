"""Operands as a compiled kernel of ours takes them."""

from __future__ import annotations

import torch

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.kernels.own_kernel import POINTER_ALIGN


def check_operands(ld_multiple: int, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise CandidateFailed when strides or alignment are not what the binary was compiled for."""
    for name, tensor in (("x", x), ("w", w), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise CandidateFailed(f"{name} has stride {tensor.stride(-1)} along K or N, expected 1")
        if tensor.data_ptr() % POINTER_ALIGN:
            raise CandidateFailed(f"{name} is not aligned to {POINTER_ALIGN} bytes")
        if name != "bias" and tensor.shape[0] > 1 and tensor.stride(0) % ld_multiple:
            raise CandidateFailed(f"{name} has rows {tensor.stride(0)} apart, expected a multiple of {ld_multiple}")
