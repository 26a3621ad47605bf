"""Our CUDA C++ kernels on sm_90: one backend, whose config names the kernel and its parameters.

A solution of this backend is published as its binary and the record of how to launch it, as those of backend `triton`
are; running programs launch that without a compiler, so what is measured and checked here is the same binary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels.backends.base import Kernel, Run
from gemmtuned.kernels.cuda import nvrtc, one_shot
from gemmtuned.kernels.cuda.offered import BACKEND, compile_config, has_kernels, offered, read_config
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.operands import check_operands
from gemmtuned.kernels.ours import POINTER_ALIGN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WARP_SIZE: Final = 32


@dataclass(frozen=True, slots=True)
class Cuda:
    """device: what to fill; None is this process's current CUDA device."""

    name: str = BACKEND
    device: Device | None = None

    def stamp(self, device: Device) -> str | None:
        """NVRTC's version, the architecture, our kernels' source; None on any other architecture, and without NVRTC."""
        if not has_kernels(device):
            return None
        return f"{nvrtc.version()}/{device.arch}/{source_hash()}"

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
        from gemmtuned.kernels.cuda.driver import Kernel as Loaded

        found = read_config(candidate.config, problem)
        data = compile_config(found).data
        torch.cuda.current_stream()  # the context is torch's
        launch = Loaded(
            data, one_shot.NAME, grid=found.programs, threads=WARP_SIZE * one_shot.WARPS, shared=found.shared,
            cluster=found.parts,
        )  # fmt: skip
        return _Launched(launch)

    def launch_of(self, candidate: Candidate, problem: Problem) -> tuple[str, bytes]:
        """As CompiledBackend.launch_of."""
        found = read_config(candidate.config, problem)
        data = compile_config(found).data
        facts = {
            "binary": sha256(data).hexdigest(),
            "name": one_shot.NAME,
            "shared": found.shared,
            "warps": one_shot.WARPS,
            "warp_size": WARP_SIZE,
            "cluster": found.parts,
            "grid": [{"over": "n", "block": found.rows}, {"over": "", "block": 1}, {"over": "", "block": 1}],
            "arguments": list(found.arguments),
            "null_pointers": 0,
            "ld_multiple": one_shot.LD_MULTIPLE,
            "max_m": found.m,
            "partials_offset": 0,
            "counters_bytes": 0,
            "workspace_bytes": 0,
            "pointer_align": POINTER_ALIGN,
        }
        return json.dumps(facts, sort_keys=True, separators=(",", ":")), data

    def holds(self, candidate: Candidate, problem: Problem) -> bool:
        """As CompiledBackend.holds."""
        try:
            read_config(candidate.config, problem)
        except Exception:  # other people's tables may hold anything
            return False
        return True

    def _device(self) -> Device:
        if self.device is not None:
            return self.device
        if not torch.cuda.is_available():
            raise CandidateFailed("there is no CUDA device in this process")
        return cuda_device(torch.cuda.current_device())


class _Launched:
    """A loaded kernel."""

    def __init__(self, launch: Callable[[int, list[int], tuple[int, ...]], None]) -> None:
        self._launch = launch

    def bind(self, b: Tensor) -> Run:
        """Operands that the binary was not compiled for go to torch, as they do in a running program."""
        launch, w = self._launch, b.t()

        def run(a: Tensor, bias: Tensor | None) -> Tensor:
            try:
                check_operands(one_shot.LD_MULTIPLE, a, w, bias)
            except CandidateFailed:
                return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
            y = torch.empty(a.shape[0], w.shape[0], dtype=a.dtype, device=a.device)
            operands = [t.data_ptr() for t in ((a, w, y) if bias is None else (a, w, bias, y))]
            launch(torch.cuda.current_stream().cuda_stream, operands, (a.shape[0], a.stride(0), w.stride(0)))
            return y

        return run


@cache
def source_hash() -> str:
    """Of what is compiled: the source of two small configurations, one of each type."""
    small = (one_shot.OneShot(64, 64, 1024, True, dtype, 8, 2).source() for dtype in ("bf16", "fp16"))
    return sha256("".join(small).encode()).hexdigest()[:12]


CUDA: Final = Cuda()
