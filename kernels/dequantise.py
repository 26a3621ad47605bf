"""Weights of 8 and 4 bits as numbers: what results are compared with, and what torch multiplies without a kernel.

Codes of 4 bits lie two in a byte along K, the lower first.  Each way below gives the same bits: a number is its code
times its scale in fp32, rounded once.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

PAIRS: Final = ("mxfp4", "int4")  # quantisations with two numbers per byte
_POWERS: Final = "e8m0"  # the table of scales, in which a byte b stands for 2^(b - 127)
BLOCK: Final = 128
_kept: Final[dict[tuple[str, torch.dtype, torch.device], Tensor]] = {}  # a few KB for each device
_PLAIN: Final = (Tensor, torch.nn.Parameter)
_FP8: Final = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def dequantised(
    w: Tensor, scale: Tensor | None, quant: str, dtype: torch.dtype, *, in_one_pass: bool = False
) -> Tensor:
    """The values [N, K] of a weight in this dtype.

    quant: tensor, row, 128x128 (8 bits, scale of one number, N of them, or [N/128, K/128] rounded up), int4 or mxfp4
    (scale [N, K/group]); none.  in_one_pass: operands are plain tensors of which nobody takes a derivative, and no
    compiler looks on, so that the product may be written where it belongs.
    """
    if quant == "none" or scale is None:
        return w.to(dtype)
    exact = dtype if dtype == torch.float64 else torch.float32
    if quant in PAIRS:
        return _of_pairs(w, scale, quant, dtype, exact)
    factors = scale.to(exact)
    if quant == "128x128":
        by_row = factors.repeat_interleave(BLOCK, 0)[: w.shape[0]]
        if in_one_pass and w.shape[1] % BLOCK == 0 and w.numel():
            return _times(w.reshape(*by_row.shape, BLOCK), by_row[..., None], dtype).view(w.shape)
        return (w.to(exact) * by_row.repeat_interleave(BLOCK, 1)[:, : w.shape[1]]).to(dtype)
    if in_one_pass:
        return _times(w, factors.reshape(-1, 1), dtype)
    return (w.to(exact) * factors.reshape(-1, 1)).to(dtype)


def _times(w: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiplied in the type of factors, and rounded as it is written. Products of fp8 are none that torch has."""
    codes = w.to(factors.dtype if dtype == torch.float64 else torch.bfloat16) if w.dtype in _FP8 else w
    return torch.mul(codes, factors, out=torch.empty(w.shape, dtype=dtype, device=w.device))


def _of_pairs(w: Tensor, scale: Tensor, quant: str, dtype: torch.dtype, exact: torch.dtype) -> Tensor:
    """W of 4-bit codes dequantised: two values at a time, from a table with an entry for each byte.

    In code that is being compiled, and for subclasses of Tensor, which cannot index a plain table, it is arithmetic on
    each value, which a compiler makes one pass.
    """
    if torch.compiler.is_compiling() or type(w) not in _PLAIN or type(scale) not in _PLAIN:
        factors = _of_e8m0(scale) if quant == "mxfp4" else scale
        values = _of_codes(torch.stack([w & 15, w >> 4], -1).flatten(-2).long(), quant).to(exact)
        group = values.shape[1] // max(1, scale.shape[1])
        return (values * factors.to(exact).repeat_interleave(group, 1)).to(dtype)
    # torch multiplies numbers of 16 bits in fp32 and rounds once; e8m0 has the exponents of bf16
    holds = scale.dtype == dtype or (quant == "mxfp4" and dtype == torch.bfloat16)
    kept = dtype if holds and not (torch.is_grad_enabled() and scale.requires_grad) else exact
    # kept where it is sure to be there for others: one that is made in a graph's capture is not, nor one of a tracer
    plainly = torch._C._functorch.maybe_current_level() is None and not torch._C._get_tracing_state()
    plainly = plainly and not torch._C._len_torch_dispatch_stack()
    table = _kept_table if plainly else _table
    n, k = w.shape[0], 2 * w.shape[1]
    values = F.embedding(w.int(), table(quant, kept, w.device)).view(*scale.shape, k // max(1, scale.shape[1]))
    if quant != "mxfp4":
        factors = scale.to(kept)[..., None]
    elif plainly:
        factors = F.embedding(scale.int(), table(_POWERS, kept, w.device))
    else:
        factors = _of_e8m0(scale).to(kept)[..., None]
    return (values * factors).to(dtype).view(n, k)


def _table(quant: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256, 2]: the two numbers of each byte; of scales that are powers of two [256, 1]."""
    with torch.inference_mode(False):
        codes = torch.arange(256, device=device)
        if quant == _POWERS:
            return _of_e8m0(codes).to(dtype)[:, None]
        return _of_codes(torch.stack([codes & 15, codes >> 4], -1), quant).to(dtype)


def _kept_table(quant: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same one for all calls. It is copied to the device before: a call in another stream may be next to read it.

    What a graph's capture makes is gone with the graph, so there one is kept only if a call before has made it.
    """
    key = quant, dtype, device
    if (table := _kept.get(key)) is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return _table(quant, dtype, device)
        with torch.inference_mode(False):  # else what is made there is refused by who takes derivatives
            table = _kept[key] = _table(quant, dtype, torch.device("cpu")).to(device)
    return table


def _of_codes(codes: Tensor, quant: str) -> Tensor:
    """Whole numbers 0 to 15 as what they stand for."""
    return _of_e2m1(codes) if quant == "mxfp4" else codes - 8


def _of_e2m1(codes: Tensor) -> Tensor:
    """e2m1 (sign, two bits of exponent, one of mantissa) as fp32; without a table, which would come from the host."""
    mantissa, exponent = (codes & 1).float(), codes >> 1 & 3
    size = torch.where(exponent == 0, mantissa / 2, (2 + mantissa) * (1 << exponent) / 4)
    return torch.where(codes > 7, -size, size)


def _of_e8m0(scale: Tensor) -> Tensor:
    """2^(b - 127) in fp32, bit for bit: 0 is the smallest, which has an exponent of its own, and 255 is NaN."""
    codes = scale.int()
    if torch._C._get_tracing_state() is not None:  # torch.jit cannot trace a view of another type
        powers = torch.exp2(codes.double() - 127).float()
    else:
        powers = (codes << 23).masked_fill(codes == 0, 0x00400000).view(torch.float32)
    return powers.masked_fill(codes == 255, torch.nan)
