"""Scaled products of fp8 by what torch has here: _scaled_mm where it takes them, else numbers of fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from gemmtuned.kernels.scaled_by_torch import scaled_mm, torch_takes
from gemmtuned.ops.quantised_arguments import by_row, wants_derivatives


def fp8_linear(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(x [M, K] * of_x) @ (w [N, K] * of_w).T + bias in dtype; scales of fp32, one number or one a row."""
    kind = "tensor" if of_x.numel() == 1 and of_w.numel() == 1 else "row"
    if not torch_takes(x, w, dtype, kind) or wants_derivatives(of_x, of_w, bias):
        y = (x.float() * of_x.reshape(-1, 1)) @ (w.float() * of_w.reshape(-1, 1)).t()
        return (y if bias is None else y + bias).to(dtype)
    if kind == "row":
        of_x, of_w = by_row(of_x, of_w, x.shape[0], w.shape[0])
    else:
        of_x, of_w = of_x.reshape(()), of_w.reshape(())
    return scaled_mm(x, w, of_x, of_w, bias, dtype)
