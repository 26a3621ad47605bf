"""Kernels with one planted fault each, and backends to carry them into a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels.backends.base import Kernel, Run, StatelessKernel

Call = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def right(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    y = torch.matmul(a, b)
    return y if bias is None else torch.addmm(bias, a, b)


def dropped_tail(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return right(a[:, :-8].contiguous(), b[:-8], bias)


def double_counted(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return right(a, b, bias) + (a[:, :1] @ b[:1])


def nan_result(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    y = right(a, b, bias)
    y[-1, -1] = float("nan")
    return y


def one_wrong(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    y = right(a, b, bias)
    y[y.shape[0] // 2 + 1, 3] += 1.0
    return y


def low_precision(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return right(a.bfloat16(), b.bfloat16(), None if bias is None else bias.bfloat16()).to(a.dtype)


def wrong_dtype(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return right(a, b, bias).double()


def wrong_shape(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return right(a, b, bias)[:-1]


def wrong_strides(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return right(a, b, bias).t().contiguous().t()


def no_tensor(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return None  # type: ignore[return-value]


def raises(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    raise RuntimeError("no kernel image is available\nand a long trace")


def unwritten_row(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Leaves one row of its output to whatever the memory held; a memory that holds the right numbers hides it."""
    y = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)
    full = right(a, b, bias)
    if not y[-1].isnan().any():
        return full
    y[:-1] = full[:-1]
    return y


def eats_nan(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return right(a.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), b, bias)


def eats_inf(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return right(a.clamp(-1e6, 1e6), b, bias)


def reads_beside(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Reads the 8 elements behind each row of X, times 0: seen only where they are not numbers."""
    rows, cols = a.shape
    room = a.untyped_storage().nbytes() // a.element_size() - a.storage_offset()
    if a.stride(0) >= cols + 3 and (rows - 1) * a.stride(0) + cols + 3 <= room:
        beside = a.as_strided((rows, 3), a.stride(), a.storage_offset() + cols)
        return right(a, b, bias) + (beside * 0).sum(1, keepdim=True)
    return right(a, b, bias)


def writes_beside(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    if a.storage_offset() > 0:
        a.as_strided((1,), (1,), a.storage_offset() - 1).fill_(7.0)
    return right(a, b, bias)


def writes_operand(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    y = right(a, b, bias)
    a[0, 0] += 1
    return y


class _Static:
    """Gives the same output memory at every call."""

    def __init__(self) -> None:
        self.out: dict[tuple[int, int], Tensor] = {}

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        y = right(a, b, bias)
        out = self.out.setdefault((y.shape[0], y.shape[1]), torch.empty_like(y))
        return out.copy_(y)


class _Jitter:
    """Every seventh call is one bit off."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        y = right(a, b, bias)
        self.calls += 1
        if self.calls % 7 == 0 and bool(y[0, 0].isfinite()):  # the neighbour of Inf is NaN
            y.view(torch.int32)[0, 0] ^= 1
        return y


class _NowAndThen:
    """Right 49 times of 50, and wrong in one place then: a race that is seldom lost."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        y = right(a, b, bias)
        self.calls += 1
        if self.calls % 50 == 0:
            y[-1, -1] += 1.0 + y.abs().max()
        return y


class KeepsWeight:
    """Takes a copy of a weight that may be edited later."""

    def bind(self, b: Tensor) -> Run:
        copy = b.clone()
        return lambda a, bias=None: right(a, copy, bias)


class KeepsByAddress:
    """Takes a copy of the weight by its address: the classic cache that goes stale."""

    def __init__(self) -> None:
        self.copies: dict[int, Tensor] = {}

    def bind(self, b: Tensor) -> Run:
        copy = self.copies.setdefault(b.data_ptr(), b.clone())
        return lambda a, bias=None: right(a, copy, bias)


def static() -> Kernel:
    return StatelessKernel(_Static())


class _Windows:
    """Gives its results in memory that is not torch's, the second one row into the first: two storages, one memory."""

    def __init__(self) -> None:
        self.memory, self.calls = bytearray(1 << 16), 0

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        y = right(a, b, bias)
        row = y.stride(0) * y.element_size()
        mine = torch.frombuffer(self.memory, dtype=y.dtype, count=y.numel(), offset=self.calls % 2 * row).view(y.shape)
        self.calls += 1
        return mine.copy_(y)


def windows() -> Kernel:
    return StatelessKernel(_Windows())


def now_and_then() -> Kernel:
    return StatelessKernel(_NowAndThen())


def jitter() -> Kernel:
    return StatelessKernel(_Jitter())


class Planted:
    """A backend with one candidate that makes this kernel."""

    def __init__(self, name: str, kernel: Kernel | Call) -> None:
        self.name = name
        self.kernel = kernel if hasattr(kernel, "bind") else StatelessKernel(kernel)
        self.prepared = 0

    order = 90

    def stamps(self, device: Device) -> dict[str, str]:
        return {self.name: "1"}

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        yield Candidate(self.name)

    def prepare(self, candidate: Candidate, problem: Problem) -> Kernel:
        self.prepared += 1
        return self.kernel
