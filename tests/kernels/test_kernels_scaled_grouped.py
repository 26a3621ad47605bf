"""The grouped kernel of fp8 without a GPU: clean from the compiler, exact sums where they are asked for."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from own_kernels import published

from gemmtuned.configs.errors import CandidateFailed, TableError
from gemmtuned.configs.launch import read_launch
from gemmtuned.configs.launch_values import holds
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device, Environment
from gemmtuned.hooks.dispatch import build_table
from gemmtuned.kernels import catalog
from gemmtuned.kernels.backends.triton_ import Triton
from gemmtuned.kernels.compile import compile_kernel, compile_record
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.triton.scaled_grouped import KERNEL, launch_record

pytestmark = pytest.mark.usefixtures("kept_compiler_cache")
H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
EXPERTS = Problem(family="grouped", batch=128, m=64, n=1536, k=2048, dtype="fp8_e4m3", out_dtype="bf16", scale="row")
TILE = {"rows": 64, "tokens": 16, "block_k": 256, "warps": 4, "stages": 3, "swap": 1}
MODES = ("ieee", "reduced")


def configs(problem: Problem) -> list[dict[str, int]]:
    return [config for _, config in KERNEL.scored(problem, H200)]


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("m", [64, 2048, 16384])
def test_every_candidate_compiles_without_spills(m: int, mode: str) -> None:
    problem = replace(EXPERTS, m=m, math_mode=mode)
    found = configs(problem)
    assert len(found) >= 8
    for config in found:
        binary = compile_record(launch_record(config, problem), "sm_90")
        assert binary.spill_bytes == 0 and binary.data[:4] == b"\x7fELF", config


@pytest.mark.long
def test_it_compiles_for_the_next_architecture_too() -> None:
    assert compile_record(launch_record(TILE, EXPERTS), "sm_100").spill_bytes == 0


def sums_of(problem: Problem, config: dict[str, int]) -> tuple[int, int]:
    """(products of K of 32 by the tensor core, additions in fp32) of one thread, in a step of the loop."""
    text = compile_kernel(launch_record(config, problem), "sm_90").asm["ptx"]
    return text.count("wgmma.mma_async"), len(re.findall(r"\badd(?:\.rn)?\.f32", text))


@pytest.mark.parametrize("config", [TILE, TILE | {"block_k": 128}, TILE | {"block_k": 64}], ids=str)
def test_sums_leave_the_tensor_core_every_128_of_k_unless_the_problem_allows_shorter_ones(
    config: dict[str, int],
) -> None:
    values = config["rows"] * config["tokens"] // (32 * config["warps"])  # of Y in a thread
    products, added = sums_of(EXPERTS, config)

    assert products == config["block_k"] // 32
    assert added == values * max(1, config["block_k"] // 128)
    assert sums_of(replace(EXPERTS, math_mode="reduced"), config) == (products, 0)


def test_small_tiles_multiply_in_fp16_and_add_up_in_fp32() -> None:
    small = {"rows": 32, "tokens": 16, "block_k": 128, "warps": 4, "stages": 3, "swap": 0}
    for mode in MODES:
        text = compile_kernel(launch_record(small, replace(EXPERTS, math_mode=mode)), "sm_90").asm["ptx"]
        assert set(re.findall(r"(?:mma\.sync|wgmma)[\w.:]*", text)) == {
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
        }


def test_weights_are_copied_sixteen_bytes_at_a_time() -> None:
    text = compile_kernel(launch_record(TILE, EXPERTS), "sm_90").asm["ptx"]
    copies = re.findall(r"cp\.async\.(\w+)\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", text)
    assert copies and all(kind == "cg" and size in ("16", "0x10") for kind, size in copies), copies[:3]


def test_it_is_offered_for_groups_with_scales_of_rows_alone() -> None:
    found = catalog.offers(EXPERTS, H200)
    assert {offer.kernel for offers in found.values() for offer in offers} == {"triton.scaled_grouped"}
    assert len(catalog.candidates(EXPERTS, H200)["triton"]) >= 6
    for other in (
        replace(EXPERTS, dtype="bf16", wdtype="bf16", scale="none", wscale="none"),
        replace(EXPERTS, batch=2048),
        replace(EXPERTS, scale="tensor", wscale="tensor"),
        replace(EXPERTS, family="scaled", batch=1),
    ):
        assert not KERNEL.offers(other, H200, "triton"), other
    assert not KERNEL.offers(EXPERTS, replace(H200, arch="sm_80"), "triton"), "torch has it from sm_90 on"


@pytest.mark.parametrize(
    "changed",
    [{"n": 1544}, {"k": 2040}, {"layout": "nn"}, {"family": "scaled", "batch": 1}, {"out_dtype": "fp16"},
     {"wscale": "tensor"}, {"bias": True}, {"wdtype": "fp8_e5m2"}],
    ids=str,
)  # fmt: skip
def test_what_it_is_not_written_for_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(CandidateFailed):
        launch_record(TILE, replace(EXPERTS, **changed))


@pytest.mark.parametrize("mode", MODES)
def test_what_is_published_for_it_is_found_by_the_calls_of_a_program(mode: str) -> None:
    problem = replace(EXPERTS, math_mode=mode)
    table, solution = published(KERNEL.name, TILE, problem, H200)

    assert not table.refused
    assert table.find(problem, "graph", "cuda:0") == ("exact", solution)
    other = replace(problem, math_mode=MODES[mode == "ieee"])
    assert table.find(other, "graph", "cuda:0") == ("miss", None), "with other sums it is another problem"
    read_launch(solution.launch).check_for(problem)
    for without in (replace(problem, scale="none", wscale="none"), replace(problem, family="scaled", batch=1)):
        with pytest.raises(TableError, match="takes"):
            read_launch(solution.launch).check_for(without)
    blocks = replace(problem, scale="1x128", wscale="128x128")
    here = Environment(H200, Triton(device=H200).stamps(H200))
    refused = build_table([replace(solution, problem=blocks)], {"cuda:0": here}, generation=1, failed=frozenset())
    assert refused.refused == {"grouped products (scale 1x128) run on stock torch in this version": 1}


def test_calls_of_other_sizes_or_strides_are_torchs() -> None:
    problem = replace(EXPERTS, batch=3, m=16, n=32, k=64)
    conditions = launch_record(TILE, problem).launch.checked
    inputs = family_of(problem).make(problem, kind="randn", seed=0, device=torch.device("cpu"))
    x, w, scale_w = inputs["x"], inputs["w"].mT, inputs["scale_w"]  # what is bound lies by rows: launched.bound
    given = {"x": x, "w": w, "offs": inputs["offs"], "scale_x": inputs["scale_x"], "scale_w": scale_w.mT}

    assert holds(conditions, given)
    assert holds(conditions, given | {"x": x[:9], "scale_x": given["scale_x"][:9]}), "fewer rows"
    room = torch.zeros(3, 40)[:, :32]
    assert holds(conditions, given | {"scale_w": room.mT}), "room between groups"
    anywhere = torch.zeros(17)[1:]
    assert holds(conditions, given | {"scale_x": anywhere}), "scales begin anywhere"
    wide = torch.zeros(16, 130, dtype=torch.float8_e4m3fn)
    for name, other in (
        ("x", torch.zeros(17, 64, dtype=torch.float8_e4m3fn)),
        ("x", wide[:, 1:65]),  # not aligned, and 130 values apart
        ("x", torch.zeros(64, 16, dtype=torch.float8_e4m3fn).t()),
        ("w", w.mT.contiguous().mT),
        ("w", w[:2]),
        ("offs", given["offs"][:2]),
        ("offs", given["offs"].repeat_interleave(2)[::2]),
        ("scale_x", given["scale_x"][:15]),
        ("scale_x", given["scale_x"].repeat_interleave(2)[::2]),
        ("scale_x", given["scale_x"][:, None]),
        ("scale_w", scale_w[:2].mT),
        ("scale_w", scale_w[:, :16].mT),
        ("scale_w", scale_w.repeat_interleave(2, 1)[:, ::2].mT),
        ("scale_w", scale_w[:, None].mT),
        ("scale_w", scale_w[0]),
    ):
        assert not holds(conditions, given | {name: other}), (name, other.shape)
