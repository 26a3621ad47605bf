"""Kernels that are wrong for some values, magnitudes, sizes, layouts, threads or types."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from planted_base import Call, right
from planted_stateful import kept_memory
from torch import Tensor

from gemmtuned.kernels.backends.base import Run

# --- special values


def on_x(change: Callable[[Tensor], Tensor]) -> Call:
    return lambda a, b, bias=None: right(change(a), b, bias)


def on_w(change: Callable[[Tensor], Tensor]) -> Call:
    return lambda a, b, bias=None: right(a, change(b), bias)


def on_bias(change: Callable[[Tensor], Tensor]) -> Call:
    return lambda a, b, bias=None: right(a, b, None if bias is None else change(bias))


def on_y(change: Callable[[Tensor], Tensor]) -> Call:
    return lambda a, b, bias=None: change(right(a, b, bias))


def no_nan(t: Tensor) -> Tensor:
    return torch.where(t.isnan(), 0.0, t).to(t.dtype)


def nan_in_first_row_only(t: Tensor) -> Tensor:
    return torch.cat([t[..., :1, :], no_nan(t[..., 1:, :])], -2)


def nan_but_in_first_row(t: Tensor) -> Tensor:
    return torch.cat([no_nan(t[..., :1, :]), t[..., 1:, :]], -2)


def by_row_maximum(a: Tensor) -> Tensor:
    """Scaled to 1 and back, as for a narrow dtype."""
    most = a.abs().amax(-1, keepdim=True)
    return a / most * most


def by_maximum(a: Tensor) -> Tensor:
    most = a.abs().amax()
    return a / most * most


def finite(t: Tensor) -> Tensor:
    return t.nan_to_num(nan=math.nan)


def skips_zero_rows(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    y = right(a, b, bias)
    y[(a == 0).all(-1)] = 0.0 if bias is None else bias
    return y


def negative_zero_as_one(t: Tensor) -> Tensor:
    return torch.where((t == 0) & t.signbit(), 1.0, t).to(t.dtype)


def rows_that_begin_alike(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes one row of those whose first numbers are equal."""
    _, same = torch.unique(a[:, :4].contiguous().view(torch.int32), dim=0, return_inverse=True)
    first = torch.stack([(same == i).nonzero()[0, 0] for i in same])
    return right(a, b, bias)[first]


