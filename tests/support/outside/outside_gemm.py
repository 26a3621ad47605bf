"""A backend of another package, all of it: an operator registered with torch, and what gemmtuned must know of it.

Products in fp16 on a CPU without instructions for them are faster in fp32, even with both operands converted each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from gemmtuned.configs.problem import Problem

_library = torch.library.Library("outside_gemm", "DEF")
_library.define("linear(Tensor x, Tensor w, Tensor? bias, float scale) -> Tensor")


def _linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, scale: float) -> torch.Tensor:
    y = x.float() @ w.float().t() * scale
    return (y if bias is None else y + bias).to(x.dtype)


_library.impl("linear", _linear, "CPU")


def _suits(problem: Problem) -> bool:
    return problem.family == "dense" and problem.dtype == problem.out_dtype == "fp16" and problem.layout == "nt"


def __getattr__(name: str) -> object:
    """BACKEND, made when gemmtuned asks for it: programs that use the operator alone never import gemmtuned."""
    if name != "BACKEND":
        raise AttributeError(name)
    from gemmtuned.kernels.backends.torch_op import OperatorBackend

    return OperatorBackend(
        name="outside",
        package="outside-gemm",
        operator="outside_gemm::linear",
        arguments=("x", "w", "bias", 1.0),
        suits=_suits,
        kinds=("cpu",),
    )
