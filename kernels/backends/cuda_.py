"""Our CUDA C++ kernels on sm_90: one backend, whose config names the kernel and its parameters.

A solution of this backend is published as its binary and the record of how to launch it, as those of backend `triton`
are; running programs launch that without a compiler, so what is measured and checked here is the same binary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.launch import KernelLaunch
from gemmtuned.configs.launch_values import arguments_of, grid_of
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.kernels import catalog
from gemmtuned.kernels.backends.base import Kernel, Run
from gemmtuned.kernels.backends.launched import OwnKernels, bound
from gemmtuned.kernels.cuda import driver


@dataclass(frozen=True, slots=True)
class Cuda(OwnKernels):
    """The backend of our CUDA C++ kernels."""

    name: str = "cuda"

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


class _Launched:
    """A loaded kernel, for the M of its problem and every smaller one.

    It has one workspace: its launches must follow one another, as those of one stream do.
    """

    def __init__(self, kernel: driver.Kernel, launch: KernelLaunch, problem: Problem) -> None:
        self._kernel, self._launch, self._problem = kernel, launch, problem
        self._space: Tensor | None = None

    def bind(self, *weights: Tensor) -> Run:
        """As gemmtuned.kernels.backends.launched.bound."""
        kernel, record = self._kernel, self._launch
        if self._space is None and record.workspace_bytes:
            with torch.inference_mode(False):  # it serves calls outside of that mode, too
                self._space = torch.zeros(record.workspace_bytes, dtype=torch.uint8, device=weights[0].device)
        partials = 0 if self._space is None else self._space.data_ptr() + record.partials_offset

        def launch(operands: dict[str, Tensor]) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            given = arguments_of(record, operands, partials=partials)
            kernel(stream, record.arguments, given, grid_of(record.grid, operands))

        return bound(self._problem, weights, record.checked, launch)


BACKENDS: Final = (Cuda(),)
