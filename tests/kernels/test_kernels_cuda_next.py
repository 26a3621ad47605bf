"""CUDA kernels for the architecture after the one that they run on: compiled where the instructions exist, no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.cuda import (
    moe_compile,
    moe_decode,
    nvrtc,
    one_shot,
    scaled_fragments,
    scaled_one_shot,
    scaled_tiles,
    weight_only,
)

pytestmark = pytest.mark.skipif(nvrtc.version() is None, reason="needs NVRTC")
NEXT = "sm_100a"


def scaled(m: int, **columns: Any) -> Problem:
    return Problem(**{"family": "scaled", "m": m, "n": 2112, "k": 7168, "dtype": "fp8_e4m3", "out_dtype": "bf16",
                      "scale": "row", **columns})  # fmt: skip


def coded(m: int, wdtype: str, wscale: str, wscale_dtype: str) -> Problem:
    return Problem(family="weight_only", m=m, n=4096, k=4096, dtype="bf16", wdtype=wdtype, wscale=wscale,
                   wscale_dtype=wscale_dtype)  # fmt: skip


def expert(stage: int, **columns: Any) -> str:
    problem = Problem(family="moe", m=4, n=2048, k=2048, inter=512, experts=32, topk=4, act="silu_gated", dtype="bf16",
                      **columns)  # fmt: skip
    layer = moe_compile.layer_of(problem)
    assert layer is not None
    how = next(iter(moe_compile.stages_that_fit(layer, stage, 4)))
    return moe_decode.source(layer, stage, how, most_pairs=16)


def fragments(problem: Problem) -> str:
    return scaled_fragments.scaled_fragments(scaled_fragments.scored(problem, 132)[0][1], problem).source()


def decoded(problem: Problem) -> str:
    return weight_only.weight_only(weight_only.scored(problem, 132)[0][1], problem).source()


COMPILED: dict[str, Callable[[], str]] = {
    "scaled_fragments, fp8 by rows": lambda: fragments(scaled(8)),
    "scaled_fragments, fp8 by blocks": lambda: fragments(scaled(8, scale="1x128", scale_layout="col")),
    "scaled_fragments, int8": lambda: fragments(scaled(8, dtype="i8")),
    "scaled_fragments, int8 with zero points": lambda: fragments(scaled(8, dtype="i8", scale="row+zero")),
    "weight_only, fp8": lambda: decoded(coded(8, "fp8_e4m3", "row", "")),
    "weight_only, int4": lambda: decoded(coded(8, "i4", "1x128", "bf16")),
    "weight_only, MXFP4": lambda: decoded(coded(1, "fp4_e2m1", "1x32", "e8m0")),
    "moe_decode, bf16": lambda: expert(1, wdtype="bf16"),
    "moe_decode, fp8": lambda: expert(2, wdtype="fp8_e4m3", wscale="row"),
    "moe_decode, MXFP4": lambda: expert(1, wdtype="fp4_e2m1", wscale="1x32", wscale_dtype="e8m0"),
}


@pytest.mark.parametrize("name", COMPILED)
def test_what_needs_no_instruction_of_one_architecture_compiles_for_the_next(name: str) -> None:
    assert not nvrtc.compiled(COMPILED[name](), NEXT).spill_bytes


def test_what_multiplies_by_groups_of_warps_is_for_one_architecture_alone() -> None:
    """wgmma is an instruction of sm_90a."""
    fp8 = scaled_one_shot.scaled_one_shot(scaled_one_shot.scored(scaled(64), 132)[0][1], scaled(64)).source()
    tiles = scaled_tiles.scaled_tiles(scaled_tiles.scored(scaled(64), 132)[0][1], scaled(64)).source()
    dense = Problem(m=64, n=4096, k=4096, dtype="bf16", bias=False)
    plain = one_shot.one_shot(one_shot.scored(64, 4096, 4096, 132)[0][1], dense).source()
    for source in (fp8, tiles, plain):
        with pytest.raises(CandidateFailed, match=r"(?s)wgmma"):
            nvrtc.compiled(source, NEXT)
