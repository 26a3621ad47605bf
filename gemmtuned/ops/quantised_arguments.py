"""Checks of the operands of the 8-bit and 4-bit ops: sizes, types and devices must fit each other.

All of them raise GemmtunedError with what does not fit.  Sizes are compared one by one and never by `in`: to a
compiler for which N is a symbol, 32 is not in (1, N).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.kernels.dtypes import E8M0, FLOATS, PACKED_FP4
from gemmtuned.kernels.integers import plain_rows
from gemmtuned.ops.shuffle import is_shuffled, is_view_of_shuffled
from gemmtuned.ops.tensors import tensor

GROUP_FP4: Final = 32  # values of K with one e8m0 scale


def by_row(of_x: Tensor, of_w: Tensor, m: int, n: int) -> tuple[Tensor, Tensor]:
    """Scales [M, 1] of X and [1, N] of W, contiguous, each made of one number or of one per row."""
    return plain_rows(of_x.reshape(-1, 1).expand(m, 1)), plain_rows(of_w.reshape(1, -1).expand(1, n))


def check_plain(op: str, w: Tensor) -> None:
    """Refuse a weight that is marked as shuffled."""
    if is_shuffled(tensor(f"{op}: the weight", w)) or is_view_of_shuffled(w):
        raise GemmtunedError(f"{op}: the weight is shuffled, or a view of one that is: hand the plain weight")


def check_k(op: str, x: Tensor, w: Tensor) -> None:
    """Refuse operands other than x [.., K] and w [N, K] on one device."""
    if tensor(f"{op}: w", w).dim() != 2 or not tensor(f"{op}: x", x).dim() or x.shape[-1] != w.shape[1]:
        raise GemmtunedError(f"{op}: x is {tuple(x.shape)} and w {tuple(w.shape)}, expected [.., K] and [N, K]")
    if x.device != w.device:
        raise GemmtunedError(f"{op}: x is on {x.device} and w on {w.device}")


def check_result(op: str, dtype: Any) -> None:
    """Refuse a type that results cannot have."""
    if dtype not in FLOATS:
        raise GemmtunedError(f"{op}: dtype is {dtype}, expected one of {', '.join(map(str, FLOATS))}")


def bias_of(op: str, bias: Tensor | None, w: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The bias as [N] in dtype; None without one."""
    return None if bias is None else row_of(op, bias, w).to(dtype)


def factors_of(op: str, alpha: float | None, beta: float | None, bias: Tensor | None) -> tuple[float, float]:
    """(alpha, beta) of alpha * product + beta * bias; 1 in place of None."""
    for name, factor in (("alpha", alpha), ("beta", beta)):
        if factor is not None and not isinstance(factor, int | float):
            raise GemmtunedError(f"{op}: {name} is {factor!r}, expected a number")
    if beta and bias is None:
        raise GemmtunedError(f"{op}: beta is {beta!r}, and there is no bias")
    return 1.0 if alpha is None else alpha, 1.0 if beta is None else beta


def scaled_bias(op: str, bias: Tensor | None, w: Tensor, dtype: torch.dtype, beta: float) -> Tensor | None:
    """beta * bias in dtype, multiplied in fp32; None without a bias, and where beta is 0, which does not read it."""
    if bias is None:
        return None
    row = row_of(op, bias, w)
    return None if beta == 0 else row.to(dtype) if beta == 1 else (row.float() * beta).to(dtype)


def row_of(op: str, bias: Tensor, w: Tensor) -> Tensor:
    """A bias [N] or [1, N] as [N]. w: [N, ..]."""
    n, shape = w.shape[0], tuple(tensor(f"{op}: bias", bias).shape)
    if not shape or bias.numel() != n or shape[-1] != n or bias.is_complex():
        raise GemmtunedError(f"{op}: bias is {shape} of {bias.dtype}, expected [{n}]")
    _check_device(f"{op}: bias", bias, w)
    return bias.reshape(n)


