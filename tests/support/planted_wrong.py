"""Kernels that are wrong in ways that are hard to see, and kernels that are right in ways that look wrong.

WRONG: one kernel for each way, by kind; none may ever be published.  Each has a problem of its own, by which the
search of planted_worker.py finds it.  RIGHT: other ways to add the same products; none may be refused.
"""

from __future__ import annotations

import math
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.backends.base import Kernel, Run, StatelessKernel

Call = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


def right(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    if a.dim() == 3:
        return torch.bmm(a, b) if bias is None else torch.baddbmm(bias, a, b)
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


class Counted:
    """Right, but for what `spoil(y, call)` does to the result of each call; one count for the whole kernel."""

    def __init__(self, spoil: Callable[[Tensor, int], Tensor | None]) -> None:
        self.spoil, self.calls = spoil, 0

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        y = right(a, b, bias)
        self.calls += 1
        spoilt = self.spoil(y, self.calls)
        return y if spoilt is None else spoilt


class CountedByClosure:
    """The same with a count for each closure."""

    def __init__(self, spoil: Callable[[Tensor, int], Tensor | None]) -> None:
        self.spoil = spoil

    def bind(self, b: Tensor) -> Run:
        counted = Counted(self.spoil)
        return lambda a, bias=None: counted(a, b, bias)


# --- late and early


def from_call(first: int, value: float) -> Callable[[Tensor, int], Tensor | None]:
    return lambda y, call: y.fill_(value) if call >= first else None


def repeats_from(first: int) -> Callable[[], Call]:
    def make() -> Call:
        kept: list[Tensor] = []

        def spoil(y: Tensor, call: int) -> Tensor | None:
            same = kept and kept[0].shape == y.shape
            if call >= first and same:
                return kept[0].clone()
            kept[:] = [y.clone()]
            return None

        return Counted(spoil)

    return make


def after_time(seconds: float) -> Call:
    began: list[float] = []

    def call(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        began.append(time.monotonic()) if not began else None
        y = right(a, b, bias)
        return y.neg_() if time.monotonic() > began[0] + seconds else y

    return call


# --- rare


def one_off(y: Tensor) -> None:
    y[..., -1, -1] += 1.0 + y.abs().max()


def every(count: int, spoil: Callable[[Tensor], object] = one_off) -> Callable[[Tensor, int], None]:
    def spoilt(y: Tensor, call: int) -> None:
        if call % count == 0:
            spoil(y)

    return spoilt


def by_chance(share: float) -> Call:
    draw = random.Random()
    return Counted(lambda y, call: one_off(y) if draw.random() < share else None)


def zero_one(y: Tensor) -> None:
    y[..., 0, 0] = 0.0


def nan_one(y: Tensor) -> None:
    y[..., 0, -1] = math.nan


def lose_row(y: Tensor) -> None:
    y[..., -1, :] = 0.0


# --- stale


class KeepsWeight:
    def bind(self, b: Tensor) -> Run:
        kept = b.clone()
        return lambda a, bias=None: right(a, kept, bias)


class WeightByAddress:
    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}

    def bind(self, b: Tensor) -> Run:
        return lambda a, bias=None: right(a, self.kept.setdefault(b.data_ptr(), b.clone()), bias)


class WeightByFingerprint:
    """Packs again only when a few elements have changed."""

    def __init__(self) -> None:
        self.kept: dict[tuple[Any, ...], Tensor] = {}

    def bind(self, b: Tensor) -> Run:
        def run(a: Tensor, bias: Tensor | None = None) -> Tensor:
            key = (b.data_ptr(), float(b[0, 0]), float(b[-1, -1]))
            return right(a, self.kept.setdefault(key, b.clone()), bias)

        return run


class XByAddress:
    """Converts X once for each place it lies at."""

    def __init__(self, most: int) -> None:
        self.kept: dict[tuple[Any, ...], Tensor] = {}
        self.most = most

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        key = (a.data_ptr(), a.shape)
        if key not in self.kept and len(self.kept) >= self.most:
            self.kept.pop(next(iter(self.kept)))
        return right(self.kept.setdefault(key, a.clone()), b, bias)


class ByVersion:
    """Keeps a copy of X or of the weight for as long as torch's count of edits says that it is the same."""

    def __init__(self, *, weight: bool) -> None:
        self.weight = weight
        self.kept: dict[tuple[Any, ...], Tensor] = {}

    def copy(self, t: Tensor) -> Tensor:
        key = (t.data_ptr(), t.shape, None if t.is_inference() else t._version)
        return t if key[2] is None else self.kept.setdefault(key, t.clone())

    def bind(self, b: Tensor) -> Run:
        return lambda a, bias=None: right(a, self.copy(b), bias) if self.weight else right(self.copy(a), b, bias)


class KeepsBias:
    def __init__(self, *, copy: bool) -> None:
        self.copy = copy

    def bind(self, b: Tensor) -> Run:
        kept: list[Tensor | None] = []

        def run(a: Tensor, bias: Tensor | None = None) -> Tensor:
            if not kept:
                kept.append(bias.clone() if self.copy and bias is not None else bias)
            return right(a, b, kept[0])

        return run


class KeepsX:
    """Holds on to the first X it was given, not to a copy."""

    def bind(self, b: Tensor) -> Run:
        kept: dict[tuple[int, ...], Tensor] = {}
        return lambda a, bias=None: right(kept.setdefault(tuple(a.shape), a), b, bias)


class ResultByInputs:
    """Gives the result of before when X and bias lie where they lay."""

    def bind(self, b: Tensor) -> Run:
        kept: dict[tuple[Any, ...], Tensor] = {}

        def run(a: Tensor, bias: Tensor | None = None) -> Tensor:
            key = (a.data_ptr(), a.shape, 0 if bias is None else bias.data_ptr(), float(a.flatten()[0]))
            if key not in kept:
                kept.clear()
                kept[key] = right(a, b, bias)
            return kept[key].clone()

        return run


# --- aliasing


def kept_memory(like: Tensor) -> Tensor:
    """Memory that may be written again in whatever mode."""
    with torch.inference_mode(False):
        return torch.empty(like.shape, dtype=like.dtype)


class Ring:
    """Hands out so many results, and then the same memory again."""

    def __init__(self, size: int) -> None:
        self.size, self.calls = size, 0
        self.results: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        y = right(a, b, bias)
        self.calls += 1
        return self.results.setdefault((self.calls % self.size, y.shape), kept_memory(y)).copy_(y)


def scales_weight_meanwhile(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    b.neg_()
    y = right(-a, b, bias)
    b.neg_()
    return y


def writes_operand(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    y = right(a, b, bias)
    a[..., 0, 0] += 1
    return y


def writes_beside(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    if a.storage_offset() > 0:
        a.as_strided((1,), (1,), a.storage_offset() - 1).fill_(7.0)
    return right(a, b, bias)


def spoils_weight_seldom(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    y = right(a, b, bias)
    if random.random() < 0.02:
        b[..., 0, 0] += 1
    return y


# --- what surrounds a call: memory and switches


def spoilt_if(hit: Callable[[Tensor, Tensor, Tensor | None], object]) -> Call:
    def call(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        spoil = bool(hit(a, b, bias))
        y = right(a, b, bias)
        if spoil:
            one_off(y)
        return y

    return call


def storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def lies_in(a: Tensor, b: Tensor) -> bool:
    """Whether a begins inside of what b [K, N] covers."""
    first = b.data_ptr()
    return first <= a.data_ptr() < first + (b.shape[-1] - 1) * b.stride(-1) * b.element_size()


class WhileOthersLive:
    """Wrong as long as so many of its results are in use."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.given: list[weakref.ref[Tensor]] = []

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        self.given = [ref for ref in self.given if ref() is not None]
        y = right(a, b, bias)
        if len(self.given) >= self.most:
            one_off(y)
        self.given.append(weakref.ref(y))
        return y


class WhereOneLay:
    """Leaves a part of its result as it is where a result lay before."""

    def __init__(self) -> None:
        self.places: set[int] = set()

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        y = right(a, b, bias)
        if y.data_ptr() in self.places:
            y[..., -1, -1] = 0.5
        self.places.add(y.data_ptr())
        return y


class AfterPause:
    """Right in its first stream of calls; after a pause three are wrong."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s, self.last_s, self.calls, self.wrong = pause_s, math.inf, 0, 0

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        now_s = time.monotonic()
        if now_s > self.last_s + self.pause_s and self.calls > 500:
            self.wrong = 3
        y = right(a, b, bias)
        if self.wrong:
            self.wrong -= 1
            one_off(y)
        self.calls, self.last_s = self.calls + 1, time.monotonic()
        return y


def by_default_dtype(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Its scratch is of whatever dtype torch.empty makes."""
    scratch = torch.empty(a.shape).copy_(a)
    return right(scratch.to(a.dtype), b, bias)


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


@dataclass(frozen=True)
class Wrong:
    """One way to be wrong. problems: one, or sizes of a bucket that is proven at its smallest, most called, largest."""

    kind: str
    name: str
    make: Callable[[], Any]
    problems: tuple[Problem, ...]

    def kernel(self) -> Kernel:
        made = self.make()
        return made if hasattr(made, "bind") else StatelessKernel(made)


def _call(call: Call) -> Callable[[], Call]:
    return lambda: call


_KINDS: dict[str, dict[str, Callable[[], Any]]] = {
    "late": {
        "zeros from call 1000 on": lambda: Counted(from_call(1000, 0.0)),
        "nan from call 500 on": lambda: Counted(from_call(500, math.nan)),
        "zeros from call 300 of a closure on": lambda: CountedByClosure(from_call(300, 0.0)),
        "the result before from call 700 on": repeats_from(700),
        "the other sign after a quarter of a second": lambda: after_time(0.25),
        "zeros in its first call only": lambda: Counted(lambda y, call: y.zero_() if call == 1 else None),
    },
    "rare": {
        "every 50th": lambda: Counted(every(50)),
        "every 50th at 1 gflop": lambda: Counted(every(50)),
        "one in 50 by chance": lambda: by_chance(1 / 50),
        "one in 300 by chance": lambda: by_chance(1 / 300),
        "one zero in every 1000th": lambda: Counted(every(1000, zero_one)),
        "a row lost in every 97th": lambda: Counted(every(97, lose_row)),
        "nan in every 128th of a closure": lambda: CountedByClosure(every(128, nan_one)),
    },
    "stale": {
        "weight copied": KeepsWeight,
        "weight by address": WeightByAddress,
        "weight by a few elements": WeightByFingerprint,
        "x by address, one": lambda: XByAddress(1),
        "x by address, many": lambda: XByAddress(1000),
        "first x held": KeepsX,
        "first bias copied": lambda: KeepsBias(copy=True),
        "first bias held": lambda: KeepsBias(copy=False),
        "result by address of x": ResultByInputs,
        "x by address and version": lambda: ByVersion(weight=False),
        "weight by address and version": lambda: ByVersion(weight=True),
    },
    "aliasing": {
        "one result": lambda: Ring(1),
        "ring of 4 results": lambda: Ring(4),
        "ring of 50 results": lambda: Ring(50),
        "writes x": _call(writes_operand),
        "writes beside x": _call(writes_beside),
        "writes the weight seldom": _call(spoils_weight_seldom),
    },
    "special": {
        "nan of x lost": _call(on_x(no_nan)),
        "nan of x lost but in row 0": _call(on_x(nan_in_first_row_only)),
        "nan of x lost in row 0": _call(on_x(nan_but_in_first_row)),
        "nan of w lost": _call(on_w(no_nan)),
        "nan of bias lost": _call(on_bias(no_nan)),
        "inf made finite": _call(on_y(finite)),
        "nan for a zero row": _call(on_x(by_row_maximum)),
        "zero rows skipped": _call(skips_zero_rows),
        "negative zero is one": _call(on_x(negative_zero_as_one)),
        "bias of zeros": _call(spoilt_if(lambda a, b, bias=None: bias is not None and not bias.any())),
        "no negative x": _call(spoilt_if(lambda a, b, bias=None: (a >= 0).all() and a.any())),
        "one number in a row of x": _call(spoilt_if(lambda a, b, bias=None: ((a != 0).sum(-1) == 1).any())),
        "rows that begin alike": _call(rows_that_begin_alike),
    },
    "magnitudes": {
        "beyond 65504 inf": _call(on_y(beyond(65504.0))),
        "below 1e-15 zero": _call(on_y(flushed(1e-15))),
        "two fp16 for x": _call(on_x(as_fp16_pair)),
        "large weights capped": _call(on_w(lambda t: t.clamp(-1e6, 1e6))),
        "large bias capped": _call(on_bias(lambda t: t.clamp(-1e6, 1e6))),
        "small x flushed if all is small": _call(on_x(if_all(lambda most: most < 1e-10, torch.zeros_like))),
        "fp16 below 1e-4 zero": _call(on_x(flushed(1e-4))),
        "bf16 by saturating fp16": _call(saturating_fp16),
        "fp16 beyond 50000 inf": _call(on_y(beyond(50000.0))),
    },
    "tails": {
        "last 8 of k": _call(dropped_k(8)),
        "last 1 of k": _call(dropped_k(1)),
        "last column": _call(last_column_lost),
        "last row if m is odd": _call(last_row_lost_if_odd),
        "first of k twice": _call(counted_twice),
        "middle row if n is ragged": _call(middle_row_if_ragged),
    },
    "edges": {
        "m % 16 == 5": _call(wrong_at(lambda m: m % 16 == 5)),
        "largest m": _call(wrong_at(lambda m: m % 16 == 0)),
        "smallest m": _call(wrong_at(lambda m: m % 16 == 1)),
        "room for the first m": RoomOfFirst,
        "rows of a larger m": OldRows,
    },
    "layout": {
        "rows taken for contiguous": _call(as_if_contiguous),
        "pairs at even addresses": _call(from_even_addresses),
        "strides of the result": _call(wrong_strides),
        "reads behind rows": _call(reads_beside),
    },
    "threads": {
        "shared scratch": SharedScratch,
        "one thread's workspace": OneThreads,
        "weight by attribute": CurrentWeight,
        "not reentrant": NotReentrant,
        "weight scaled meanwhile": _call(scales_weight_meanwhile),
    },
    "rounding": {
        "fp32 as bf16": _call(by_way_of(torch.bfloat16)),
        "fp32 as tf32": _call(on_x(cut_bits(13))),
        "fp64 as fp32": _call(by_way_of(torch.float32)),
        "bf16 truncated": _call(truncated),
        "bf16 partial sums": _call(rounded_partials),
        "result cut by 8 bits": _call(on_y(cut_bits(8))),
    },
    "uninitialised": {
        "a row not written": _call(unwritten_row),
        "adds to memory as it is": _call(adds_to_unwritten),
        "adds to memory, nan hidden": _call(hides_nan_of_unwritten),
    },
}
_KINDS["memory"] = {
    "x and w in one storage": _call(spoilt_if(lambda a, b, bias=None: storage(a) == storage(b))),
    "x is a part of w": _call(spoilt_if(lambda a, b, bias=None: lies_in(a, b))),
    "w and bias in one storage": _call(
        spoilt_if(lambda a, b, bias=None: bias is not None and storage(bias) == storage(b))
    ),
    "while two results live": lambda: WhileOthersLive(2),
    "while 20 results live": lambda: WhileOthersLive(20),
    "where a result lay": WhereOneLay,
}
_KINDS["state"] = {
    "in inference mode": _call(spoilt_if(lambda a, b, bias=None: torch.is_inference_mode_enabled())),
    "with gradients on": _call(spoilt_if(lambda a, b, bias=None: torch.is_grad_enabled())),
    "with gradients off": _call(spoilt_if(lambda a, b, bias=None: not torch.is_grad_enabled())),
    "bf16 under autocast": _call(spoilt_if(lambda a, b, bias=None: torch.is_autocast_enabled("cpu"))),
    "scratch of the default dtype": _call(by_default_dtype),
    "after a pause": lambda: AfterPause(0.1),
}
_DTYPES = {
    "bf16 by saturating fp16": "bf16", "bf16 under autocast": "bf16",
    "fp16 below 1e-4 zero": "fp16", "fp16 beyond 50000 inf": "fp16",
    "fp64 as fp32": "fp64", "bf16 truncated": "bf16", "bf16 partial sums": "bf16",
}  # fmt: skip
_BUCKET = (17, 20, 23, 26, 31)  # proven at 17, one of the middle, 31


def _all() -> Iterator[Wrong]:
    number = 0
    for kind, ways in _KINDS.items():
        for name, make in ways.items():
            number += 1
            dtype = _DTYPES.get(name, "fp32")
            n = 40 + 8 * number + (4 if kind == "tails" else 0)
            problem = Problem(m=9, n=n, k=136, dtype=dtype, bias=number % 3 != 0 or "bias" in name, threads=1)
            if "ragged" in name:
                problem = replace(problem, n=n - 1)
            if name == "zero rows skipped" or name == "last row if m is odd":
                problem = replace(problem, bias=False)
            if "gflop" in name:
                problem = replace(problem, m=64, k=4096, n=2048 + 8 * number, bias=False, threads=2)
            sizes = _BUCKET if kind == "edges" else (problem.m,)
            if name == "smallest m":
                sizes = (18, 20, 23, 26, 31)
            yield Wrong(kind, name, make, tuple(problem.with_m(m) for m in sizes))


WRONG: tuple[Wrong, ...] = tuple(_all())


# --- right


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
