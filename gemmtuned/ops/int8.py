"""gemmtuned::int8_scaled_mm: the int8 product with scales as one operator, which the hook counts and a kernel serves.

int8_scaled_mm_zero is the same with zero points of X.  Without a solution they are torch's `_int_mm`, what zero points
take off, and the scales behind it.  They write into `out`, as vLLM's operators of these forms do, and have no gradient.
A compiler makes one kernel of the scales where it sees them, so it is shown them where the hook is not on, or X has
more rows than kernels of ours take.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from gemmtuned.hooks import activate
from gemmtuned.kernels.integers import plain_rows, scaled_int_product, scaled_int_product_into
from gemmtuned.ops.own_operators import register
from gemmtuned.ops.plain import PLAIN, has_few_rows, nobody_transforms
from gemmtuned.ops.quantised_arguments import by_row, wants_derivatives

MOST_ROWS: Final = 256  # rows of X that kernels of ours take


def _stock(out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None) -> None:
    scaled_int_product_into(out, a, b.t(), a_scales, b_scales, bias)


def _stock_zero(
    out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, sums: Tensor, zero: Tensor | None,
    bias: Tensor | None,
) -> None:  # fmt: skip
    scaled_int_product_into(out, a, b.t(), a_scales, b_scales, bias, sums, zero)


register(
    "int8_scaled_mm(Tensor(a!) out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()", _stock
)
register(
    "int8_scaled_mm_zero(Tensor(a!) out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor sums, "
    "Tensor? zero, Tensor? bias) -> ()",
    _stock_zero,
)


def int8_linear(
    x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor | None, dtype: torch.dtype,
    sums: Tensor | None = None, zero: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(x * of_x) @ (w * of_w).T + bias in dtype, of x [M, K] and w [N, K]; scales of fp32, one number or one a row.

    sums: [N] of int32, of w's rows, where x has zero points.  zero: these, of int32, one or one a row; None where sums
    are multiplied with one already.
    """
    if _wants_steps(x, w, of_x, of_w, bias, sums, zero) or not min(*x.shape, w.shape[0]):
        return scaled_int_product(x, w, of_x, of_w, bias, dtype, sums, zero)
    m, n = x.shape[0], w.shape[0]
    y = x.new_empty(m, n, dtype=dtype)
    added = None if bias is None else bias.reshape(-1).to(dtype)
    if sums is not None and zero is None and of_x.numel() == 1:
        of_x, of_w = of_x.reshape(1), of_w.reshape(1) if of_w.numel() == 1 else plain_rows(of_w.reshape(1, -1))
        torch.ops.gemmtuned.int8_scaled_mm_zero(y, x, w.t(), of_x, of_w, sums.contiguous(), None, added)
        return y
    if sums is None and of_x.numel() == 1 and of_w.numel() == 1:
        of_x, of_w = of_x.reshape(1), of_w.reshape(1)
    else:  # one kind of scales for both: a kernel of rows serves a mixture, too
        of_x, of_w = by_row(of_x, of_w, m, n)
    if sums is None:
        torch.ops.gemmtuned.int8_scaled_mm(y, x, w.t(), of_x, of_w, added)
    else:
        each = sums.new_ones(m) if zero is None else zero.reshape(-1).expand(m).contiguous()
        torch.ops.gemmtuned.int8_scaled_mm_zero(y, x, w.t(), of_x, of_w, sums.contiguous(), each, added)
    return y


def _wants_steps(x: Tensor, *others: Tensor | None) -> bool:
    """Whether somebody is to see the product and the scales by themselves: a derivative, a compiler, a transform."""
    given = [t for t in (x, *others) if t is not None]
    if x.device.type not in ("cpu", "cuda") or wants_derivatives(*given):
        return True
    if torch.compiler.is_compiling():
        return not (activate.is_active() and has_few_rows(x.shape[0], MOST_ROWS))
    return not (all(type(t) in PLAIN for t in given) and nobody_transforms())
