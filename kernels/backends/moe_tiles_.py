"""Family moe at many tokens: our tiles of pairs sorted by expert (kernels/triton/moe_tiles.py, moe_fp8_tiles.py).

fused_moe runs their solutions by itself: the native hook has no part in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels import mixture, stamps
from gemmtuned.kernels.backends.base import COMPILED
from gemmtuned.kernels.device import current_cuda_device
from gemmtuned.kernels.families.moe import MixtureKernel, how_of
from gemmtuned.kernels.mixture import Operands
from gemmtuned.kernels.triton import moe_fp8_tiling, moe_tiling


@dataclass(frozen=True, slots=True)
class MoeTiles:
    """name: that of moe_tiling.py's tiles or of moe_fp8_tiling.py's.

    device: what to compile for; None is this process's current CUDA device.
    """

    name: str = moe_tiling.NAME
    order: int = COMPILED
    ahead: bool = True
    device: Device | None = None

    def stamps(self, device: Device) -> dict[str, str]:
        """Triton's version, the architecture, the kernels' source; none where they do not run."""
        return stamps.stamps(self.name, device)

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """Both products' likely tiles."""
        if problem.family != "moe" or problem.threads:
            return
        try:
            arch = (self.device or current_cuda_device()).arch
        except CandidateFailed:
            return
        yield from self._tiling.candidates(problem, arch)

    def prepare(self, candidate: Candidate, problem: Problem) -> MixtureKernel:
        """Compiled and loaded. Raises CandidateFailed where it cannot run the problem, Declined where it cannot now."""
        from gemmtuned.kernels.triton import moe_launch, moe_loaded

        layer = self._tiling.layer_of(problem)
        if layer is None:
            raise CandidateFailed(f"{candidate} does not run {problem}")
        how, device = how_of(problem), torch.cuda.current_device()
        up, down = self._tiling.tiles_of(candidate)
        if moe_loaded.loaded(layer, up, down, device) is None:
            raise CandidateFailed(f"{candidate} does not compile for {problem}, or takes too much of the device")

        def takes(o: Operands) -> Tensor | None:
            """Ids of 64 bits are read by a form of their own, which is loaded when they are first seen."""
            found = moe_launch.layer_of(o, how, device)
            if found is None or replace(found, long_ids=False) != layer:
                return None
            launches = moe_loaded.loaded(found, up, down, device)
            return launches(o) if launches is not None else None

        def call(o: Operands) -> Tensor:
            y = takes(o)
            return mixture.run(o, how) if y is None else y

        return MixtureKernel(call, takes, quantises=self.name == moe_fp8_tiling.NAME)

    @property
    def _tiling(self) -> ModuleType:
        return moe_fp8_tiling if self.name == moe_fp8_tiling.NAME else moe_tiling


BACKENDS: Final = (MoeTiles(), MoeTiles(moe_fp8_tiling.NAME))
