"""Our CUDA C++ kernels on sm_90: one backend, whose config names the kernel and its parameters.

A solution of this backend is published as its binary and the record of how to launch it, as those of backend `triton`
are; running programs launch that without a compiler, so what is measured and checked here is the same binary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import KernelLaunch
from gemmtuned.configs.launch_values import arguments_of, grid_of
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels import catalog, stamps
from gemmtuned.kernels.backends.base import COMPILED, Kernel, Run
from gemmtuned.kernels.backends.launched import bound
from gemmtuned.kernels.cuda import driver
from gemmtuned.kernels.device import current_cuda_device
from gemmtuned.kernels.own_kernel import Offer

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Cuda:
    """device: what to fill; None is this process's current CUDA device."""

    name: str = "cuda"
    order: int = COMPILED
    device: Device | None = None

    def stamps(self, device: Device) -> dict[str, str]:
        """One a kernel: NVRTC's version, the architecture, the kernel's source; none on any other architecture."""
        return stamps.stamps(self.name, device)

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """The candidates that get a place among our own kernels."""
        try:
            found = catalog.candidates(problem, self._device())
        except CandidateFailed:
            return
        yield from found.get(self.name, ())

    def offers(self, problem: Problem) -> list[Offer]:
        """As OfferingBackend.offers."""
        try:
            return catalog.offers(problem, self._device()).get(self.name, [])
        except CandidateFailed:
            return []

    def prepare(self, candidate: Candidate, problem: Problem) -> Kernel:
        """Compiled, or found in our cache, and loaded. Raises CandidateFailed when it cannot run the problem."""
        own, found = catalog.record_of(candidate, problem)
        data = own.compile(found).data
        torch.cuda.current_stream()  # the context is torch's
        launch = found.launch
        name = own.symbol(found)
        kernel = driver.Kernel(data, name, threads=launch.threads, shared=launch.shared, cluster=launch.cluster)
        return _Launched(kernel, launch, problem)

    def launch_of(self, candidate: Candidate, problem: Problem) -> tuple[str, bytes]:
        """As CompiledBackend.launch_of."""
        own, found = catalog.record_of(candidate, problem)
        data = own.compile(found).data
        return replace(found.launch, binary=sha256(data).hexdigest(), name=own.symbol(found)).text(), data

    def holds(self, candidate: Candidate, problem: Problem) -> bool:
        """As CompiledBackend.holds."""
        try:
            catalog.record_of(candidate, problem)
        except Exception:  # other people's tables may hold anything
            return False
        return True

    def _device(self) -> Device:
        return self.device or current_cuda_device()


class _Launched:
    """A loaded kernel, for the M of its problem and every smaller one."""

    def __init__(self, kernel: driver.Kernel, launch: KernelLaunch, problem: Problem) -> None:
        self._kernel, self._launch, self._problem = kernel, launch, problem

    def bind(self, *weights: Tensor) -> Run:
        """As gemmtuned.kernels.backends.launched.bound."""
        kernel, record = self._kernel, self._launch

        def launch(operands: dict[str, Tensor]) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            kernel(stream, record.arguments, arguments_of(record, operands), grid_of(record.grid, operands))

        return bound(self._problem, weights, record.checked, launch)


BACKENDS: Final = (Cuda(),)
