# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"
"""A worker's search with faulty GPU kernels among the candidates, for gpu_daemon.py: `Worker(search="FILE:tune")`.

Each fault comes after our own GEMV has given the right result, and everything that the screening lets through is
looked at closely, not the fastest three alone: a fault must not be spared by being slow, nor by seeds before it.
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
from gemmtuned.daemon import search
from gemmtuned.daemon.worker_main import device_of
from gemmtuned.kernels import backends
from gemmtuned.kernels.backends.base import Kernel, Run
from gemmtuned.kernels.backends.triton_ import TRITON

PLANTED_K = 2048  # of the problem that the faults are offered for; the others are to be solved all the same
Fault = Callable[[Tensor], object]


@triton.jit
def fill(place, offset, value, COUNT: tl.constexpr):
    tl.store(place + offset + tl.arange(0, COUNT), value)


@triton.jit
def spoil_each(counter, y, EVERY: tl.constexpr):
    if tl.atomic_add(counter, 1) % EVERY == EVERY - 1:
        tl.store(y, 1000.0)


def _counter() -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device="cuda")


def now_and_then(every: int) -> Fault:
    counter = _counter()
    return lambda y: spoil_each[(1,)](counter, y, every)


def hoard(y: Tensor) -> None:
    """Takes all memory there is, until torch refuses."""
    taken = []
    while True:
        taken.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))


def hang(y: Tensor) -> None:
    torch.cuda._sleep(1 << 62)


FAULTS: dict[str, Callable[[], Fault]] = {
    "planted-hang": lambda: hang,
    "planted-writes-past-c": lambda: lambda y: fill[(1,)](y, y.numel(), 7.0, 64),
    "planted-right-49-of-50": lambda: now_and_then(50),
    "planted-takes-all-memory": lambda: hoard,
    "planted-illegal-address": lambda: lambda y: fill[(1,)](y, 1 << 42, 7.0, 64),
    "planted-nan": lambda: lambda y: fill[(1,)](y, 3, float("nan"), 1),
    "planted-aborts": lambda: lambda y: os.abort(),
}


class _Faulty:
    def __init__(self, kernel: Kernel, fault: Fault) -> None:
        self._kernel, self._fault = kernel, fault

    def bind(self, b: Tensor) -> Run:
        run = self._kernel.bind(b)

        def faulty(a: Tensor, bias: Tensor | None) -> Tensor:
            y = run(a, bias)
            self._fault(y)
            return y

        return faulty


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


search.FINALISTS = search.MOST = 1000  # type: ignore[misc]
for _name in FAULTS:
    backends.BACKENDS[_name] = Planted(_name)


def environment(device: str) -> Environment:
    return backends.environment(device_of(device))


def tune(*args: Any, **options: Any) -> Any:
    return search.tune_modes(*args, **options)
