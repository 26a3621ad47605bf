"""Kernels that are wrong by what they keep, late or seldom, or by memory and switches around a call."""

from __future__ import annotations

import math
import random
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from planted_base import Call, Counted, right
from torch import Tensor

from gemmtuned.kernels.backends.base import Run

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
