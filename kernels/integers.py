"""Products of int8, exact, by torch's own `_int_mm`; and what torch has of them with scales."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from gemmtuned.kernels.compiling import is_exporting

_INT_MM_ROWS: Final = 17  # torch._int_mm takes no fewer on a GPU


def int_product(x: Tensor, w: Tensor) -> Tensor:
    """[M, N] of int32, exact, of x [M, K] and w [N, K]."""
    m, k = x.shape
    n = w.shape[0]
    if not m or not n or not k:
        return x.new_zeros(m, n, dtype=torch.int32)
    # for K = 1, and for strides that are not those of plain rows, torch's own gives garbage on CPUs
    if x.device.type == "cpu" and k > 1:
        return torch._int_mm(plain_rows(x), plain_rows(w).t())
    if x.device.type == "cpu" or k % 8 or n % 8:
        return (x.double() @ w.double().t()).to(torch.int32)
    if is_exporting():  # for sizes that are not known: no condition may come of them
        rows = F.pad(x, (0, 0, 0, torch.sym_max(_INT_MM_ROWS - m, 0)))  # type: ignore[no-untyped-call]
    else:
        rows = x if m >= _INT_MM_ROWS else F.pad(x, (0, 0, 0, _INT_MM_ROWS - m))
    return torch._int_mm(plain_rows(rows), plain_rows(w).t())[:m]


def scaled_int_product(
    x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, bias: Tensor | None, dtype: torch.dtype,
    sums_w: Tensor | None = None, zero_x: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(x * scale_x) @ (w * scale_w).T + bias in dtype, of x [M, K] and w [N, K]; scales: one, or one a row.

    sums_w, zero_x: of int32, for x - zero_x in the place of x: N sums of w's rows, and M zero points, or None where
    there is one that sums_w is multiplied with already.  What is beyond 32 bits wraps around, as in the product itself.
    """
    sums = _whole(x, w, sums_w, zero_x) * scale_w.reshape(1, -1).float() * scale_x.reshape(-1, 1).float()
    return (sums if bias is None else sums + bias).to(dtype)


def scaled_int_product_into(
    out: Tensor, x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, bias: Tensor | None,
    sums_w: Tensor | None = None, zero_x: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same, bit for bit, into `out` of its dtype: two to four passes over the sums.  It has no gradient."""
    sums = _whole(x, w, sums_w, zero_x) * scale_w.reshape(1, -1).float()  # each becomes fp32 where it is read
    if bias is None:
        return torch.mul(sums, scale_x.reshape(-1, 1).float(), out=out)
    return torch.add(sums.mul_(scale_x.reshape(-1, 1).float()), bias, out=out)


def plain_rows(t: Tensor) -> Tensor:
    """Row after row without gaps; `contiguous()` leaves the strides of sides of one element as they are."""
    return t if t.stride() == (t.shape[1], 1) else t.clone(memory_format=torch.contiguous_format)


def _whole(x: Tensor, w: Tensor, sums_w: Tensor | None, zero_x: Tensor | None) -> Tensor:
    sums = int_product(x, w)
    if sums_w is None:
        return sums
    of_w = sums_w.reshape(1, -1)
    return sums - of_w if zero_x is None else sums.addcmul(zero_x.reshape(-1, 1), of_w, value=-1)
