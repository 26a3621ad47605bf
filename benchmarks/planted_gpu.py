# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"
"""A worker's search with faulty GPU kernels among the candidates, for gpu_daemon.py: `Worker(search="FILE:tune")`.

Each fault comes on top of our own GEMV, which gives the right result, and everything that the screening lets through is
looked at closely, not the fastest three alone: a fault must not be spared by being slow, nor by seeds before it.  They
are the rows of the fault matrix that need a GPU: kernels that hang, write past their result, take all memory, break the
context (illegal address, trap), or are wrong: always, late, seldom, for some inputs, or after an edit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device, Environment
from gemmtuned.daemon.child import offers, screening, search
from gemmtuned.daemon.child.worker_main import device_of
from gemmtuned.kernels import backends
from gemmtuned.kernels.backends.base import Kernel, Run
from gemmtuned.kernels.backends.triton_ import TRITON
from gemmtuned.kernels.triton.inline_ptx import inline_ptx

PLANTED_K = 2048  # of the problem that the faults are offered for; the others are to be solved all the same
Fault = Callable[[Run, Tensor, "Tensor | None"], Tensor]  # how a closure that is right is called, and made wrong

_TRAP, _TRAP_OPERANDS = inline_ptx("=r same, r number", "trap; mov.u32 $same, $number;")


@triton.jit
def fill(to, offset, value, COUNT: tl.constexpr):
    tl.store(to + offset + tl.arange(0, COUNT), value)


@triton.jit
def spoil_from(counter, y, SIZE: tl.constexpr, FIRST: tl.constexpr):
    if tl.atomic_add(counter, 1) >= FIRST:
        tl.store(y + tl.arange(0, SIZE), 0.0)


@triton.jit
def spoil_each(counter, y, EVERY: tl.constexpr):
    if tl.atomic_add(counter, 1) % EVERY == EVERY - 1:
        tl.store(y, 1000.0)


@triton.jit
def trap(to):
    tl.inline_asm_elementwise(_TRAP, _TRAP_OPERANDS, [tl.arange(0, 32)], tl.int32, is_pure=False, pack=1)


def _counter() -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device="cuda")


def after(spoil: Callable[[Tensor], object]) -> Fault:
    """The right result, and then this is done to it."""

    def call(run: Run, a: Tensor, bias: Tensor | None) -> Tensor:
        y = run(a, bias)
        spoil(y)
        return y

    return call


def on_x(change: Callable[[Tensor], Tensor]) -> Fault:
    return lambda run, a, bias: run(change(a), bias)


def on_y(change: Callable[[Tensor], Tensor]) -> Fault:
    return lambda run, a, bias: change(run(a, bias))


def now_and_then(every: int) -> Fault:
    counter = _counter()
    return after(lambda y: spoil_each[(1,)](counter, y, every))


def late(first: int) -> Fault:
    counter = _counter()
    return after(lambda y: spoil_from[(1,)](counter, y, 64, first))


def hoard(y: Tensor) -> None:
    """Takes all memory there is, until torch refuses."""
    taken = []
    while True:
        taken.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))


def hang(y: Tensor) -> None:
    torch.cuda._sleep(1 << 62)


def first_x() -> Fault:
    kept: dict[tuple[int, ...], Tensor] = {}
    return lambda run, a, bias: run(kept.setdefault(tuple(a.shape), a.clone()), bias)


def x_by_address() -> Fault:
    kept: dict[int, Tensor] = {}
    return lambda run, a, bias: run(kept.setdefault(a.data_ptr(), a.clone()), bias)


def one_result() -> Fault:
    kept: dict[tuple[int, ...], Tensor] = {}

    def call(run: Run, a: Tensor, bias: Tensor | None) -> Tensor:
        y = run(a, bias)
        return kept.setdefault(tuple(y.shape), torch.empty_like(y)).copy_(y)

    return call


def by_row_maximum(a: Tensor) -> Tensor:
    most = a.abs().amax(-1, keepdim=True)
    return a / most * most


def writes_x(run: Run, a: Tensor, bias: Tensor | None) -> Tensor:
    y = run(a, bias)
    a[0, 0] += 1
    return y


FAULTS: dict[str, Callable[[], Fault]] = {
    "planted-hang": lambda: after(hang),
    "planted-writes-past-c": lambda: after(lambda y: fill[(1,)](y, y.numel(), 7.0, 64)),
    "planted-right-49-of-50": lambda: now_and_then(50),
    "planted-right-999-of-1000": lambda: now_and_then(1000),
    "planted-zeros-from-call-1000": lambda: late(1000),
    "planted-takes-all-memory": lambda: after(hoard),
    "planted-illegal-address": lambda: after(lambda y: fill[(1,)](y, 1 << 42, 7.0, 64)),
    "planted-traps": lambda: after(lambda y: trap[(1,)](y)),
    "planted-nan": lambda: after(lambda y: fill[(1,)](y, 3, float("nan"), 1)),
    "planted-loses-nan": lambda: on_x(lambda a: a.nan_to_num(nan=0.0, posinf=float("inf"), neginf=-float("inf"))),
    "planted-nan-for-zero-rows": lambda: on_x(by_row_maximum),
    "planted-beyond-65504-inf": lambda: on_y(lambda y: torch.where(y.abs() > 65504, float("inf"), y)),
    "planted-below-1e-15-zero": lambda: on_y(lambda y: torch.where(y.abs() < 1e-15, 0.0, y)),
    "planted-keeps-first-x": first_x,
    "planted-keeps-x-by-address": x_by_address,
    "planted-one-result": one_result,
    "planted-writes-x": lambda: writes_x,
    "planted-rounds-twice": lambda: on_y(lambda y: (y * 0.99609375) * 1.00390625),
    "planted-aborts": lambda: after(lambda y: os.abort()),
}


class _Faulty:
    def __init__(self, kernel: Kernel, fault: Fault) -> None:
        self._kernel, self._fault = kernel, fault

    def bind(self, *weights: Tensor) -> Run:
        run, fault = self._kernel.bind(*weights), self._fault
        return lambda a, bias: fault(run, a, bias)


class Planted:
    """A backend with one candidate."""

    def __init__(self, name: str) -> None:
        self.name = name

    order = 90

    def stamps(self, device: Device) -> dict[str, str]:
        return {self.name: "1"}

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        if problem.k == PLANTED_K:
            yield Candidate(self.name)

    def prepare(self, candidate: Candidate, problem: Problem) -> Kernel:
        right = next(iter(TRITON.candidates(problem)))
        return _Faulty(TRITON.prepare(right, problem), FAULTS[self.name]())


screening.FINALISTS = offers.MOST = 1000  # type: ignore[misc]
for _name in FAULTS:
    backends.BACKENDS[_name] = Planted(_name)


def environment(device: str) -> Environment:
    return backends.environment(device_of(device))


def tune(*args: Any, **options: Any) -> Any:
    return search.tune_modes(*args, **options)
