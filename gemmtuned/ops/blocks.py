"""gemmtuned::block_scaled_mm: fp8 with scales of blocks of 128 that torch's own product does not take as they lie.

That is one row of X, numbers of rows that are no multiple of four, and scales of X row after row, as AITER has them.
One operator, which the hook counts under the size that the program has and a kernel serves without copies.  Without a
solution torch multiplies copies (scaled_by_torch.py).  It writes into `out` and has no gradient.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from gemmtuned.hooks import activate
from gemmtuned.kernels.scaled_by_torch import block_product, needs_copies
from gemmtuned.ops.own_operators import register
from gemmtuned.ops.plain import PLAIN, has_few_rows, nobody_looks_on

MOST_ROWS: Final = 256  # rows of X that kernels of ours take: with more, torch's own product is served by itself
_OUTPUTS: Final = (torch.bfloat16, torch.float16)


def _stock(out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor) -> None:
    out.copy_(block_product(a, b.t(), a_scales, b_scales.t(), out.dtype))


register("block_scaled_mm(Tensor(a!) out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales) -> ()", _stock)


def block_linear(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, dtype: torch.dtype) -> Tensor:
    """x [M, K] by w [N, K] with of_x [M, K/128] and of_w [N/128, K/128] of fp32, sizes rounded up, in dtype."""
    if not _is_served(x, w, of_x, of_w, dtype):
        return block_product(x, w, of_x, of_w, dtype)
    y = x.new_empty(x.shape[0], w.shape[0], dtype=dtype)
    if 1 not in of_x.stride():
        of_x = of_x.contiguous()
    torch.ops.gemmtuned.block_scaled_mm(y, x, w.t(), of_x, of_w.contiguous().t())
    return y


def _is_served(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, dtype: torch.dtype) -> bool:
    """Whether the hook may have a kernel for it, and nothing of torch's needs to see the product itself."""
    m, k = x.shape
    if not x.is_cuda or not activate.is_active() or not has_few_rows(m, MOST_ROWS) or not m or not w.numel():
        return False
    if not needs_copies(of_x, k):
        return False
    if not x.dtype == w.dtype == torch.float8_e4m3fn or dtype not in _OUTPUTS:
        return False
    given = (x, w, of_x, of_w)
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return False
    if torch.compiler.is_compiling():
        return not torch.is_autocast_enabled("cuda")
    return all(type(t) in PLAIN for t in given) and nobody_looks_on("cuda")
