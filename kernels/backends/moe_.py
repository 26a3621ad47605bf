"""Backends of family moe, beside torch's own form: the grouped one, and our two launches on sm_90.

fused_moe runs their solutions by itself: the native hook has no part in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels import mixture, stamps
from gemmtuned.kernels.backends.base import COMPILED
from gemmtuned.kernels.cuda import moe_compile, moe_run
from gemmtuned.kernels.cuda.moe_compile import layer_of, most_tokens, stages_of
from gemmtuned.kernels.families.moe import MOE, MixtureKernel, how_of
from gemmtuned.kernels.mixture import Operands

GROUPED: Final = "moe_grouped"


@dataclass(frozen=True, slots=True)
class MoeGrouped:
    """Pairs sorted by expert and two grouped products: where torch's own form goes expert after expert.

    Quantised experts are dequantised first, those that are visited.
    """

    name: str = GROUPED
    order: int = 10

    def stamps(self, device: Device) -> dict[str, str]:
        """Torch's version."""
        return stamps.stamps(self.name, device)

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """One, on CPUs: on a GPU torch's own form is this one where it runs without a wait."""
        if problem.family == "moe" and problem.threads:
            yield Candidate(self.name)

    def prepare(self, candidate: Candidate, problem: Problem) -> MixtureKernel:
        """Raises CandidateFailed where candidates() has nothing."""
        if candidate not in tuple(self.candidates(problem)):
            raise CandidateFailed(f"{candidate} does not run {problem}")
        MOE.check(problem)
        how = how_of(problem)
        if how.quant == "none":

            def takes(o: Operands) -> Tensor | None:
                """Torch's grouped product refuses weights of other strides, which is no fault of the solution."""
                return mixture.grouped(o, how) if o.w1.is_contiguous() and o.w2.is_contiguous() else None

            return MixtureKernel(lambda o: mixture.grouped(o, how), takes)
        return MixtureKernel(lambda o: mixture.grouped(*mixture.visited(o, how)))


@dataclass(frozen=True, slots=True)
class MoeDecode:
    """kernels/cuda/moe_decode.cu in the configurations that were best somewhere."""

    name: str = moe_compile.NAME
    order: int = COMPILED
    ahead: bool = True

    def stamps(self, device: Device) -> dict[str, str]:
        """NVRTC's version, the architecture, the kernels' source; none on any other architecture."""
        return stamps.stamps(self.name, device)

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """Both launches' likely configurations, as far as they fit."""
        return moe_compile.candidates(problem)

    def prepare(self, candidate: Candidate, problem: Problem) -> MixtureKernel:
        """Compiled and loaded. Raises CandidateFailed where it cannot run the problem, Declined where it cannot now."""
        layer = layer_of(problem)
        if layer is None:
            raise CandidateFailed(f"{candidate} does not run {problem}")
        most, how = most_tokens(problem.m, layer.topk), how_of(problem)
        stages, device = stages_of(candidate), torch.cuda.current_device()
        if moe_run.loaded(layer, most, stages, device) is None:
            raise CandidateFailed(f"{candidate} does not compile for {problem}, or takes too much of the device")

        def takes(o: Operands) -> Tensor | None:
            """Ids of 64 bits are read by a form of their own, which is loaded when they are first seen."""
            o = replace(o, x=o.x.contiguous())
            found = moe_run.layer_of(o, how) if len(o.x) <= most and o.x.get_device() == device else None
            if found is None or replace(found, long_ids=False) != layer:
                return None
            launches = moe_run.loaded(found, most, stages, device)
            return launches(o) if launches is not None else None

        def call(o: Operands) -> Tensor:
            y = takes(o)
            return mixture.run(o, how) if y is None else y

        return MixtureKernel(call, takes)


BACKENDS: Final = (MoeGrouped(), MoeDecode())
