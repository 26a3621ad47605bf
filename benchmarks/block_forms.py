"""fp8 with scales of blocks at sizes that torch refuses, as torch has them at its best, for families.py to race."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.dtypes import torch_dtype
from gemmtuned.kernels.kernel import Run
from gemmtuned.kernels.scaled_by_torch import blocks_as_torch_takes, rows_as_torch_takes, scaled_mm_of_blocks


@dataclass(frozen=True, slots=True)
class Copied:
    """torch._scaled_mm of copies of X and scales of the least sizes that it takes, made once and not timed."""

    problem: Problem
    rows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # for all weights

    def bind(self, w: Tensor, scale_w: Tensor) -> Run:
        """As Kernel.bind."""
        out, fast = torch_dtype(self.problem.out_dtype), self.problem.math_mode == "reduced"
        of_w = blocks_as_torch_takes(scale_w.mT)

        def run(x: Tensor, scale_x: Tensor, bias: Tensor | None = None) -> Tensor:
            if x.data_ptr() not in self.rows:
                self.rows[x.data_ptr()] = rows_as_torch_takes(x, scale_x)
            rows, of_x = self.rows[x.data_ptr()]
            return scaled_mm_of_blocks(rows, w.mT, of_x, of_w, out, fast=fast)[: self.problem.m]

        return run


FORMS: Final[dict[str, Callable[[Problem], Copied]]] = {"copied": Copied}


def is_refused(problem: Problem) -> bool:
    """Whether torch takes no such X, or scales, as they lie, only copies."""
    in_blocks = (problem.scale, problem.wscale) == ("1x128", "128x128") and not problem.threads
    return in_blocks and (problem.m % 4 != 0 or not problem.scale_layout.startswith("col"))
