"""A GEMM by torch's own calls, with what AITER's op takes: transposed weights, scales, another out dtype."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.kernels.dtypes import FP8
from gemmtuned.ops.quantised_arguments import row_of, wants_derivatives
from gemmtuned.ops.tensors import some_tensor

_OP: Final = "gemm_a16w16"


def as_weight(weight: Tensor, k: int) -> Tensor:
    """The weight as [N, K]: itself, or turned back when its sizes say that it is the `.t()` view of one.

    Where N equals K it is [N, K], as AITER takes it: a weight may lie in memory by columns and be what it says, so the
    strides are never asked.  Raises GemmtunedError when neither side is k.
    """
    if weight.dim() != 2:
        raise GemmtunedError(f"the weight has {weight.dim()} dimensions, expected [N, K] or its transposed view")
    rows, cols = weight.shape
    if k not in (rows, cols):
        raise GemmtunedError(f"the weight is {rows}x{cols} and x has K = {k}: neither side of the weight is K")
    return weight if cols == k else weight.t()


def stock_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, scale_a: Tensor | None, scale_b: Tensor | None, otype: torch.dtype
) -> Tensor:
    """Torch's own Y = X @ W.T * scale_a * scale_b + bias, x [..., K], w [N, K].

    F.linear, or _scaled_mm for fp8 operands.  The product is rounded to x's dtype before it becomes otype, as AITER's
    torch path does it.
    """
    if x.dtype in FP8:
        return _scaled(x, w, bias, scale_a, scale_b, otype)
    if scale_a is None and scale_b is None:
        y = F.linear(x, w, bias)
        return y if y.dtype is otype else y.to(otype)
    y = F.linear(x, w).float() * _scale("scale_a", scale_a, x) * _scale("scale_b", scale_b, x)
    return (y if bias is None else y + row_of(_OP, bias, w)).to(otype)


def _scaled(
    x: Tensor, w: Tensor, bias: Tensor | None, scale_a: Tensor | None, scale_b: Tensor | None, otype: torch.dtype
) -> Tensor:
    a, b = _scale("scale_a", scale_a, x), _scale("scale_b", scale_b, x)
    bias = None if bias is None else row_of(_OP, bias, w)
    x2 = x.reshape(-1, x.shape[-1])
    out = otype if otype.itemsize > 1 else torch.bfloat16
    y = None
    if not wants_derivatives(a, b, bias):
        with suppress(RuntimeError):  # no fp8 arithmetic, or sizes it does not take: AITER's own way out
            added = None if bias is None else bias.contiguous()  # on CPUs torch takes any for such
            y = torch._scaled_mm(x2, w.t(), scale_a=a, scale_b=b, bias=added, out_dtype=out)
    if y is None:
        y = F.linear(x2.float(), w.float()) * a * b
        y = y if bias is None else y + bias
    return y.view(*x.shape[:-1], w.shape[0]).to(otype)


def _scale(name: str, scale: Tensor | None, x: Tensor) -> Tensor:
    if scale is None:
        return torch.ones(1, dtype=torch.float32, device=x.device)
    if some_tensor(f"{_OP}: {name}", scale).numel() != 1:
        raise GemmtunedError(
            f"{_OP}: {name} is {tuple(scale.shape)}, expected one number: gemm_a8w8 takes one for each row"
        )
    return scale.reshape(1).float()
