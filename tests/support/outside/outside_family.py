"""A family of another package, all of it: attention scores, Q @ K.T / sqrt(width), and a faster way to make them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from gemmtuned.configs.problem import Problem

_library = torch.library.Library("outside_family", "DEF")
_library.define("scores(Tensor q, Tensor k) -> Tensor")
_library.define("scaled_inside(Tensor q, Tensor k) -> Tensor")


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.mm(q, k.t()) / math.sqrt(q.shape[1])


def _scaled_inside(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.addmm(q.new_zeros(1), q, k.t(), beta=0, alpha=1 / math.sqrt(q.shape[1]))


_library.impl("scores", _scores, "CPU")
_library.impl("scaled_inside", _scaled_inside, "CPU")

# What programs call: its calls are counted as this family's, and served by what is published for it
OPERATORS = ({"operator": "outside_family::scores", "family": "outside.scores", "x": "q", "w": "k", "form": "nk"},)


def _as_programs_call_it(q: torch.Tensor, k_turned: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch.ops.outside_family.scores(q, k_turned.t())
    return y


def _suits(problem: Problem) -> bool:
    return problem.family == "outside.scores" and problem.dtype == "fp32" and problem.layout == "nt"


def __getattr__(name: str) -> object:
    """FAMILY and BACKEND, made when gemmtuned asks for them."""
    if name == "FAMILY":
        from gemmtuned.kernels.families.base import Family
        from gemmtuned.kernels.families.operand import Operand

        class Scores(Family):
            def reference(self, problem, inputs, sample, w64=None):  # type: ignore[no-untyped-def]
                return super().reference(problem, inputs, sample, w64) / math.sqrt(problem.k)

        return Scores(
            "outside.scores",
            operands=(
                Operand("x", "mk", layout=0),
                Operand("w", "kn", layout=1, weight=True),
                Operand("y", "mn", result=True),
            ),
            stock=lambda problem: _as_programs_call_it,
        )
    if name == "BACKEND":
        from gemmtuned.kernels.backends.torch_op import OperatorBackend

        return OperatorBackend(
            name="outside_scores",
            package="outside-gemm",
            operator="outside_family::scaled_inside",
            arguments=("x", "w"),
            suits=_suits,
            kinds=("cpu",),
        )
    raise AttributeError(name)
