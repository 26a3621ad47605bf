"""gemmtuned::int8_scaled_mm: the int8 product with scales as one operator, which the hook counts and a kernel serves.

Without a solution it is torch's `_int_mm` and the scales behind it.  It writes into `out`, as vLLM's operator of this
form does; it has no gradient.  A compiler makes one kernel of the scales where it sees them, so it is shown them where
the hook is not on, or X has more rows than kernels of ours take.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from gemmtuned.hooks import activate
from gemmtuned.kernels.integers import plain_rows, scaled_int_product, scaled_int_product_into
from gemmtuned.ops.plain import PLAIN, has_few_rows, nobody_transforms
from gemmtuned.ops.quantised_arguments import wants_derivatives

MOST_ROWS: Final = 256  # of X that kernels of ours take
_LIBRARY: Final[Any] = torch.library.Library("gemmtuned", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "int8_scaled_mm(Tensor(a!) out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()"
)


def _stock(out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None) -> None:
    scaled_int_product_into(out, a, b.t(), a_scales, b_scales, bias)


def _nothing(out: Tensor, a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, bias: Tensor | None) -> None:
    """What a compiler is told: the result is written where it lies."""


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("int8_scaled_mm", _stock, _key)
torch.library.register_fake("gemmtuned::int8_scaled_mm", _nothing, lib=_LIBRARY)


def int8_linear(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(x * of_x) @ (w * of_w).T + bias in dtype, of x [M, K] and w [N, K]; scales of fp32, one number or one a row."""
    if _wants_steps(x, w, of_x, of_w, bias) or not min(*x.shape, w.shape[0]):
        return scaled_int_product(x, w, of_x, of_w, bias, dtype)
    m, n = x.shape[0], w.shape[0]
    y = x.new_empty(m, n, dtype=dtype)
    if of_x.numel() == 1 and of_w.numel() == 1:
        of_x, of_w = of_x.reshape(1), of_w.reshape(1)
    else:  # one kind of scales for both: a kernel of rows serves a mixture, too
        of_x = plain_rows(of_x.reshape(-1, 1).expand(m, 1))
        of_w = plain_rows(of_w.reshape(1, -1).expand(1, n))
    added = None if bias is None else bias.reshape(-1).to(dtype)
    torch.ops.gemmtuned.int8_scaled_mm(y, x, w.t(), of_x, of_w, added)
    return y


def _wants_steps(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor | None) -> bool:
    """Whether somebody is to see the product and the scales by themselves: a derivative, a compiler, a transform."""
    given = [t for t in (x, w, of_x, of_w, bias) if t is not None]
    if x.device.type not in ("cpu", "cuda") or wants_derivatives(*given):
        return True
    if torch.compiler.is_compiling():
        return not (activate.is_active() and has_few_rows(x.shape[0], MOST_ROWS))
    return not (all(type(t) in PLAIN for t in given) and nobody_transforms())
