"""Backends of family moe, beside torch's own form: the grouped one, and our two launches on sm_90.

fused_moe runs their solutions by itself: the native hook has no part in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels import mixture
from gemmtuned.kernels.arch import is_among
from gemmtuned.kernels.backends.base import COMPILED
from gemmtuned.kernels.cuda import moe_decode, moe_run, nvrtc
from gemmtuned.kernels.cuda.moe_decode import MAX_PAIRS, Experts, Stage
from gemmtuned.kernels.families.moe import MOE, MixtureKernel, how_of
from gemmtuned.kernels.mixture import Operands

GROUPED: Final = "moe_grouped"
DECODE: Final = "moe_decode"
# (warps, depth, tiles) of each launch: the best ones of benchmarks/results/moe-h200-2026-11-25.json
_UP: Final = ((8, 2, 1), (16, 2, 1), (16, 3, 1), (4, 4, 1), (4, 6, 1))
_DOWN: Final = ((8, 2, 1), (8, 3, 2), (16, 2, 1), (16, 3, 1), (4, 4, 2), (8, 4, 1), (8, 6, 1))


@dataclass(frozen=True, slots=True)
class MoeGrouped:
    """Pairs sorted by expert and two grouped products: where torch's own form goes expert after expert."""

    name: str = GROUPED
    order: int = 10

    def stamps(self, device: Device) -> dict[str, str]:
        """Torch's version."""
        return {self.name: str(torch.__version__)} if device.kind == "cpu" else {}

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
        return MixtureKernel(lambda o: mixture.grouped(o, how))


@dataclass(frozen=True, slots=True)
class MoeDecode:
    """kernels/cuda/moe_decode.cu in the configurations that were best somewhere."""

    name: str = DECODE
    order: int = COMPILED

    def stamps(self, device: Device) -> dict[str, str]:
        """NVRTC's version, the architecture, the kernels' source; none on any other architecture."""
        if device.kind != "cuda" or not is_among(device.arch, ("sm_90",)) or nvrtc.version() is None:
            return {}
        return {self.name: f"{nvrtc.version()}/{device.arch}/{_source_hash()}"}

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """Both launches' likely configurations, as far as they fit."""
        layer = _layer(problem)
        if layer is None:
            return
        most = moe_run.most_tokens(problem.m, layer.topk)
        ups, downs = (
            [how for how in map(_stage, shapes) if how in set(moe_run.stages_that_fit(layer, stage, most))]
            for stage, shapes in ((1, _UP), (2, _DOWN))
        )
        for up, down in product(ups, downs):
            yield Candidate.of(self.name, up=_text(up), down=_text(down))

    def prepare(self, candidate: Candidate, problem: Problem) -> MixtureKernel:
        """Compiled and loaded. Raises CandidateFailed where it cannot run the problem, Declined where it cannot now."""
        layer = _layer(problem)
        if layer is None:
            raise CandidateFailed(f"{candidate} does not run {problem}")
        most, how = moe_run.most_tokens(problem.m, layer.topk), how_of(problem)
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


def stages_of(candidate: Candidate) -> tuple[Stage, Stage]:
    """Of both launches. Raises CandidateFailed for a config that is none."""
    try:
        config = json.loads(candidate.config)
        up, down = (_stage(tuple(map(int, config[name].split(".")))) for name in ("up", "down"))
        return up, down
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise CandidateFailed(f"{candidate} has no configuration of two launches") from err


def _stage(shape: tuple[int, ...]) -> Stage:
    warps, depth, tiles = shape
    return Stage(warps=warps, depth=depth, tiles=tiles)


def _text(how: Stage) -> str:
    return f"{how.warps}.{how.depth}.{how.tiles}"


def _layer(problem: Problem) -> Experts | None:
    """What the kernels are compiled for; None where they are not written for the problem, or its size."""
    p = problem
    if p.family != "moe" or p.threads or p.m * (p.topk or 1) > MAX_PAIRS:
        return None
    try:
        MOE.check(p)
        how = how_of(p)
        swiglu = how.act == "swiglu"
        if not how.gated or how.interleaved != swiglu:
            return None
        layer = Experts(
            width=p.k, inter=p.inter or 1, experts=p.experts or 1, topk=p.topk or 1, dtype=p.dtype, weight=p.wdtype,
            act="swiglu_clamped" if swiglu else how.act, bias=p.bias, weight_first=how.weighted,
        )  # fmt: skip
        layer.check()
    except CandidateFailed:
        return None
    return layer


@cache
def _source_hash() -> str:
    text = moe_decode.text() + Path(moe_run.__file__).read_text()
    return sha256(text.encode()).hexdigest()[:12]


BACKENDS: Final = (MoeGrouped(), MoeDecode())
