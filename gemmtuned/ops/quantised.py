"""AITER's ops of 8-bit and 4-bit operands, by torch's own calls, which the hook counts and serves.

Scales multiply: Y = (X * x_scale) @ (W * w_scale).T + bias.  Torch's scaled product runs what it takes (fp8 with one
scale a tensor, a row or a block of 128); int8 is one operator of ours (int8.py), which multiplies exactly and scales
in fp32; all else is turned back into numbers of X's or the result's type first.  No operand is changed, and all of it
traces under torch.compile.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.kernels.dtypes import FLOATS, FP8, PACKED_FP4
from gemmtuned.kernels.mixture import dequantised
from gemmtuned.kernels.scaled_by_torch import BLOCK, scaled_mm, torch_takes
from gemmtuned.ops.blocks import block_linear
from gemmtuned.ops.int8 import int8_linear
from gemmtuned.ops.shuffle import is_shuffled, is_view_of_shuffled, unshuffle_weight
from gemmtuned.ops.weight_only import weight_only_linear

GROUP_FP4: Final = 32  # values of K with one e8m0 scale


def gemm_a8w8(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    splitK: int | None = None,
) -> Tensor:
    """Y[M, N] = (XQ[M, K] * x_scale) @ (WQ[N, K] * w_scale).T + bias, in dtype.

    XQ, WQ: int8 both, or fp8.  x_scale: one number, or M of them ([M], [M, 1]).  w_scale: one, or N ([N], [1, N],
    [N, 1]).  bias: [N].  splitK is taken and not used: the tuned kernel decides.
    Raises GemmtunedError for other sizes and types, and for a shuffled weight (`gemm_a8w8_bpreshuffle` takes that).
    """
    _check("gemm_a8w8", XQ, WQ, bias, dtype)
    of_x = _scale("x_scale", x_scale, XQ, XQ.shape[0])
    of_w = _scale("w_scale", w_scale, WQ, WQ.shape[0])
    if XQ.dtype == torch.int8:
        return int8_linear(XQ, WQ, of_x, of_w, bias, dtype)
    kind = "tensor" if of_x.numel() == of_w.numel() == 1 else "row"
    if not torch_takes(XQ, WQ, dtype, kind):
        return _by_values(XQ, WQ, of_x.reshape(-1, 1), of_w.reshape(-1, 1), bias, dtype)
    if kind == "row":
        of_x, of_w = of_x.reshape(-1, 1).expand(XQ.shape[0], 1), of_w.reshape(1, -1).expand(1, WQ.shape[0])
        of_x, of_w = of_x.contiguous(), of_w.contiguous()
    else:
        of_x, of_w = of_x.reshape(()), of_w.reshape(())
    return scaled_mm(XQ, WQ, of_x, of_w, bias, dtype)


def gemm_a8w8_bpreshuffle(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """As gemm_a8w8, of a weight that `shuffle_weight` has shuffled.

    No kernel here reads that order, so it is turned back at every call: keep the plain weight where you can.
    Raises GemmtunedError for a weight without the mark of `shuffle_weight`.
    """
    if not is_shuffled(WQ):
        raise GemmtunedError(
            "gemm_a8w8_bpreshuffle: the weight is not marked as shuffled: shuffle_weight(w) marks what it gives (a "
            "view or a copy loses the mark: set w.is_shuffled = True), gemm_a8w8 takes plain weights"
        )
    return gemm_a8w8(XQ, unshuffle_weight(WQ), x_scale, w_scale, bias, dtype)


def gemm_a8w8_blockscale(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Y[M, N] = XQ[M, K] @ WQ[N, K].T with x_scale [M, K/128] and w_scale [N/128, K/128], sizes rounded up, in dtype.

    XQ, WQ: fp8.  Raises GemmtunedError for other sizes and types, and for a shuffled weight.
    """
    _check("gemm_a8w8_blockscale", XQ, WQ, None, dtype)
    (m, k), n = XQ.shape, WQ.shape[0]
    if XQ.dtype == torch.int8:
        raise GemmtunedError("gemm_a8w8_blockscale: XQ is torch.int8, expected an fp8 type")
    blocks, across = -(-k // BLOCK), -(-n // BLOCK)
    for name, scale, shape in (("x_scale", x_scale, (m, blocks)), ("w_scale", w_scale, (across, blocks))):
        if tuple(scale.shape) != shape or not scale.is_floating_point():
            raise GemmtunedError(
                f"gemm_a8w8_blockscale: {name} is {tuple(scale.shape)} of {scale.dtype}, expected {list(shape)} of fp32"
            )
    return block_linear(XQ, WQ, x_scale.float(), w_scale.float(), dtype)


def gemm_a4w4(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Y[M, N] = A @ B.T + bias of MXFP4: A [M, K/2], B [N, K/2], two e2m1 a byte, the lower first, scales [., K/32].

    Scales: e8m0, a byte b stands for 2^(b - 127), 255 for NaN; they are not shuffled.  Both operands become dtype,
    which holds their values exactly but for scales beyond it, and a dense product follows.
    Raises GemmtunedError for other sizes and types.
    """
    values = []
    for name, packed, scale in (("A", A, A_scale), ("B", B, B_scale)):
        codes = _codes(f"gemm_a4w4: {name}", packed)
        groups = _groups(f"gemm_a4w4: {name}_scale", scale, codes.shape[0], 2 * codes.shape[1], GROUP_FP4)
        values.append(dequantised(codes, groups, "mxfp4", dtype))
    a, b = values
    _check_k("gemm_a4w4", a, b)
    return F.linear(a, b, _bias("gemm_a4w4", bias, b.shape[0], dtype))


def gemm_a16w8(x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Y[..., N] = x[..., K] @ (w[N, K] * w_scale).T + bias, in x's type; w: int8 or fp8.

    w_scale: one number, N of them, or [N/128, K/128] rounded up.  With the hook and up to 16 rows of x on a GPU it is
    one operator (weight_only.py), for which there are kernels.  Raises GemmtunedError for other sizes and types.
    """
    _check_plain("gemm_a16w8", w)
    _check_k("gemm_a16w8", x, w)
    if w.dtype not in (torch.int8, *FP8) or x.dtype not in FLOATS:
        raise GemmtunedError(f"gemm_a16w8: x is {x.dtype} and w {w.dtype}, expected 16-bit floats and int8 or fp8")
    n, k = w.shape
    if n > 1 and tuple(w_scale.shape) == (1, n) == (1, -(-k // BLOCK)) and n <= BLOCK:
        raise GemmtunedError(
            f"gemm_a16w8: w_scale is {tuple(w_scale.shape)}, which may be one for each row or for each block of K: "
            f"hand scales of rows as [{n}] or [{n}, 1]; for those of blocks turn the weight into numbers"
        )
    if w_scale.shape == (-(-n // BLOCK), -(-k // BLOCK)) and w_scale.numel() not in (1, n):
        scales = w_scale.float()
    else:
        scales = _scale("w_scale", w_scale, w, n).reshape(-1, 1)
    return weight_only_linear(x, w, scales, _bias("gemm_a16w8", bias, n, x.dtype))


def gemm_a16w4(
    x: Tensor, w: Tensor, w_scale: Tensor, w_zeros: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Y[..., N] = x[..., K] @ W.T + bias, in x's type; w [N, K/2] holds two values of K a byte, the lower first.

    w_scale of 8 bits (e8m0, [N, K/32]): MXFP4.  w_scale of floats [N, K/group]: int4, (code - zero) * scale; the zero
    is 8, or w_zeros [N, K/group] of codes.  Without w_zeros it is one operator where gemm_a16w8 is.
    Raises GemmtunedError for other sizes and types.
    """
    codes = _codes("gemm_a16w4: w", w)
    n, k = codes.shape[0], 2 * codes.shape[1]
    if x.shape[-1] != k or x.dtype not in FLOATS:
        raise GemmtunedError(f"gemm_a16w4: x is {tuple(x.shape)} of {x.dtype}, expected 16-bit floats with K = {k}")
    added = _bias("gemm_a16w4", bias, n, x.dtype)
    if w_scale.element_size() == 1:
        groups = _groups("gemm_a16w4: w_scale", w_scale, n, k, GROUP_FP4)
        return weight_only_linear(x, codes, groups, added)
    many = w_scale.shape[-1] if w_scale.dim() == 2 and w_scale.shape[0] == n else 0
    if not many or k % many:
        raise GemmtunedError(f"gemm_a16w4: w_scale is {tuple(w_scale.shape)}, expected [{n}, {k} / group]")
    if w_zeros is None:
        return weight_only_linear(x, codes, w_scale, added)
    if w_zeros.shape != w_scale.shape:
        raise GemmtunedError(f"gemm_a16w4: w_zeros is {tuple(w_zeros.shape)}, expected {list(w_scale.shape)}")
    values = dequantised(codes, w_scale, "int4", torch.float32)
    values = values + ((8 - w_zeros.float()) * w_scale.float()).repeat_interleave(k // many, 1)
    return F.linear(x, values.to(x.dtype), added)


def batched_gemm_bf16(
    XQ: Tensor,
    WQ: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Y[B, M, N] = XQ[B, M, K] @ WQ[B, N, K]^T + bias [B, 1, N], in dtype. Raises GemmtunedError for other sizes."""
    _check_batched("batched_gemm_bf16", XQ, WQ, bias)
    y = torch.bmm(XQ, WQ.mT) if bias is None else torch.baddbmm(bias.to(XQ.dtype), XQ, WQ.mT)
    return y.to(dtype)


def batched_gemm_a8w8(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """As gemm_a8w8 for each of B: XQ [B, M, K], WQ [B, N, K], x_scale [B, M, 1], w_scale [B, 1, N], bias [B, 1, N].

    Raises GemmtunedError for other sizes and types.
    """
    _check_batched("batched_gemm_a8w8", XQ, WQ, bias)
    b, m, n = XQ.shape[0], XQ.shape[1], WQ.shape[1]
    for name, scale, shape in (("x_scale", x_scale, (b, m, 1)), ("w_scale", w_scale, (b, 1, n))):
        if tuple(scale.shape) != shape:
            raise GemmtunedError(f"batched_gemm_a8w8: {name} is {tuple(scale.shape)}, expected {list(shape)}")
    return torch.stack(
        [
            gemm_a8w8(XQ[i], WQ[i], x_scale[i], w_scale[i], None if bias is None else bias[i].reshape(-1), dtype)
            for i in range(b)
        ]
    ) if b else XQ.new_empty(0, m, n, dtype=dtype)  # fmt: skip


def _by_values(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = (x.float() * of_x) @ (w.float() * of_w).t()
    return (y if bias is None else y + bias).to(dtype)


def _check(op: str, x: Tensor, w: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
    _check_plain(op, w)
    if x.dim() != 2:
        raise GemmtunedError(f"{op}: XQ is {tuple(x.shape)}, expected [M, K]")
    _check_k(op, x, w)
    if not ((x.dtype == w.dtype == torch.int8) or (x.dtype in FP8 and w.dtype in FP8)):
        raise GemmtunedError(f"{op}: XQ is {x.dtype} and WQ {w.dtype}, expected torch.int8 twice, or fp8 types")
    if dtype not in FLOATS:
        raise GemmtunedError(f"{op}: dtype is {dtype}, expected one of {', '.join(map(str, FLOATS))}")
    _bias(op, bias, w.shape[0], dtype)


def _check_plain(op: str, w: Tensor) -> None:
    if is_shuffled(w) or is_view_of_shuffled(w):
        raise GemmtunedError(f"{op}: the weight is shuffled, or a view of one that is: hand the plain weight")


def _check_k(op: str, x: Tensor, w: Tensor) -> None:
    if w.dim() != 2 or not x.dim() or x.shape[-1] != w.shape[1]:
        raise GemmtunedError(f"{op}: x is {tuple(x.shape)} and w {tuple(w.shape)}, expected [.., K] and [N, K]")
    if x.device != w.device:
        raise GemmtunedError(f"{op}: x is on {x.device} and w on {w.device}")


def _check_batched(op: str, x: Tensor, w: Tensor, bias: Tensor | None) -> None:
    if x.dim() != 3 or w.dim() != 3 or x.shape[0] != w.shape[0] or x.shape[2] != w.shape[2]:
        raise GemmtunedError(f"{op}: XQ is {tuple(x.shape)} and WQ {tuple(w.shape)}, expected [B, M, K] and [B, N, K]")
    if bias is not None and tuple(bias.shape) != (w.shape[0], 1, w.shape[1]):
        raise GemmtunedError(f"{op}: bias is {tuple(bias.shape)}, expected [{w.shape[0]}, 1, {w.shape[1]}]")


def _bias(op: str, bias: Tensor | None, n: int, dtype: torch.dtype) -> Tensor | None:
    if bias is None:
        return None
    if bias.numel() != n or bias.shape[-1] != n:
        raise GemmtunedError(f"{op}: bias is {tuple(bias.shape)}, expected [{n}]")
    return bias.reshape(n).to(dtype)


def _scale(name: str, scale: Tensor, of: Tensor, many: int) -> Tensor:
    is_line = sum(side != 1 for side in scale.shape) <= 1
    if scale.numel() not in (1, many) or not scale.is_floating_point() or not is_line:
        raise GemmtunedError(
            f"{name} is {tuple(scale.shape)} of {scale.dtype}, expected one float or {many} of them, one for each row"
        )
    if scale.device != of.device:
        raise GemmtunedError(f"{name} is on {scale.device}, its operand on {of.device}")
    return scale.float()


def _codes(what: str, packed: Tensor) -> Tensor:
    """[rows, K/2] of bytes."""
    if packed.dim() != 2 or packed.dtype not in (torch.uint8, PACKED_FP4):
        raise GemmtunedError(f"{what} is {tuple(packed.shape)} of {packed.dtype}, expected [rows, K/2] of torch.uint8")
    return packed.view(torch.uint8)


def _groups(what: str, scale: Tensor, rows: int, k: int, group: int) -> Tensor:
    """[rows, K/group] of bytes."""
    if scale.element_size() != 1 or k % group or tuple(scale.shape) != (rows, k // group):
        raise GemmtunedError(
            f"{what} is {tuple(scale.shape)} of {scale.dtype}, expected [{rows}, {k} / {group}] of bytes (e8m0)"
        )
    return scale.view(torch.uint8)
