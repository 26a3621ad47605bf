"""Backends made of torch's own calls.

torch        what the program would run anyway: the default, and the incumbent of every race
torch_swap   (W @ X.T).T: another blocking inside the BLAS, 1.1x to 2.2x for small M on several CPU threads
torch_mv     matrix times vector for M = 1 in fp32
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import DEFAULT_BACKEND, Candidate, Device
from gemmtuned.configs.tunable import is_int_product
from gemmtuned.kernels import stamps
from gemmtuned.kernels.backends.base import Kernel, StatelessKernel
from gemmtuned.kernels.families import family_of

_FLOATS: Final = ("fp32", "bf16", "fp16")  # other dtypes have no reference that could tell a good rival from a bad one


@dataclass(frozen=True, slots=True)
class _TorchBackend:
    name: str
    order: int

    def stamps(self, device: Device) -> dict[str, str]:
        """Torch's version: it brings the BLAS it calls."""
        return stamps.stamps(self.name, device)

    def _check(self, candidate: Candidate, problem: Problem) -> None:
        if candidate not in tuple(self.candidates(problem)):
            raise CandidateFailed(f"{candidate} does not run {problem}")

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """One, without a config, where the backend suits."""
        yield Candidate(self.name)


class TorchDefault(_TorchBackend):
    """Stock torch, every family."""

    def prepare(self, candidate: Candidate, problem: Problem) -> Kernel:
        """Raises CandidateFailed for families that it has no call for."""
        self._check(candidate, problem)
        return family_of(problem).default(problem)


class TorchSwap(_TorchBackend):
    """Operands swapped, result turned back."""

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """dense and batched, with a full C or not, in the usual floats on CPUs: a GPU's library swaps by itself.

        And products of int8 into int32.
        """
        usual = problem.family in _SWAPPED and problem.dtype in _FLOATS
        if problem.threads and (usual or is_int_product(problem)):
            yield Candidate(self.name)

    def prepare(self, candidate: Candidate, problem: Problem) -> Kernel:
        """Raises CandidateFailed where candidates() has nothing."""
        self._check(candidate, problem)
        return StatelessKernel(_int_swapped if is_int_product(problem) else _SWAPPED[problem.family])


class TorchMv(_TorchBackend):
    """Matrix times vector."""

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """fp32, M = 1, on a CPU: in bf16 mv is half as fast as mm there."""
        if problem.family == "dense" and problem.dtype == "fp32" and problem.m == 1 and problem.threads:
            yield Candidate(self.name)

    def prepare(self, candidate: Candidate, problem: Problem) -> Kernel:
        """Raises CandidateFailed where candidates() has nothing."""
        self._check(candidate, problem)
        family_of(problem)
        return StatelessKernel(_mv)


def _dense_swapped(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    # The bias goes in as a column, so that it is added before the one rounding, as addmm does
    return _turned(torch.mm(w.t(), x.t()) if bias is None else torch.addmm(bias.unsqueeze(1), w.t(), x.t()))


def _turned(y: Tensor) -> Tensor:
    *batch, n, m = y.shape
    if m == 1 or n == 1:
        return y.view(*batch, m, n)  # y.mT would count as contiguous, with strides that stock torch never gives
    return y.mT.contiguous()


def _int_swapped(x: Tensor, w: Tensor) -> Tensor:
    return _turned(torch._int_mm(_with_usual_strides(w.t()), _with_usual_strides(x.t())))


def _with_usual_strides(t: Tensor) -> Tensor:
    """A matrix whose sides of one element have the stride that follows from the other: torch._int_mm relies on it."""
    rows, columns = t.shape
    apart, step = t.stride()
    if rows == 1:
        return t.as_strided((1, columns), (columns * step, step))
    return t.as_strided((rows, 1), (apart, rows if apart == 1 else 1)) if columns == 1 else t


def _mv(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.mv(w.t(), x[0]) if bias is None else torch.addmv(bias, w.t(), x[0])
    return y.unsqueeze(0)


_SWAPPED: Final[dict[str, Callable[..., Tensor]]] = {
    "dense": _dense_swapped,
    "batched": lambda x, w: _turned(torch.bmm(w.mT, x.mT)),
    "dense_add": lambda x, w, c: _turned(torch.addmm(c.t(), w.t(), x.t())),
    "batched_add": lambda x, w, c: _turned(torch.baddbmm(c.mT, w.mT, x.mT)),
}
TORCH: Final = TorchDefault(DEFAULT_BACKEND, 0)
BACKENDS: Final = (TORCH, TorchSwap("torch_swap", 10), TorchMv("torch_mv", 20))
