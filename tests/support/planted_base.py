"""What planted kernels are made of: the right product, results that are spoilt, and what each is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
