"""gemmtuned::shuffled_scaled_mm: an 8-bit product of a weight in AITER's order as one operator, which a kernel serves.

Without a solution the weight is turned back, and its product is that of a plain one.  So it is where X has more rows
than kernels take: the product of the plain copy is then tuned by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gemmtuned.configs.tunable import SHUFFLED_ROWS
from gemmtuned.hooks import activate
from gemmtuned.kernels.compiling import asked_once
from gemmtuned.kernels.device import capability
from gemmtuned.kernels.integers import scaled_int_product_into
from gemmtuned.kernels.scaled_by_torch import block_product
from gemmtuned.kernels.shuffled_order import RUN, TILE_K, TILE_ROWS, plain
from gemmtuned.ops.fp8 import fp8_linear
from gemmtuned.ops.own_operators import register
from gemmtuned.ops.plain import PLAIN, has_few_rows, nobody_transforms
from gemmtuned.ops.quantised_arguments import by_row, wants_derivatives
from gemmtuned.ops.shuffle import tile_of


def _stock(out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None) -> None:
    w = plain(b.t())
    if a.dtype == torch.int8:
        scaled_int_product_into(out, a, w, a_scales, b_scales, bias)
    elif b_scales.numel() in (1, w.shape[0]) and a_scales.numel() in (1, a.shape[0]):
        out.copy_(fp8_linear(a, w, a_scales, b_scales, bias, out.dtype))
    else:
        out.copy_(block_product(a, w, a_scales, b_scales.t(), out.dtype))


register(
    "shuffled_scaled_mm(Tensor(a!) out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()",
    _stock,
)


def shuffled_linear(
    x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor | None, dtype: torch.dtype, *, blocks: bool = False
) -> Tensor:
    """(x [M, K] * of_x) @ (plain w [N, K] * of_w).T + bias, of a w that `can_be_read` says yes of.

    Scales: of fp32, one number or one a row each; blocks: [M, K/128] and [N/128, K/128], sizes rounded up.
    """
    m, n = x.shape[0], w.shape[0]
    y = x.new_empty(m, n, dtype=dtype)
    if blocks:
        of_x, of_w = (of_x if 1 in of_x.stride() else of_x.contiguous()), of_w.contiguous().t()
    elif of_x.numel() == of_w.numel() == 1:
        of_x, of_w = of_x.reshape(1), of_w.reshape(1)
    else:  # one kind of scales for both: a kernel of rows serves a mixture, too
        of_x, of_w = by_row(of_x, of_w, m, n)
    added = None if bias is None else bias.reshape(-1).to(dtype)
    torch.ops.gemmtuned.shuffled_scaled_mm(y, x, w.t(), of_x, of_w, added)
    return y


@asked_once
def _has_kernels(index: int) -> bool:
    """Whether this CUDA device has kernels for that order. On CPUs (-1) calls are recorded without any."""
    return index < 0 or capability(index) == (9, 0)


def can_be_read(x: Any, w: Any, *others: Any) -> bool:
    """Whether the operator may take x [M, K] and a shuffled w [N, K] as they are, and nobody looks into the product."""
    given = [x, w, *(t for t in others if t is not None)]
    if not all(isinstance(t, Tensor) and t.layout is torch.strided for t in given):
        return False  # the checks of a plain weight have the words for it
    if x.device.type not in ("cpu", "cuda") or x.dim() != 2 or x.shape[1:] != w.shape[1:] or not min(x.shape):
        return False
    if w.element_size() != 1 or not w.is_contiguous() or tile_of(w) != (TILE_ROWS, TILE_K, RUN):
        return False
    if not activate.is_active() or not has_few_rows(x.shape[0], SHUFFLED_ROWS) or wants_derivatives(*given):
        return False
    if not _has_kernels(x.get_device()):
        return False  # the product of the plain copy is then tuned and served by itself
    return torch.compiler.is_compiling() or (all(type(t) in PLAIN for t in given) and nobody_transforms())
