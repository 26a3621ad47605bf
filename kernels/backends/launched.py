"""What the backends of our compiled kernels share: which candidates they have, and calls by a launch record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import Condition
from gemmtuned.configs.launch_values import checker
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels import catalog, stamps
from gemmtuned.kernels.backends.base import COMPILED, Run
from gemmtuned.kernels.device import current_cuda_device
from gemmtuned.kernels.dtypes import torch_dtype
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.own_kernel import Offer

WARP_SIZE: Final = 32


@dataclass(frozen=True, slots=True)
class OwnKernels:
    """The kernels of one folder as a backend, as far as Triton's and CUDA C++'s are alike.

    name: of the folder.  device: what to compile for and to fill; None is this process's current CUDA device.  With a
    device given, everything but running works in a process that must not or cannot touch one.
    """

    name: str
    order: int = COMPILED
    device: Device | None = None

    def stamps(self, device: Device) -> dict[str, str]:
        """One per kernel: the compiler's version, the architecture, the kernel's source; none where they do not run."""
        return stamps.stamps(self.name, device)

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """The candidates that are admitted of our own kernels."""
        try:
            found = catalog.candidates(problem, self.here())
        except CandidateFailed:
            return
        yield from found.get(self.name, ())

    def offers(self, problem: Problem) -> list[Offer]:
        """As OfferingBackend.offers."""
        try:
            return catalog.offers(problem, self.here(), (self.name,)).get(self.name, [])
        except CandidateFailed:
            return []

    def holds(self, candidate: Candidate, problem: Problem) -> bool:
        """As CompiledBackend.holds."""
        try:
            catalog.record_of(candidate, problem)
        except Exception:  # other people's tables may hold anything: a tile of no rows, for one
            return False
        return True

    def here(self) -> Device:
        """The device given, or the current one. Raises CandidateFailed without any."""
        return self.device or current_cuda_device()


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
