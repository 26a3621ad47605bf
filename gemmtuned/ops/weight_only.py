"""gemmtuned::weight_only_mm: X by a quantised weight as one operator, which the hook counts and a kernel serves.

Without a solution the weight is dequantised into X's type and multiplied, as gemm_a16w8 and gemm_a16w4 do it without
the hook.  It writes into `out` and has no gradient.
"""

from __future__ import annotations

from math import prod
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from gemmtuned.configs.tunable import WEIGHT_ONLY_ROWS
from gemmtuned.hooks import activate
from gemmtuned.kernels.dequantise import dequantised
from gemmtuned.kernels.device import capability
from gemmtuned.ops.own_operators import register
from gemmtuned.ops.plain import PLAIN, has_few_rows, nobody_looks_on, nobody_transforms
from gemmtuned.ops.quantised_arguments import wants_derivatives

_LEAST: Final = {
    torch.int8: (8, 0),
    torch.uint8: (8, 0),
    torch.float8_e4m3fn: (8, 9),
}  # compute capability, by types of W
COMPILED_ROWS: Final = 16  # rows of X in compiled code: with more, a compiler's own dequantising is far better


def quant_of(w: Tensor, scales: Tensor) -> str:
    """What dequantised calls this weight: scales [1, 1], [N, 1], of blocks, or [N, groups] of bytes' codes."""
    if w.dtype == torch.uint8:
        return "mxfp4" if scales.dtype == torch.uint8 else "int4"
    return "row" if scales.shape[1] == 1 and scales.shape[0] in (1, w.shape[0]) else "128x128"


def _stock(out: Tensor, x: Tensor, w: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    values = dequantised(w, scales, quant_of(w, scales), x.dtype, in_one_pass=True)
    if bias is None:
        torch.mm(x, values.t(), out=out)
    else:
        torch.addmm(bias, x, values.t(), out=out)


register("weight_only_mm(Tensor(a!) out, Tensor x, Tensor w, Tensor scales, Tensor? bias) -> ()", _stock)


def weight_only_linear(x: Tensor, w: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [.., K] by w [N, K], or [N, K / 2] of bytes, with scales [rows, columns]; bias [N] of x's type."""
    if not _is_served(x, w, scales, bias):
        alone = (
            not torch.compiler.is_compiling()
            and type(w) in PLAIN and type(scales) in PLAIN
            and not wants_derivatives(scales)
            and nobody_transforms()
        )  # fmt: skip
        values = dequantised(w, scales, quant_of(w, scales), x.dtype, in_one_pass=alone)
        return F.linear(x, values, bias).to(x.dtype)  # autocast gives its own
    rows = x.reshape(-1, x.shape[-1])
    y = x.new_empty(rows.shape[0], w.shape[0])
    torch.ops.gemmtuned.weight_only_mm(y, rows, w, scales, bias)
    return y.view(*x.shape[:-1], w.shape[0])


def _has_tiles(x: Tensor, w: Tensor) -> bool:
    """Whether there are kernels for many rows of X: else torch's product of the copy is better served by itself."""
    if torch.compiler.is_compiling() or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    least = _LEAST.get(w.dtype)
    return least is not None and capability(x.get_device()) >= least


def _is_served(x: Tensor, w: Tensor, scales: Tensor, bias: Tensor | None) -> bool:
    """Whether the hook may have a kernel for it, and nothing of torch's needs to see the product itself."""
    if not x.is_cuda or not activate.is_active():
        return False
    rows = prod(x.shape[:-1])  # torch.Size.numel() asks a compiler for a constant
    if not has_few_rows(rows, COMPILED_ROWS) and not (_has_tiles(x, w) and rows <= WEIGHT_ONLY_ROWS):
        return False
    if not x.numel() or not w.numel():
        return False
    given = [t for t in (x, w, scales, bias) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return False
    if torch.compiler.is_compiling():
        return not torch.is_autocast_enabled("cuda")
    return all(type(t) in PLAIN for t in given) and nobody_looks_on("cuda")
