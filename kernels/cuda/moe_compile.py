"""Which launches of moe_decode a candidate for a problem is, and their binaries; without torch and without a GPU.

The daemon compiles them before a device is used.  Both kinds of ids are compiled: problems are raced with ids of 32
bits, and routers of transformers hand over 64, which must not be compiled in the program that they serve.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from typing import Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.configs.tunable import PACKED, can_tune, group_of
from gemmtuned.kernels.arch import is_among
from gemmtuned.kernels.cuda import moe_decode, nvrtc
from gemmtuned.kernels.cuda.moe_decode import MAX_PAIRS, MOST_OF_TILE, Experts, Stage
from gemmtuned.kernels.own_kernel import symbol

NAME: Final = "moe_decode"
# (warps, depth, tiles, parts), the likely ones first, of a search on an H200; the last ones are for layers and sizes
# that leave no room for others.
UP: Final = (
    (8, 2, 2, 8),
    (4, 2, 2, 4),
    (4, 2, 1, 4),
    (8, 2, 1, 8),
    (2, 2, 1, 2),
    (2, 2, 2, 2),
    (4, 2, 2, 1),
    (4, 1, 1, 4),
    (2, 1, 1, 2),
    (1, 1, 1, 1),
)
DOWN: Final = (
    (4, 2, 2, 4), (8, 2, 2, 1), (4, 1, 2, 4), (8, 2, 2, 2), (4, 1, 4, 8), (8, 2, 1, 1), (4, 1, 1, 4), (2, 1, 1, 1),
    (1, 1, 1, 1),
)  # fmt: skip
RACED: Final = (6, 6)  # configurations for UP, for DOWN


def runs_on(device: Device) -> bool:
    """Whether it is a GPU that the kernels are written for, and a compiler is there."""
    return device.kind == "cuda" and is_among(device.arch, ("sm_90",)) and nvrtc.version() is not None


def candidates(problem: Problem) -> Iterator[Candidate]:
    """Both launches' likely configurations, as far as they fit; those that are likely for both first."""
    layer = layer_of(problem)
    if layer is None:
        return
    most = most_tokens(problem.m, layer.topk)
    ups, downs = (
        list(islice(stages_that_fit(layer, stage, most), many)) for stage, many in enumerate(RACED, 1)
    )  # fmt: skip
    both = product(enumerate(ups), enumerate(downs))
    for (_, up), (_, down) in sorted(both, key=lambda pair: pair[0][0] + pair[1][0]):
        yield Candidate.of(NAME, up=text_of(up), down=text_of(down))


def stages_that_fit(layer: Experts, stage: int, most: int) -> Iterator[Stage]:
    """Configurations of a launch for up to `most` tokens, the likely ones first."""
    pairs = most * layer.topk
    # few pairs an expert: what more of them would need of shared memory, further warps use
    likely = 2 if 3 * pairs <= layer.experts else 4 if 2 * pairs <= 5 * layer.experts else MOST_OF_TILE
    at_once = min(pairs, likely)
    for shape in UP if stage == 1 else DOWN:
        how = stage_of((*shape, at_once))
        try:
            moe_decode.source(layer, stage, how, most_pairs=pairs)
        except CandidateFailed:
            continue
        yield how


def layer_of(problem: Problem) -> Experts | None:
    """What the kernels are compiled for; None where they are not written for the problem, or its size."""
    return described(problem) if problem.m * (problem.topk or 1) <= MAX_PAIRS else None


def described(problem: Problem) -> Experts | None:
    """The layer of a problem of any number of tokens; None where kernels of ours do not take its types or sizes."""
    p = problem
    if p.family != "moe" or p.threads or not can_tune(p):
        return None
    act, *flags = (p.act or "").split("_")
    if "gated" not in flags or ("interleaved" in flags) != (act == "swiglu"):
        return None
    grouped = p.wdtype in PACKED
    if p.wdtype == "i4" and p.wscale_dtype != p.dtype:  # they read such scales as they read X
        return None
    layer = Experts(
        width=p.k, inter=p.inter or 1, experts=p.experts or 1, topk=p.topk or 1, dtype=p.dtype,
        weight=PACKED.get(p.wdtype, p.wdtype), scales="group" if grouped else p.wscale,
        group=group_of(p) if grouped else 0,
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
    """The stages of both launches. Raises CandidateFailed for a config that is none."""
    try:
        config = json.loads(candidate.config)
        up, down = (stage_of(tuple(map(int, config[name].split(".")))) for name in ("up", "down"))
        return up, down
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise CandidateFailed(f"{candidate} has no configuration of two launches") from err


def stage_of(shape: tuple[int, ...]) -> Stage:
    """(warps, depth, tiles, parts, pairs) as a configuration. Raises ValueError for another number of them."""
    warps, depth, tiles, parts, pairs = shape
    return Stage(warps=warps, depth=depth, tiles=tiles, parts=parts, pairs=pairs)


def text_of(how: Stage) -> str:
    """As stages_of reads it."""
    return f"{how.warps}.{how.depth}.{how.tiles}.{how.parts}.{how.pairs}"


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
        raise CandidateFailed(f"{how} of {name}: spills {made.spill_bytes} bytes per thread")
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