def middle_row_if_ragged(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    y = right(a, b, bias)
    if y.shape[-1] % 8:
        y[..., y.shape[-2] // 2, y.shape[-1] // 2] *= 2
    return y


def saturating_fp16(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """bf16 by way of fp16, which holds more digits and a smaller range."""
    a, b = a.clamp(-65504, 65504).half(), b.clamp(-65504, 65504).half()
    return right(a, b, None if bias is None else bias.half()).bfloat16()


# --- magnitudes


def beyond(limit: float) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.where(t.abs() > limit, torch.copysign(torch.full_like(t, math.inf), t), t)


def flushed(limit: float) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.where(t.abs() < limit, 0.0, t).to(t.dtype)


def if_all(condition: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda t: change(t) if bool(condition(t.abs().amax())) else t


def as_fp16_pair(a: Tensor) -> Tensor:
    high = a.half()
    return high.float() + (a - high.float()).half().float()


# --- tails and edges of a bucket


def dropped_k(count: int) -> Call:
    def call(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        return right(a[..., :-count].contiguous(), b[..., :-count, :], bias)

    return call


def last_column_lost(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    y = right(a, b, bias)
    if y.shape[-1] % 16:
        y[..., -1] = 0 if bias is None else bias[-1]
    return y


def last_row_lost_if_odd(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    y = right(a, b, bias)
    if y.shape[-2] % 2:
        y[..., -1, :] = 0
    return y


def counted_twice(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return right(a, b, bias) + (a[..., :1] @ b[..., :1, :])


def wrong_at(hit: Callable[[int], bool]) -> Call:
    def call(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        y = right(a, b, bias)
        if hit(y.shape[-2]):
            y[..., -1, :] = 0
        return y

    return call


class RoomOfFirst:
    """Takes its workspace for the first M it sees; a larger one is cut off."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        self.rows = self.rows or a.shape[-2]
        y = right(a, b, bias)
        y[self.rows :] = 0
        return y


class OldRows:
    """What a larger M left in the workspace is added again when M shrinks."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        before, self.rows = self.rows, a.shape[-2]
        y = right(a, b, bias)
        if self.rows < before:
            y[-1] *= 2
        return y


# --- layout


def as_if_contiguous(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Ignores the distance of rows in memory."""
    if a.numel() + a.storage_offset() <= a.untyped_storage().nbytes() // a.element_size():
        a = a.as_strided(a.shape, (a.shape[-1], 1), a.storage_offset())
    return right(a, b, bias)


def from_even_addresses(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Loads pairs: an odd offset reads the element before."""
    odd = a.storage_offset() % 2
    return right(a.as_strided(a.shape, a.stride(), a.storage_offset() - odd), b, bias)


def wrong_strides(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return right(a, b, bias).t().contiguous().t()


def reads_beside(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Reads three elements behind each row of X, times 0: seen only where they are not numbers."""
    rows, cols = a.shape
    room = a.untyped_storage().nbytes() // a.element_size() - a.storage_offset()
    if a.stride(0) >= cols + 3 and (rows - 1) * a.stride(0) + cols + 3 <= room:
        beside = a.as_strided((rows, 3), a.stride(), a.storage_offset() + cols)
        return right(a, b, bias) + (beside * 0).sum(1, keepdim=True)
    return right(a, b, bias)


# --- threads


class SharedScratch:
    def __init__(self) -> None:
        self.scratch: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        scratch = self.scratch.setdefault((a.shape, a.dtype), kept_memory(a))
        scratch.copy_(a)
        return right(scratch, b, bias)


class OneThreads:
    """Its workspace belongs to the thread that called first."""

    def __init__(self) -> None:
        self.own = threading.local()
        self.own.scale = 1.0

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        return right(a, b, bias) * float(self.own.scale)


class CurrentWeight:
    """Hands the weight over by an attribute: another closure's call in between changes it."""

    def __init__(self) -> None:
        self.now: Tensor | None = None

    def bind(self, b: Tensor) -> Run:
        def run(a: Tensor, bias: Tensor | None = None) -> Tensor:
            self.now = b
            x = a * 1.0
            return right(x, self.now, bias)

        return run


class NotReentrant:
    """Gives up when it is called while it runs."""

    def __init__(self) -> None:
        self.busy = False

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.busy:
            return torch.zeros_like(right(a, b, bias))
        self.busy = True
        y = right(a, b, bias)
        self.busy = False
        return y


# --- another dtype's rounding


def by_way_of(dtype: torch.dtype) -> Call:
    def call(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        return right(a.to(dtype), b.to(dtype), None if bias is None else bias.to(dtype)).to(a.dtype)

    return call


def cut_bits(bits: int) -> Callable[[Tensor], Tensor]:
    """fp32 cut to fewer bits of its fraction, as TF32 does."""
    return lambda t: (t.contiguous().view(torch.int32) & ~((1 << bits) - 1)).view(torch.float32)


def truncated(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """bf16 results cut, not rounded."""
    y = right(a.float(), b.float(), None if bias is None else bias.float())
    return cut_bits(16)(y).bfloat16()


def rounded_partials(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    step = max(1, a.shape[-1] // 4)
    y = sum(right(a[:, i : i + step], b[i : i + step], None) for i in range(0, a.shape[-1], step))
    assert isinstance(y, Tensor)
    return y if bias is None else y + bias


# --- uninitialised reads


def unwritten_row(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """One row of its result is what the memory held; memory that holds small numbers hides it."""
    y = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)
    full = right(a, b, bias)
    if bool((y[-1].abs() < 1e3).all()):
        return full
    y[:-1] = full[:-1]
    return y


def adds_to_unwritten(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    space = torch.empty_like(a)
    return right(a, b, bias) + (space[:1, :1].nan_to_num(0.0) * 1e-6)


def hides_nan_of_unwritten(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    space = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)
    clean = torch.where(space.isnan() | (space.abs() < 1e3), 0.0, space)
    return right(a, b, bias) + clean.to(a.dtype)
