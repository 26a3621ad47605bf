"""gemmtuned::mxfp4_mm: a product of two operands of MXFP4 as one operator, which the hook counts and a kernel serves.

Everywhere else, and for whoever wants to see the product itself, X becomes numbers of 16 bits, and those are multiplied
by W as gemm_a16w4 does it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.problem import MAX_DIM
from gemmtuned.configs.tunable import WEIGHT_ONLY_ROWS
from gemmtuned.hooks import activate
from gemmtuned.kernels.compiling import asked_once
from gemmtuned.kernels.device import capability
from gemmtuned.kernels.families.mxfp4 import stock_product
from gemmtuned.ops.own_operators import register
from gemmtuned.ops.plain import PLAIN, has_few_rows, nobody_looks_on
from gemmtuned.ops.quantised_arguments import wants_derivatives
from gemmtuned.ops.weight_only import COMPILED_ROWS

_LEAST: Final = (8, 0)  # NVIDIA GPUs with kernels for it
_MULTIPLY_IT: Final = (10, 0)  # those with an instruction for it, and kernels for any number of rows of X
_RESULTS: Final = (torch.bfloat16, torch.float16)


def _stock(out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None) -> None:
    """Raises GemmtunedError where torch would compute something else of such operands: bytes of scales have no type."""
    given = (a, b, a_scales, b_scales)
    rows, pairs = (a.shape[0], b.shape[0]) if a.dim() and b.dim() else (-1, -1), a.shape[-1] if a.dim() else 0
    shapes = [(m, each) for each in (pairs, pairs // 16) for m in rows]
    right = all(t.dtype == torch.uint8 and t.shape == shape for t, shape in zip(given, shapes, strict=True))
    if not right or pairs % 16 or out.shape != rows or not out.is_floating_point():
        said = ", ".join(f"{tuple(t.shape)} of {t.dtype}" for t in (*given, out))
        raise GemmtunedError(
            f"gemmtuned::mxfp4_mm: a, b, their scales and out are {said}, expected bytes [M, K/2], [N, K/2], [M, K/32] "
            "and [N, K/32], and floats [M, N]"
        )
    out.copy_(stock_product(a, b, a_scales, b_scales, bias, out.dtype))


register("mxfp4_mm(Tensor(a!) out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()", _stock)


@asked_once
def _most_rows(index: int) -> int:
    """Rows of X that this CUDA device has kernels for."""
    found = capability(index)
    return MAX_DIM if found >= _MULTIPLY_IT else WEIGHT_ONLY_ROWS if found >= _LEAST else 0


def can_be_multiplied(dtype: torch.dtype, *operands: Tensor | None) -> bool:
    """Whether the operator may take these operands into dtype, and nobody looks into the product. The first is X.

    In compiled code it takes as few rows of X as gemm_a16w4's does, and for its reason.
    """
    given = [t for t in operands if t is not None]
    x = given[0]
    if not x.is_cuda or dtype not in _RESULTS or not activate.is_active() or wants_derivatives(*given):
        return False
    compiled, most = torch.compiler.is_compiling(), _most_rows(x.get_device())
    if not has_few_rows(x.shape[0], min(COMPILED_ROWS, most) if compiled else most):
        return False
    if not all(map(Tensor.numel, given)):
        return False
    if compiled:
        return not torch.is_autocast_enabled("cuda")
    return all(type(t) in PLAIN for t in given) and nobody_looks_on("cuda")


def mxfp4_linear(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a [M, K / 2] by b [N, K / 2] of bytes, scales [M, K / 32] and [N, K / 32] of bytes, bias [N] of dtype."""
    y = a.new_empty(a.shape[0], b.shape[0], dtype=dtype)
    torch.ops.gemmtuned.mxfp4_mm(y, a, b, of_a.contiguous(), of_b.contiguous(), bias)
    return y
