"""What torch has of int8 products with one scale a row, at its best, for families.py to race; no backend runs these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.dtypes import torch_dtype
from gemmtuned.kernels.kernel import Run

ROWS: Final = 17  # torch._int_mm takes no fewer on a GPU


def scaled(
    sums: Tensor, scale_w: Tensor, scale_x: Tensor, dtype: torch.dtype, sums_w: Tensor | None = None,
    zero_x: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What follows the product; sums_w, zero_x: as families.zero_points has them."""
    if sums_w is not None:
        sums = sums - (sums_w if zero_x is None else zero_x[:, None] * sums_w)
    return (sums.float() * scale_w * scale_x).to(dtype)


@cache
def compiled() -> Callable[..., Tensor]:
    """The same as one kernel, for every size."""
    found: Any = torch.compile(scaled, dynamic=True)
    return found


@dataclass(frozen=True, slots=True)
class Form:
    """`_int_mm` of X with ROWS rows at least, which are copied once and not timed.

    fused: with the scales behind it; without, Y is of int32 and nobody's result.
    """

    problem: Problem
    fused: bool
    padded: dict[int, Tensor] = field(default_factory=dict)  # for all weights

    def bind(self, w: Tensor, scale_w: Tensor, sums_w: Tensor | None = None) -> Run:
        """As Kernel.bind."""
        m, out = self.problem.m, torch_dtype(self.problem.out_dtype)

        def run(x: Tensor, scale_x: Tensor, *others: Tensor | None) -> Tensor:
            zero_x = others[0] if sums_w is not None else None  # with zero points they come first, then the bias
            rows = x
            if m < ROWS:
                if x.data_ptr() not in self.padded:
                    self.padded[x.data_ptr()] = torch.cat([x, x.new_zeros(ROWS - m, x.shape[1])])
                rows = self.padded[x.data_ptr()]
            sums = torch._int_mm(rows, w)
            return compiled()(sums[:m], scale_w, scale_x, out, sums_w, zero_x) if self.fused else sums

        return run


FORMS: Final[dict[str, Callable[[Problem], Form]]] = {
    "int_mm": lambda problem: Form(problem, fused=False),
    "int_mm_fused": lambda problem: Form(problem, fused=True),
}
