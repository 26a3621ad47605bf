"""The tiles of 8-bit and 4-bit weights without a GPU: clean from the compiler, offered where few rows of X end."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from own_kernels import published

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch_values import holds
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device
from gemmtuned.configs.tunable import WEIGHT_ONLY, WEIGHT_ONLY_ROWS
from gemmtuned.kernels import catalog
from gemmtuned.kernels.compile import compile_kernel, compile_record
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.triton.launch import LaunchRecord
from gemmtuned.kernels.triton.weight_only_tiles import KERNEL, launch_record

pytestmark = pytest.mark.usefixtures("kept_compiler_cache")
H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
TILE = {"rows": 128, "tokens": 64, "block_k": 128, "split": 2, "warps": 4, "stages": 3}
WEIGHTS = {
    "int8": {"wdtype": "i8", "wscale": "row"},
    "fp8": {"wdtype": "fp8_e4m3", "wscale": "128x128"},
    "int4": {"wdtype": "i4", "wscale": "1x128", "wscale_dtype": "bf16"},
    "mxfp4": {"wdtype": "fp4_e2m1", "wscale": "1x32", "wscale_dtype": "e8m0"},
}


def problem(weights: str, m: int = 64, n: int = 4096, k: int = 4096, **more: Any) -> Problem:
    return Problem(family="weight_only", m=m, n=n, k=k, math_mode="reduced", **{**WEIGHTS[weights], **more})


def configs(asked: Problem, device: Device = H200) -> list[dict[str, int]]:
    return [config for _, config in KERNEL.scored(asked, device)]


def compiles(record: LaunchRecord) -> bool:
    try:
        return compile_record(record, "sm_90").spill_bytes == 0
    except CandidateFailed:
        return False


@pytest.mark.long
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("size", [(32, 2112, 7168), (1024, 1000, 1312)])
def test_most_candidates_that_get_a_place_compile_without_spills(size: tuple[int, int, int], weights: str) -> None:
    asked = problem(weights, *size, **({"wscale": "1x32"} if weights == "int4" else {}))
    dealt = list(catalog.candidates(asked, H200)["triton"])
    assert len(dealt) == 12 and {candidate.kernel for candidate in dealt} == {KERNEL.name}
    refused = [config for config in configs(asked)[:8] if not compiles(launch_record(config, asked))]
    assert len(refused) <= 2, refused


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100", "sm_120"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_it_compiles_for_other_architectures_too(arch: str, weights: str) -> None:
    there = replace(H200, arch=arch)
    asked = problem(weights, 40, 576, 1056, dtype="fp16", out_dtype="fp16",
                    **({"wscale": "1x32", "wscale_dtype": "fp16"} if weights == "int4" else {}))  # fmt: skip
    if (arch, weights) == ("sm_80", "fp8"):
        assert not configs(asked, there), "e4m3 in hardware begins with sm_89"
        return
    assert compile_record(launch_record(configs(asked, there)[0], asked), arch).spill_bytes == 0


@pytest.mark.parametrize(("weights", "block_k"), [("int4", 128), ("int8", 128), ("fp8", 256)])
def test_decoded_weights_go_from_registers_into_the_product(weights: str, block_k: int) -> None:
    compiled = compile_kernel(launch_record(TILE | {"block_k": block_k}, problem(weights)), "sm_90")
    text = compiled.asm["ptx"]
    products = re.findall(r"wgmma\.mma_async[\w.:]*\s*\{[^}]*\},\s*(\{|%)", text)
    assert products and set(products) == {"{"}, "the first operand is registers, not an address"
    assert "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16" in text
    copies = re.findall(r"cp\.async\.(\w+)\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", text)
    assert copies and {size for kind, size in copies if kind == "cg"} == {"0x10"}, copies[:3]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_it_is_offered_from_nine_rows_of_x_on(weights: str) -> None:
    few, many = {"cuda.weight_only"}, {"triton.weight_only_tiles"}
    for m, kernels in ((8, few), (9, few | many), (16, few | many), (17, many), (WEIGHT_ONLY_ROWS, many)):
        offered = [offer for offers in catalog.offers(problem(weights, m), H200).values() for offer in offers]
        assert {offer.kernel for offer in offered if offer.kernel} == kernels, m
    for other in (
        problem(weights, WEIGHT_ONLY_ROWS + 1), problem(weights, threads=2), problem(weights, layout="nn"),
        problem(weights, k=4100), problem(weights, out_dtype="fp32"),
    ):  # fmt: skip
        assert not KERNEL.offers(other, H200, "triton"), other
    assert not KERNEL.offers(problem(weights), replace(H200, arch="gfx942"), "triton")


def test_wide_tiles_come_with_many_rows_and_k_is_cut_where_there_are_few_tiles() -> None:
    firsts = [configs(problem("int4", m))[0] for m in (16, 32, 256, 2048)]
    assert [first["tokens"] for first in firsts] == sorted(first["tokens"] for first in firsts)
    assert firsts[0]["tokens"] == 16 and firsts[-1]["tokens"] >= 64
    assert configs(problem("int4", 32, n=576, k=7168))[0]["split"] >= 4
    assert configs(problem("int4", 1024, n=14336))[0]["split"] == 1


@pytest.mark.parametrize(
    ("changed", "config"),
    [
        ({"m": WEIGHT_ONLY_ROWS + 1}, {}), ({"layout": "nn"}, {}), ({"weight_state": "shuffled"}, {}),
        ({"k": 4100}, {}), ({"wdtype": "fp8_e5m2"}, {}), ({"wscale": "1x128"}, {}), ({"scale": "row"}, {}),
        ({"dtype": "fp32", "out_dtype": "fp32"}, {}), ({}, {"rows": 32}), ({}, {"block_k": 64}), ({}, {"tokens": 8}),
        ({"n": 1 << 22}, {}), ({}, {"split": 1 << 16}),
        ({**WEIGHTS["mxfp4"], "n": 1 << 20, "k": 1 << 16}, {"split": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_what_it_is_not_written_for_is_refused(changed: dict[str, Any], config: dict[str, int]) -> None:
    asked = problem("int8")
    launch_record(TILE, asked)
    with pytest.raises(CandidateFailed):
        launch_record(TILE | config, replace(asked, **changed))


def test_what_is_published_for_it_is_found_by_the_calls_of_a_program() -> None:
    asked = problem("int4")
    table, solution = published(KERNEL.name, TILE, asked, H200)
    assert not table.refused and table.find(asked, "graph", "cuda:0") == ("exact", solution)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_operands_that_lie_otherwise_are_torchs(weights: str) -> None:
    asked = problem(weights, 20, 256, 512)
    inputs = family_of(asked).make(asked, kind="randn", seed=0, device=torch.device("cpu"))
    scales = inputs["scale_w"]
    given = {"x": inputs["x"], "w": inputs["w"].mT, "scale_w": scales.mT if scales.dim() == 2 else scales}
    checked = launch_record({**TILE, "split": 1}, asked).launch.checked
    wide = torch.zeros(20, 528, dtype=torch.bfloat16)

    assert holds(checked, given)
    assert holds(checked, given | {"x": given["x"][:9]}), "fewer rows"
    assert holds(checked, given | {"x": wide[:, :512]}), "rows further apart"
    for name, other in (
        ("x", torch.zeros(21, 512, dtype=torch.bfloat16)),
        ("x", wide[:, 1:513]),
        ("x", torch.zeros(512, 20, dtype=torch.bfloat16).t()),
        ("w", given["w"][:240]),
        ("w", given["w"].clone()[:, :-16]),
        ("scale_w", given["scale_w"][:1]),
        ("scale_w", torch.stack([given["scale_w"]] * 2, -1)[..., 0]),
    ):
        assert not holds(checked, given | {name: other}), (name, other.shape)


def test_every_kind_of_weights_has_a_launch() -> None:
    for (dtype, wdtype), kinds in WEIGHT_ONLY.items():
        for scale, of in kinds:
            asked = Problem(family="weight_only", m=64, n=512, k=512, dtype=dtype, out_dtype=dtype, wdtype=wdtype,
                            wscale=scale, wscale_dtype=of)  # fmt: skip
            assert launch_record(TILE, asked).words["scale"] == "scale_w.ptr" and configs(asked)
