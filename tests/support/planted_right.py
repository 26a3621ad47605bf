"""Kernels that are right in ways that look wrong: other ways to add the same products; none may be refused."""

from __future__ import annotations

import torch
from planted_base import Call, right
from torch import Tensor


def split_k(parts: int, *, backwards: bool = False) -> Call:
    """Partial sums in fp32 (fp64 for fp64), one rounding at the end."""

    def call(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        wide = torch.float64 if a.dtype == torch.float64 else torch.float32
        step = -(-a.shape[-1] // parts)
        starts = list(range(0, a.shape[-1], step))
        sums = [a[..., i : i + step].to(wide) @ b[..., i : i + step, :].to(wide) for i in starts]
        y = sums.pop(-1 if backwards else 0)
        for each in reversed(sums) if backwards else sums:
            y = y + each
        return (y if bias is None else y + bias.to(wide)).to(a.dtype)

    return call


def mixed_k(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    order = torch.randperm(a.shape[-1])
    return right(a[..., order], b[..., order, :], bias)


def swapped(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    y = b.mT @ a.mT if bias is None else torch.addmm(bias.unsqueeze(1), b.t(), a.t())
    return y.mT.contiguous().view(*y.shape[:-2], y.shape[-1], y.shape[-2])


def linear(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(a, b.mT, bias)


def einsum(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    y = torch.einsum("mk,kn->mn", a.float(), b.float()) if a.dtype != torch.float64 else torch.einsum("mk,kn->mn", a, b)
    return (y if bias is None else y + bias.to(y.dtype)).to(a.dtype)


def by_rows(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.cat([right(row, b, bias) for row in a.split(3)])


def by_columns(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    parts = b.split(24, dim=1)
    biases = [None] * len(parts) if bias is None else list(bias.split(24))
    return torch.cat([right(a, part, own) for part, own in zip(parts, biases, strict=True)], 1)


def in_fp64(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return right(a.double(), b.double(), None if bias is None else bias.double()).to(a.dtype)


def padded_rows(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes 16 rows at a time and gives those that were asked for."""
    rows = a.shape[0]
    full = a.new_zeros(-(-rows // 16) * 16, a.shape[1])
    full[:rows] = a
    return right(full, b, bias)[:rows].clone()


def into_new_memory(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    y = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)
    torch.mm(a, b, out=y) if bias is None else torch.addmm(bias, a, b, out=y)
    return y


def by_products(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Products first, then torch's pairwise sum."""
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    y = (a.to(wide).unsqueeze(-1) * b.to(wide).unsqueeze(0)).sum(1)
    return (y if bias is None else y + bias.to(wide)).to(a.dtype)


RIGHT: dict[str, Call] = {
    "stock": right,
    "split by 2": split_k(2),
    "split by 3, backwards": split_k(3, backwards=True),
    "split by 8": split_k(8),
    "k mixed": mixed_k,
    "swapped": swapped,
    "linear": linear,
    "einsum": einsum,
    "by rows": by_rows,
    "by columns": by_columns,
    "in fp64": in_fp64,
    "padded rows": padded_rows,
    "into new memory": into_new_memory,
    "by products": by_products,
}