def scale_of(what: str, scale: Tensor, of: Tensor, many: int) -> Tensor:
    """The scale in fp32, of the shape that it has: one number, or `many` of them in a row or a column."""
    found = tensor(what, scale)
    is_line = len([side for side in found.shape if side != 1]) <= 1  # torch 2.11 cannot add up unknown comparisons
    if (found.numel() != 1 and found.numel() != many) or not found.is_floating_point() or not is_line:
        raise GemmtunedError(
            f"{what} is {tuple(found.shape)} of {found.dtype}, expected one float or {many} of them, one for each row"
        )
    _check_device(what, found, of)
    return found.float()


def scales_of(what: str, scale: Tensor, of: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The scales in fp32; they must have this shape."""
    if tuple(tensor(what, scale).shape) != shape or not scale.is_floating_point():
        raise GemmtunedError(f"{what} is {tuple(scale.shape)} of {scale.dtype}, expected {list(shape)} of fp32")
    _check_device(what, scale, of)
    return scale.float()


def zero_points_of(
    op: str, x: Tensor, w: Tensor, x_zero: Tensor | None, w_sums: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """(zero points of x, sums of w's rows [N]), both int32; (None, None) where neither is given.

    Where only w_sums is given it has been multiplied by the zero point already, and the first is None.
    """
    if x_zero is None and w_sums is None:
        return None, None
    m, n = x.shape[0], w.shape[0]
    if x.dtype != torch.int8:
        raise GemmtunedError(f"{op}: x_zero or w_sums is given with XQ of {x.dtype}, zero points are of torch.int8")
    zero = None if x_zero is None else _line_of(f"{op}: x_zero", x_zero, x, m, (torch.int8, torch.int32), one=True)
    if w_sums is None:
        return zero, w.sum(1, dtype=torch.int32)
    return zero, _line_of(f"{op}: w_sums", w_sums, w, n, (torch.int32,), one=False)


def _line_of(
    what: str, given: Any, of: Tensor, many: int, types: tuple[torch.dtype, ...], *, one: bool
) -> Tensor:  # fmt: skip
    """`many` integers, as int32 of one dimension. one: a single one will do."""
    found = tensor(what, given)
    fits = found.numel() == many or (one and found.numel() == 1)
    is_line = len([side for side in found.shape if side != 1]) <= 1
    if not fits or not is_line or found.dtype not in types:
        expected = f"{'one integer or ' if one else ''}{many} of {' or '.join(map(str, types))}, one for each row"
        raise GemmtunedError(f"{what} is {tuple(found.shape)} of {found.dtype}, expected {expected}")
    _check_device(what, found, of)
    return found.reshape(-1).to(torch.int32)


def codes_of(what: str, packed: Tensor) -> Tensor:
    """Packed 4-bit codes as bytes [rows, K/2]."""
    if tensor(what, packed).dim() != 2 or packed.dtype not in (torch.uint8, PACKED_FP4):
        raise GemmtunedError(f"{what} is {tuple(packed.shape)} of {packed.dtype}, expected [rows, K/2] of torch.uint8")
    return _as_bytes(packed)


def powers_of(what: str, scale: Tensor, codes: Tensor) -> Tensor:
    """Scales that are powers of two (e8m0), as bytes [rows, K/32]."""
    rows, k = codes.shape[0], 2 * codes.shape[1]
    shape = (rows, k // GROUP_FP4)
    if k % GROUP_FP4 or tensor(what, scale).dtype not in (torch.uint8, E8M0) or tuple(scale.shape) != shape:
        raise GemmtunedError(
            f"{what} is {tuple(scale.shape)} of {scale.dtype}, expected [{rows}, {k} / {GROUP_FP4}] of bytes (e8m0)"
        )
    _check_device(what, scale, codes)
    return _as_bytes(scale)


def wants_derivatives(*given: Tensor | None) -> bool:
    """Whether derivatives by one of these tensors are wanted, which torch's scaled products do not have."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)


def _as_bytes(t: Tensor) -> Tensor:
    """A view as torch.uint8, made only of another type: torch.jit cannot trace such views."""
    return t if t.dtype == torch.uint8 else t.view(torch.uint8)


def _check_device(what: str, t: Tensor, of: Tensor) -> None:
    if t.device != of.device:
        raise GemmtunedError(f"{what} is on {t.device}, its operand on {of.device}")
