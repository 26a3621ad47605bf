"""Our CUDA C++ kernels on sm_90: one backend, whose config names the kernel and its parameters.

A solution of this backend is published as its binary and the record of how to launch it, as those of backend `triton`
are; running programs launch that without a compiler, so what is measured and checked here is the same binary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device, kernel_stamps
from gemmtuned.kernels.backends.base import COMPILED, Kernel, Run
from gemmtuned.kernels.backends.launched import WARP_SIZE, bound, launch_text
from gemmtuned.kernels.cuda import driver, nvrtc, one_shot
from gemmtuned.kernels.cuda.offered import BACKEND, compile_config, has_kernels, offered, read_config
from gemmtuned.kernels.device import current_cuda_device

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Cuda:
    """device: what to fill; None is this process's current CUDA device."""

    name: str = BACKEND
    order: int = COMPILED
    device: Device | None = None

    def stamps(self, device: Device) -> dict[str, str]:
        """One a kernel: NVRTC's version, the architecture, the kernel's source; none on any other architecture."""
        if not has_kernels(device):
            return {}
        return kernel_stamps(self.name, {one_shot.NAME: f"{nvrtc.version()}/{device.arch}/{source_hash()}"})

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """As `gemmtuned.kernels.cuda.offered.offered`."""
        try:
            device = self._device()
        except CandidateFailed:
            return
        if has_kernels(device):
            yield from offered(problem, device)

    def prepare(self, candidate: Candidate, problem: Problem) -> Kernel:
        """Compiled, or found in our cache, and loaded. Raises CandidateFailed when it cannot run the problem."""
        found = read_config(candidate.config, problem)
        data = compile_config(found).data
        torch.cuda.current_stream()  # the context is torch's
        kernel = driver.Kernel(
            data, one_shot.NAME, threads=WARP_SIZE * found.warps, shared=found.shared,
            cluster=found.parts,
        )  # fmt: skip
        return _Launched(kernel, found)

    def launch_of(self, candidate: Candidate, problem: Problem) -> tuple[str, bytes]:
        """As CompiledBackend.launch_of."""
        found = read_config(candidate.config, problem)
        data = compile_config(found).data
        text = launch_text(
            binary=sha256(data).hexdigest(), name=one_shot.NAME, shared=found.shared, warps=found.warps,
            cluster=found.parts, grid=(("n", found.rows), ("m", found.tokens), ("", 1)), arguments=found.arguments,
            ld_multiple=one_shot.LD_MULTIPLE, max_m=found.m,
        )  # fmt: skip
        return text, data

    def holds(self, candidate: Candidate, problem: Problem) -> bool:
        """As CompiledBackend.holds."""
        try:
            read_config(candidate.config, problem)
        except Exception:  # other people's tables may hold anything
            return False
        return True

    def _device(self) -> Device:
        return self.device or current_cuda_device()


class _Launched:
    """A loaded kernel, for the M of its problem and every smaller one."""

    def __init__(self, kernel: driver.Kernel, found: one_shot.OneShot) -> None:
        self._kernel, self._found = kernel, found

    def bind(self, *weights: Tensor) -> Run:
        """As gemmtuned.kernels.backends.launched.bound."""
        kernel = self._kernel
        grids: dict[int, tuple[int, int]] = {}

        def launch(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
            pointers = [t.data_ptr() for t in (x, w, bias, y) if t is not None]
            m = x.shape[0]
            if m not in grids:
                grids[m] = replace(self._found, m=m).grid
            kernel(torch.cuda.current_stream().cuda_stream, pointers, (m, x.stride(0), w.stride(0)), grids[m])

        return bound(weights[0], one_shot.LD_MULTIPLE, launch)


@cache
def source_hash() -> str:
    """Of what is compiled: the source of two small configurations, one of each type."""
    small = (one_shot.OneShot(64, 64, 1024, True, dtype, 8, 2, 64).source() for dtype in ("bf16", "fp16"))
    return sha256("".join(small).encode()).hexdigest()[:12]


BACKENDS: Final = (Cuda(),)
