"""AITER's ops of 8-bit and 4-bit operands, by torch's own calls, which the hook counts and serves.

Scales multiply: Y = (X * x_scale) @ (W * w_scale).T + bias.  Torch's scaled product runs what it takes (fp8 with one
scale a tensor, a row or a block of 128); int8 is one operator of ours (int8.py), which multiplies exactly and scales
in fp32; all else is turned back into numbers of X's or the result's type first.  No operand is changed, and all of it
traces under torch.compile.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.kernels.dequantise import dequantised
from gemmtuned.kernels.dtypes import FLOATS, FP8
from gemmtuned.kernels.mixture import as_they_are
from gemmtuned.kernels.scaled_by_torch import BLOCK, block_product_of_values
from gemmtuned.ops.blocks import block_linear
from gemmtuned.ops.fp8 import fp8_linear
from gemmtuned.ops.int8 import int8_linear
from gemmtuned.ops.mxfp4 import can_be_multiplied, mxfp4_linear
from gemmtuned.ops.quantised_arguments import (
    bias_of,
    check_k,
    check_plain,
    check_result,
    codes_of,
    factors_of,
    powers_of,
    scale_of,
    scaled_bias,
    scales_of,
    wants_derivatives,
    zero_points_of,
)  # fmt: skip
from gemmtuned.ops.shuffle import is_shuffled, unshuffle_weight
from gemmtuned.ops.shuffled import can_be_read, shuffled_linear
from gemmtuned.ops.tensors import tensor
from gemmtuned.ops.weight_only import weight_only_linear


def gemm_a8w8(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    splitK: int | None = None,
    *,
    x_zero: Tensor | None = None,
    w_sums: Tensor | None = None,
) -> Tensor:
    """Y[M, N] = ((XQ[M, K] - x_zero) * x_scale) @ (WQ[N, K] * w_scale).T + bias, in dtype.

    XQ, WQ: int8 both, or fp8.  x_scale: one number, or M of them ([M], [M, 1]).  w_scale: one, or N ([N], [1, N],
    [N, 1]).  bias: [N], rounded to dtype.  splitK is taken and not used: the tuned kernel decides.
    Of int8, and not of AITER's op: x_zero: zero points of int8 or int32, one or M; w_sums: WQ.sum(1) of int32, [N],
    [1, N] or [N, 1], which otherwise is added up at every call.  w_sums alone: these sums times one zero point of all
    of XQ.  XQ @ WQ.T - x_zero * w_sums is made of whole numbers of 32 bits, exact up to K = 65536.
    Raises GemmtunedError for other sizes and types, and for a shuffled weight (`gemm_a8w8_bpreshuffle` takes that).
    """
    op = "gemm_a8w8"
    _check_eights(op, XQ, WQ, dtype)
    of_x = scale_of(f"{op}: x_scale", x_scale, XQ, XQ.shape[0])
    of_w = scale_of(f"{op}: w_scale", w_scale, WQ, WQ.shape[0])
    bias = bias_of(op, bias, WQ, dtype)
    zero, sums = zero_points_of(op, XQ, WQ, x_zero, w_sums)
    if XQ.dtype == torch.int8:
        return int8_linear(XQ, WQ, of_x, of_w, bias, dtype, sums, zero)
    return fp8_linear(XQ, WQ, of_x, of_w, bias, dtype)


def gemm_a8w8_bpreshuffle(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    check: bool = False,
) -> Tensor:
    """As gemm_a8w8, of a weight that `shuffle_weight` has shuffled.

    Up to 1024 rows of XQ there are kernels for sm_90 that read that order (`shuffled.py`); for all else it is turned
    back at every call: keep the plain weight where you can.
    check is taken and not used: operands are always checked.
    Raises GemmtunedError for a weight without the mark of `shuffle_weight`.
    """
    if not is_shuffled(tensor("gemm_a8w8_bpreshuffle: the weight", WQ)):
        raise GemmtunedError(
            "gemm_a8w8_bpreshuffle: the weight is not marked as shuffled: shuffle_weight(w) marks what it gives (a "
            "view or a copy loses the mark: set w.is_shuffled = True), gemm_a8w8 takes plain weights"
        )
    if not can_be_read(XQ, WQ, x_scale, w_scale, bias):
        return gemm_a8w8(XQ, unshuffle_weight(WQ), x_scale, w_scale, bias, dtype)
    op = "gemm_a8w8_bpreshuffle"
    _check_types(op, XQ, WQ, dtype)
    of_x = scale_of(f"{op}: x_scale", x_scale, XQ, XQ.shape[0])
    of_w = scale_of(f"{op}: w_scale", w_scale, WQ, WQ.shape[0])
    return shuffled_linear(XQ, WQ, of_x, of_w, bias_of(op, bias, WQ, dtype), dtype)


def gemm_a8w8_blockscale(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    isBpreshuffled: bool = False,
) -> Tensor:
    """Y[M, N] = XQ[M, K] @ WQ[N, K].T with x_scale [M, K/128] and w_scale [N/128, K/128], sizes rounded up, in dtype.

    XQ, WQ: fp8.  isBpreshuffled: WQ is in the order of `shuffle_weight`, as gemm_a8w8_bpreshuffle takes it.
    Raises GemmtunedError for other sizes and types, and for a shuffled weight where isBpreshuffled does not say so.
    """
    op = "gemm_a8w8_blockscale"
    as_it_lies = isBpreshuffled and can_be_read(XQ, WQ, x_scale, w_scale)
    if isBpreshuffled and not as_it_lies:
        WQ = unshuffle_weight(WQ)
    _check_types(op, XQ, WQ, dtype)
    if not as_it_lies:
        check_plain(op, WQ)
    (m, k), n = XQ.shape, WQ.shape[0]
    if XQ.dtype == torch.int8:
        raise GemmtunedError(f"{op}: XQ is torch.int8, expected an fp8 type")
    blocks, across = -(-k // BLOCK), -(-n // BLOCK)
    of_x = scales_of(f"{op}: x_scale", x_scale, XQ, (m, blocks))
    of_w = scales_of(f"{op}: w_scale", w_scale, WQ, (across, blocks))
    if as_it_lies:
        return shuffled_linear(XQ, WQ, of_x, of_w, None, dtype, blocks=True)
    if wants_derivatives(of_x, of_w):
        return block_product_of_values(XQ, WQ, of_x, of_w, dtype)
    return block_linear(XQ, WQ, of_x, of_w, dtype)


def gemm_a4w4(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    alpha: float | None = 1.0,
    beta: float | None = None,
    bpreshuffle: bool | None = None,
) -> Tensor:
    """Y[M, N] = alpha * A @ B.T + beta * bias of MXFP4: A [M, K/2], B [N, K/2], two e2m1 a byte, the lower first.

    Scales: [., K/32] of e8m0, a byte b stands for 2^(b - 127), 255 for NaN; they are not shuffled.  bias: [N].
    alpha, beta: 1 where they are not given, as AITER's kernels in assembly have them, but for beta, which is 0 there:
    a bias is then not read.  With another alpha the product is one of numbers of fp32, rounded once at the end.

    With the hook and up to 2048
    rows of A on an NVIDIA GPU (16 in compiled code; in other code any number from sm_100 on, which multiplies MXFP4) it
    is one operator (mxfp4.py), for which there are kernels.  Elsewhere A becomes dtype, which holds its values exactly
    but for scales beyond it, and what follows is gemm_a16w4's product of A and B.
    Raises GemmtunedError for other sizes and types, for a beta without a bias, and for a shuffled weight, which
    bpreshuffle asks for.
    """
    op = "gemm_a4w4"
    times, of_bias = factors_of(op, alpha, beta, bias)
    if bpreshuffle:
        raise GemmtunedError(f"{op}: bpreshuffle is {bpreshuffle!r}: hand the plain weight, and scales as they are")
    check_result(op, dtype)
    check_plain(op, B)
    a, b = codes_of(f"{op}: A", A), codes_of(f"{op}: B", B)
    of_a, of_b = powers_of(f"{op}: A_scale", A_scale, a), powers_of(f"{op}: B_scale", B_scale, b)
    if a.shape[1] != b.shape[1] or a.device != b.device:
        raise GemmtunedError(
            f"{op}: A is {tuple(a.shape)} on {a.device} and B {tuple(b.shape)} on {b.device}, expected [M, K/2] and "
            "[N, K/2] on one device"
        )
    if times != 1:
        y = weight_only_linear(dequantised(a, of_a, "mxfp4", torch.float32), b, of_b, None).float() * times
        added = scaled_bias(op, bias, b, torch.float32, of_bias)
        return (y if added is None else y + added).to(dtype)
    added = scaled_bias(op, bias, b, dtype, of_bias)
    if can_be_multiplied(dtype, a, b, of_a, of_b, added):
        return mxfp4_linear(a, b, of_a, of_b, added, dtype)
    return weight_only_linear(dequantised(a, of_a, "mxfp4", dtype), b, of_b, added)


def gemm_a16w8(x: Tensor, w: Tensor, w_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Y[..., N] = x[..., K] @ (w[N, K] * w_scale).T + bias, in x's type; w: int8 or fp8.

    w_scale: one number, N of them, or [N/128, K/128] rounded up.  With the hook and up to 2048 rows of x on a GPU (16
    in compiled code) it is one operator (weight_only.py), for which there are kernels.
    Raises GemmtunedError for other sizes and types.
    """
    op = "gemm_a16w8"
    check_plain(op, w)
    check_k(op, x, w)
    if w.dtype not in (torch.int8, *FP8) or x.dtype not in FLOATS:
        raise GemmtunedError(f"{op}: x is {x.dtype} and w {w.dtype}, expected 16-bit floats and int8 or fp8")
    n, k = w.shape
    blocks = (-(-n // BLOCK), -(-k // BLOCK))
    shape = tuple(tensor(f"{op}: w_scale", w_scale).shape)
    if shape == blocks == (1, n) and n > 1:
        raise GemmtunedError(
            f"{op}: w_scale is {shape}, which may be one for each row or for each block of K: "
            f"hand scales of rows as [{n}] or [{n}, 1]; for those of blocks turn the weight into numbers"
        )
    # [2, 128] is no row of 256 scales, though they are as many
    if shape == blocks and max(shape) > 1:
        scales = scales_of(f"{op}: w_scale", w_scale, w, blocks)
    else:
        scales = scale_of(f"{op}: w_scale", w_scale, w, n).reshape(-1, 1)
    return weight_only_linear(x, w, scales, bias_of(op, bias, w, x.dtype))


def gemm_a16w4(
    x: Tensor, w: Tensor, w_scale: Tensor, w_zeros: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Y[..., N] = x[..., K] @ W.T + bias, in x's type; w [N, K/2] holds two values of K a byte, the lower first.

    w_scale of 8 bits (e8m0, [N, K/32]): MXFP4.  w_scale of floats [N, K/group]: int4, (code - zero) * scale; the zero
    is 8, or w_zeros [N, K/group] of codes.  Without w_zeros it is one operator where gemm_a16w8 is.
    Raises GemmtunedError for other sizes and types.
    """
    op = "gemm_a16w4"
    check_plain(op, w)
    codes = codes_of(f"{op}: w", w)
    n, k = codes.shape[0], 2 * codes.shape[1]
    if tensor(f"{op}: x", x).shape[-1:] != (k,) or x.dtype not in FLOATS:
        raise GemmtunedError(f"{op}: x is {tuple(x.shape)} of {x.dtype}, expected 16-bit floats with K = {k}")
    if x.device != w.device:
        raise GemmtunedError(f"{op}: x is on {x.device} and w on {w.device}")
    added = bias_of(op, bias, codes, x.dtype)
    if tensor(f"{op}: w_scale", w_scale).element_size() == 1:
        if w_zeros is not None:
            raise GemmtunedError(f"{op}: w_zeros is given with scales of {w_scale.dtype}, and MXFP4 has no zero points")
        return weight_only_linear(x, codes, powers_of(f"{op}: w_scale", w_scale, codes), added)
    many = w_scale.shape[1] if w_scale.dim() == 2 and w_scale.shape[0] == n else 0
    is_whole = k % many == 0 if many else tuple(w_scale.shape) == (n, 0) and not k
    if not is_whole or not w_scale.is_floating_point() or w.dtype != torch.uint8:
        raise GemmtunedError(
            f"{op}: w_scale is {tuple(w_scale.shape)} of {w_scale.dtype} for w of {w.dtype}, expected [{n}, {k} / "
            "group] of floats for w of torch.uint8"
        )
    for name, of_groups in (("w_scale", w_scale), ("w_zeros", w_zeros)):
        if of_groups is not None and tensor(f"{op}: {name}", of_groups).device != w.device:
            raise GemmtunedError(f"{op}: {name} is on {of_groups.device}, its operand on {w.device}")
    if w_zeros is None:
        return weight_only_linear(x, codes, w_scale, added)
    if w_zeros.shape != w_scale.shape or w_zeros.is_complex():
        raise GemmtunedError(
            f"{op}: w_zeros is {tuple(w_zeros.shape)} of {w_zeros.dtype}, expected {list(w_scale.shape)} of codes"
        )
    values = dequantised(codes, w_scale, "int4", torch.float32)
    values = values + ((8 - w_zeros.float()) * w_scale.float()).repeat_interleave(k // max(1, many), 1)
    return F.linear(x, values.to(x.dtype), added).to(x.dtype)


def batched_gemm_bf16(
    XQ: Tensor,
    WQ: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    splitK: int | None = None,
) -> Tensor:
    """Y[B, M, N] = XQ[B, M, K] @ WQ[B, N, K]^T + bias [B, 1, N], in dtype.

    Called as AITER's Triton op of this name and its `batched_gemm_bf16_CK`; its lower `aiter.batched_gemm_bf16` takes
    the result third.  XQ, WQ: of one floating type of at least 16 bits.  splitK is taken and not used.
    Raises GemmtunedError for other sizes and types, and for a shuffled weight.
    """
    op = "batched_gemm_bf16"
    added = _check_batched(op, XQ, WQ, bias, dtype)
    if XQ.dtype != WQ.dtype or XQ.dtype not in FLOATS:
        raise GemmtunedError(f"{op}: XQ is {XQ.dtype} and WQ {WQ.dtype}, expected one of {', '.join(map(str, FLOATS))}")
    return (torch.bmm(XQ, WQ.mT) if added is None else torch.baddbmm(added, XQ, WQ.mT)).to(dtype)


def batched_gemm_a8w8(
    XQ: Tensor,
    WQ: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    splitK: int | None = None,
) -> Tensor:
    """As gemm_a8w8 for each of B: XQ [B, M, K], WQ [B, N, K], x_scale [B, M, 1], w_scale [B, 1, N], bias [B, 1, N].

    Called as AITER's Triton op of this name and its `batched_gemm_a8w8_CK`; its lower `aiter.batched_gemm_a8w8` takes
    the result fifth.  splitK is taken and not used.  Raises GemmtunedError for other sizes and types.
    """
    op = "batched_gemm_a8w8"
    added = _check_batched(op, XQ, WQ, bias, dtype, rounded=dtype)
    b, m, n = XQ.shape[0], XQ.shape[1], WQ.shape[1]
    of_x = scales_of(f"{op}: x_scale", x_scale, XQ, (b, m, 1))
    of_w = scales_of(f"{op}: w_scale", w_scale, WQ, (b, 1, n))
    if not b:
        return XQ.new_empty(0, m, n, dtype=dtype)
    found = [gemm_a8w8(XQ[i], WQ[i], of_x[i], of_w[i], None if added is None else added[i, 0], dtype) for i in range(b)]
    with as_they_are(found[0]):
        return torch.stack(found)


def _check_eights(op: str, x: Tensor, w: Tensor, dtype: torch.dtype) -> None:
    check_plain(op, w)
    _check_types(op, x, w, dtype)


def _check_types(op: str, x: Tensor, w: Tensor, dtype: torch.dtype) -> None:
    check_k(op, x, w)
    if x.dim() != 2:
        raise GemmtunedError(f"{op}: XQ is {tuple(x.shape)}, expected [M, K]")
    if not ((x.dtype == w.dtype == torch.int8) or (x.dtype in FP8 and w.dtype in FP8)):
        raise GemmtunedError(f"{op}: XQ is {x.dtype} and WQ {w.dtype}, expected torch.int8 twice, or fp8 types")
    check_result(op, dtype)


def _check_batched(
    op: str, x: Tensor, w: Tensor, bias: Tensor | None, dtype: torch.dtype, rounded: torch.dtype | None = None
) -> Tensor | None:
    """The bias, in the type `rounded`, or x's."""
    check_plain(op, w)
    if tensor(f"{op}: XQ", x).dim() != 3 or w.dim() != 3 or x.shape[0] != w.shape[0] or x.shape[2] != w.shape[2]:
        raise GemmtunedError(f"{op}: XQ is {tuple(x.shape)} and WQ {tuple(w.shape)}, expected [B, M, K] and [B, N, K]")
    if x.device != w.device:
        raise GemmtunedError(f"{op}: XQ is on {x.device} and WQ on {w.device}")
    check_result(op, dtype)
    if bias is None:
        return None
    if tuple(tensor(f"{op}: bias", bias).shape) != (w.shape[0], 1, w.shape[1]) or bias.is_complex():
        raise GemmtunedError(
            f"{op}: bias is {tuple(bias.shape)} of {bias.dtype}, expected [{w.shape[0]}, 1, {w.shape[1]}]"
        )
    if bias.device != w.device:
        raise GemmtunedError(f"{op}: bias is on {bias.device}, its operand on {w.device}")
    return bias.to(rounded or x.dtype)
