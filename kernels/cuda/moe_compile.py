"""Which launches of moe_decode a candidate for a problem is, and their binaries; without torch and without a GPU.

The daemon compiles them before a device is used.  Both kinds of ids are compiled: problems are raced with ids of 32
bits, and routers of transformers hand over 64, which must not be compiled in the program that they serve.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.configs.tunable import can_tune
from gemmtuned.kernels.arch import is_among
from gemmtuned.kernels.cuda import moe_decode, nvrtc
from gemmtuned.kernels.cuda.moe_decode import MAX_PAIRS, Experts, Stage
from gemmtuned.kernels.own_kernel import symbol

NAME: Final = "moe_decode"
# (warps, depth, tiles), the likely ones first: benchmarks/moe.py has how they compare
SHAPES: Final = (
    (8, 4, 1), (8, 2, 1), (4, 4, 1), (8, 3, 2), (4, 6, 1), (4, 4, 2), (8, 6, 1), (4, 8, 1), (16, 2, 1), (16, 3, 1),
    (4, 2, 1), (2, 2, 1),
)  # fmt: skip
STAGES: Final = tuple(Stage(warps=w, depth=d, tiles=t) for w, d, t in SHAPES)
# Of each launch the best ones of benchmarks/results/moe-h200-2026-11-25.json
_UP: Final = ((8, 2, 1), (16, 2, 1), (16, 3, 1), (4, 4, 1), (4, 6, 1))
_DOWN: Final = ((8, 2, 1), (8, 3, 2), (16, 2, 1), (16, 3, 1), (4, 4, 2), (8, 4, 1), (8, 6, 1))


def runs_on(device: Device) -> bool:
    """Whether it is a GPU that the kernels are written for, and a compiler is there."""
    return device.kind == "cuda" and is_among(device.arch, ("sm_90",)) and nvrtc.version() is not None


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Both launches' likely configurations, as far as they fit."""
    layer = layer_of(problem)
    if layer is None:
        return
    most = most_tokens(problem.m, layer.topk)
    ups, downs = (
        [how for how in map(stage_of, shapes) if how in set(stages_that_fit(layer, stage, most))]
        for stage, shapes in ((1, _UP), (2, _DOWN))
    )
    for up, down in product(ups, downs):
        yield Candidate.of(NAME, up=text_of(up), down=text_of(down))


def stages_that_fit(layer: Experts, stage: int, most: int) -> Iterator[Stage]:
    """Configurations of a launch for up to `most` tokens, the likely ones first."""
    for how in STAGES:
        try:
            moe_decode.source(layer, stage, how, most_pairs=most * layer.topk)
        except CandidateFailed:
            continue
        yield how


def layer_of(problem: Problem) -> Experts | None:
    """What the kernels are compiled for; None where they are not written for the problem, or its size."""
    p = problem
    if p.family != "moe" or p.threads or p.m * (p.topk or 1) > MAX_PAIRS or not can_tune(p):
        return None
    act, *flags = (p.act or "").split("_")
    if "gated" not in flags or ("interleaved" in flags) != (act == "swiglu"):
        return None
    layer = Experts(
        width=p.k, inter=p.inter or 1, experts=p.experts or 1, topk=p.topk or 1, dtype=p.dtype, weight=p.wdtype,
        act="swiglu_clamped" if act == "swiglu" else act, bias=p.bias, weight_first="weighted" in flags,
    )  # fmt: skip
    try:
        layer.check()
    except CandidateFailed:
        return None
    return layer


def most_tokens(tokens: int, topk: int) -> int:
    """The size that a kernel for so many tokens is compiled for: the next power of two, as far as pairs allow it."""
    return min(1 << (tokens - 1).bit_length(), MAX_PAIRS // topk)


def stages_of(candidate: Candidate) -> tuple[Stage, Stage]:
    """Of both launches. Raises CandidateFailed for a config that is none."""
    try:
        config = json.loads(candidate.config)
        up, down = (stage_of(tuple(map(int, config[name].split(".")))) for name in ("up", "down"))
        return up, down
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise CandidateFailed(f"{candidate} has no configuration of two launches") from err


def stage_of(shape: tuple[int, ...]) -> Stage:
    """(warps, depth, tiles) as a configuration."""
    warps, depth, tiles = shape
    return Stage(warps=warps, depth=depth, tiles=tiles)


def text_of(how: Stage) -> str:
    """As stages_of reads it."""
    return f"{how.warps}.{how.depth}.{how.tiles}"


def compiled(layer: Experts, stage: int, how: Stage, most: int, *, kept: bool = False) -> tuple[nvrtc.Compiled, str]:
    """(the binary of one launch, its name there). kept: only one that was compiled before; Declined without.

    Raises CandidateFailed where it does not compile, or keeps values of a thread in memory.
    """
    text = moe_decode.source(layer, stage, how, most_pairs=most * layer.topk)
    n, k = (layer.inter, layer.width) if stage == 1 else (layer.width, layer.inter)
    name = moe_decode.UP if stage == 1 else moe_decode.DOWN
    called = symbol(name, n, k, most)
    made = nvrtc.compiled(text, moe_decode.TARGET, called={name: called}, kept=kept)
    if made.spill_bytes:
        raise CandidateFailed(f"{how} of {name}: spills {made.spill_bytes} bytes a thread")
    return made, called


def compile_candidate(candidate: Candidate, problem: Problem) -> None:
    """All that may serve calls of the problem, into the compiler's cache. Raises CandidateFailed with the reason."""
    layer = layer_of(problem)
    if layer is None:
        raise CandidateFailed(f"{candidate} does not run {problem}")
    most = most_tokens(problem.m, layer.topk)
    for stage, how in enumerate(stages_of(candidate), 1):
        for long_ids in (False, True):
            compiled(replace(layer, long_ids=long_ids), stage, how, most)
