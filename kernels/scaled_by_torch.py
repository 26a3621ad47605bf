"""Scaled products of fp8 by torch's own call: what it takes where, and scales of blocks in the form that it takes.

With scales of 1x128 by 128x128 cuBLASLt takes multiples of four rows of X, and W's scales with room for a multiple of
four along K.  For all else X and scales are copied to such sizes first; where torch has no such product at all, it is
one of numbers of fp32.  torch._scaled_mm of torch 2.10 and later refuses scales with such room, or does not know them
from scales without; torch.nn.functional.scaled_mm, which is as old, wants the room to be part of them.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from gemmtuned.kernels.compiling import is_exporting
from gemmtuned.kernels.dequantise import dequantised
from gemmtuned.kernels.integers import plain_rows

BLOCK: Final = 128  # values per block that share a scale, along N and K
_MULTIPLE: Final = 4  # rows of X, and blocks of K, come in multiples of it
_ALIGNED: Final = 4  # scales: 16 bytes
_HAS_RECIPES: Final = hasattr(F, "scaled_mm")  # since 2.10
_ROW_SCALES_ON_CPUS: Final = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 13)  # 2.11 has none


def torch_takes(x: Tensor, w: Tensor, dtype: torch.dtype, kind: str) -> bool:
    """Whether torch._scaled_mm runs this here (ATen/native/cuda/ScaledBlas.cpp; on CPUs whatever is no block)."""
    if not x.shape[0] or not w.shape[0] or not x.shape[1]:
        return False
    if x.device.type == "cpu":
        known = kind == "tensor" or (kind == "row" and _ROW_SCALES_ON_CPUS)
        return known and x.dtype == w.dtype == torch.float8_e4m3fn
    if not x.is_cuda or x.shape[1] % 16 or w.shape[0] % 16:
        return False
    if torch.version.hip is None and not (
        x.dtype == w.dtype == torch.float8_e4m3fn
        or (kind == "tensor" and {x.dtype, w.dtype} == {torch.float8_e4m3fn, torch.float8_e5m2})
    ):
        return False
    major = torch.cuda.get_device_capability(x.device) if torch.version.hip is None else (0, 0)
    if kind == "1x128":
        return major == (9, 0) and dtype == torch.bfloat16 and x.shape[1] % BLOCK == 0
    return major >= (8, 9) and (kind == "tensor" or dtype == torch.bfloat16)


def scaled_mm(
    x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, bias: Tensor | None, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """torch._scaled_mm of x [M, K] and w [N, K], of any strides; scales as it takes them."""
    late = bias if dtype == torch.float32 else None  # torch takes no bias with a result of fp32
    # on CPUs torch reads a bias as if it lay without gaps
    added = None if bias is None or late is not None else bias.to(dtype).contiguous()
    y = torch._scaled_mm(plain_rows(x), plain_rows(w).t(), of_x, of_w, bias=added, out_dtype=dtype, use_fast_accum=fast)
    return y if late is None else y + late


def block_product(
    x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """x [M, K] by w [N, K] with of_x [M, K/128] and of_w [N/128, K/128], sizes rounded up, of any strides."""
    if torch_takes(x, w, dtype, "1x128"):
        rows, of_rows = rows_as_torch_takes(x, of_x)
        return scaled_mm_of_blocks(rows, w, of_rows, blocks_as_torch_takes(of_w), dtype, fast=fast)[: x.shape[0]]
    return block_product_of_values(x, w, of_x, of_w, dtype)


def block_product_of_values(x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, dtype: torch.dtype) -> Tensor:
    """The same of numbers of fp32, everywhere and with derivatives."""
    spread = of_x.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    return ((x.float() * spread) @ dequantised(w, of_w, "128x128", torch.float32).t()).to(dtype)


def scaled_mm_of_blocks(
    x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    """torch's product with scales as rows_as_torch_takes and blocks_as_torch_takes give them."""
    if len(of_w) % _MULTIPLE == 0 or not _HAS_RECIPES:
        return scaled_mm(x, w, of_x, of_w, None, dtype, fast=fast)
    kind = F.ScalingType
    with_room = of_w.as_strided((of_w.stride(1), of_w.shape[1]), of_w.stride())
    return F.scaled_mm(
        plain_rows(x), plain_rows(w).t(), of_x, kind.BlockWise1x128, with_room, kind.BlockWise128x128,
        output_dtype=dtype, use_fast_accum=fast,
    )  # fmt: skip


def rows_as_torch_takes(x: Tensor, of_x: Tensor) -> tuple[Tensor, Tensor]:
    """x and its scales: copies where they do not lie so."""
    more = -x.shape[0] % _MULTIPLE
    if is_exporting() or more:  # exported code must not depend on it
        x = F.pad(x.view(torch.uint8), (0, 0, 0, more)).view(x.dtype)
        of_x = F.pad(of_x, (0, 0, 0, more))
    of_x = of_x.t().contiguous().t()  # those of one block of K side by side
    return x, of_x.clone() if of_x.storage_offset() % _ALIGNED else of_x


def blocks_as_torch_takes(of_w: Tensor) -> Tensor:
    """The scales of W, [N/128, K/128], as [K/128, N/128]: a copy where they do not lie so."""
    across, blocks = of_w.shape
    room = blocks + -blocks % _MULTIPLE
    held = of_w.untyped_storage().nbytes() // of_w.element_size() - of_w.storage_offset()
    if of_w.stride() != (room, 1) or of_w.storage_offset() % _ALIGNED or held < across * room:
        wide = of_w.new_zeros(across, room)
        wide[:, :blocks] = of_w
        of_w = wide[:, :blocks]
    return of_w.t()


def needs_copies(of_x: Tensor, k: int) -> bool:
    """Whether torch's product with such scales of X, of blocks of K, takes copies of them, or is none."""
    m, blocks = of_x.shape
    return bool(m % _MULTIPLE or blocks % _MULTIPLE or k % BLOCK or of_x.stride(0) != 1)
