"""What the backends of our compiled kernels share: calls by a launch record, or by torch where that refuses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor

from gemmtuned.configs.launch import Condition
from gemmtuned.configs.launch_values import checker
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.backends.base import Run
from gemmtuned.kernels.dtypes import torch_dtype
from gemmtuned.kernels.families import family_of

WARP_SIZE: Final = 32


def bound(
    problem: Problem, weights: tuple[Tensor, ...], conditions: Iterable[Condition],
    launch: Callable[[dict[str, Any]], object],
) -> Run:  # fmt: skip
    """run(*activations) for these weights, by launch(operands by slot, as a launch record has them, with a new y).

    Operands that do not meet the conditions go to torch, as they do in a running program.
    """
    family, takes = family_of(problem), checker(conditions)
    stock = family.default(problem).bind(*weights)
    names = [o.name for o in family.operands if o.weight]
    kept = {name: t.mT if t.dim() > 1 else t for name, t in zip(names, weights, strict=True)}
    given = [o.name for o in family.operands if not o.weight and not o.result]
    columns, dtype = weights[0].shape[-1], torch_dtype(problem.out_dtype)

    def run(*activations: Tensor | None) -> Tensor:
        operands: dict[str, Any] = {**kept, **dict(zip(given, activations, strict=False))}
        if not takes(operands):
            return stock(*activations)
        x = operands["x"]
        y = operands["y"] = torch.empty(*x.shape[:-1], columns, dtype=dtype, device=x.device)
        launch(operands)
        return y

    return run
