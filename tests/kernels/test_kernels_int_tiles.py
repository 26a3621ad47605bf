"""The kernel of int8 into int32 without a GPU: clean from the compiler, offered where it is exact and torch is weak."""

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
from gemmtuned.configs.solution import Device
from gemmtuned.kernels import catalog
from gemmtuned.kernels.compile import compile_kernel, compile_record
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.triton.int_tiles import KERNEL, launch_record

pytestmark = pytest.mark.usefixtures("kept_compiler_cache")
H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
PROBLEM = Problem(m=17, n=4096, k=4096, dtype="i8", out_dtype="i32")
TILE = {"rows": 64, "tokens": 32, "block_k": 128, "split": 4, "swap": 1, "warps": 4, "stages": 5}


def configs(problem: Problem, device: Device = H200) -> list[dict[str, int]]:
    return [config for _, config in KERNEL.scored(problem, device)]


@pytest.mark.long
@pytest.mark.parametrize("size", [(17, 4096, 4096), (32, 24576, 1536), (64, 2112, 7168), (49, 1000, 520)])
def test_candidates_that_get_a_place_compile_without_spills(size: tuple[int, int, int]) -> None:
    m, n, k = size
    problem = replace(PROBLEM, m=m, n=n, k=k)
    dealt = list(catalog.candidates(problem, H200)["triton"])
    assert len(dealt) == 6 and {candidate.kernel for candidate in dealt} == {"int_tiles"}
    for config in configs(problem)[:8]:
        binary = compile_record(launch_record(config, problem), "sm_90")
        assert binary.spill_bytes == 0 and binary.data[:4] == b"\x7fELF", config


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100", "gfx942", "gfx950"])
def test_it_compiles_for_other_architectures_too(arch: str) -> None:
    there = replace(H200, arch=arch)
    for m in (17, 64):
        problem = replace(PROBLEM, m=m, n=576, k=1032)
        assert compile_record(launch_record(configs(problem, there)[0], problem), arch).spill_bytes == 0


@pytest.mark.parametrize(
    ("more", "instruction"),
    [
        ({}, "wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8"),
        ({"swap": 0}, "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"),
    ],
)
def test_integers_are_multiplied_and_added_up_as_integers(more: dict[str, int], instruction: str) -> None:
    text = compile_kernel(launch_record(TILE | more, PROBLEM), "sm_90").asm["ptx"]
    assert set(re.findall(r"(?:mma\.sync|wgmma\.mma)[\w.:]*", text)) == {instruction}
    assert not re.findall(r"\.f32\b", text), "no sum is ever a float"
    copies = re.findall(r"cp\.async\.(\w+)\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", text)
    assert copies and all(kind == "cg" and size in ("16", "0x10") for kind, size in copies), copies[:3]


@pytest.mark.parametrize("m", [17, 32, 33, 64])
def test_k_is_cut_where_there_are_few_rows_of_w(m: int) -> None:
    few, many = replace(PROBLEM, m=m, n=576, k=7168), replace(PROBLEM, m=m, n=24576, k=1536)
    assert all(config["split"] >= 4 for config in configs(few)[:6]) and configs(many)[0]["split"] == 1
    tried = [(config["rows"], config["split"], config["swap"]) for config in configs(few)]
    several = len(set(tried))
    assert several >= 5 and len(set(tried[:several])) == several, "each way once before any twice"


def test_it_is_offered_for_few_rows_of_x_alone() -> None:
    found = catalog.offers(PROBLEM, H200)
    assert {offer.kernel for offers in found.values() for offer in offers} == {"triton.int_tiles"}
    for other in (
        replace(PROBLEM, m=65), replace(PROBLEM, layout="nn"), replace(PROBLEM, k=1 << 17), replace(PROBLEM, threads=2),
        replace(PROBLEM, out_dtype="i8"), replace(PROBLEM, dtype="u8"), replace(PROBLEM, batch_invariant=True),
        replace(PROBLEM, bias=True), replace(PROBLEM, dtype="bf16", wdtype="bf16", out_dtype="fp32"),
    ):  # fmt: skip
        assert not KERNEL.offers(other, H200, "triton"), other
    assert not KERNEL.offers(PROBLEM, replace(H200, arch="sm_75"), "triton")


@pytest.mark.parametrize(
    ("changed", "config"),
    [
        ({"m": 33}, {}), ({"m": 65}, {"tokens": 128}), ({"layout": "tn"}, {}), ({"k": 1 << 17}, {}),
        ({"bias": True}, {}), ({"n": 1 << 21}, {}), ({"out_dtype": "i8"}, {}),
        ({"dtype": "bf16", "out_dtype": "bf16"}, {}), ({}, {"rows": 8}), ({}, {"block_k": 16}),
    ],
    ids=str,
)  # fmt: skip
def test_what_it_is_not_written_for_is_refused(changed: dict[str, Any], config: dict[str, int]) -> None:
    launch_record(TILE, PROBLEM)
    with pytest.raises(CandidateFailed):
        launch_record(TILE | config, replace(PROBLEM, **({"wdtype": changed.get("dtype", "i8")} | changed)))


def test_what_is_published_for_it_is_found_by_the_calls_of_a_program() -> None:
    table, solution = published(KERNEL.name, TILE, PROBLEM, H200)
    assert not table.refused and table.find(PROBLEM, "graph", "cuda:0") == ("exact", solution)
    read_launch(solution.launch).check_for(PROBLEM)
    with pytest.raises(TableError, match="takes"):
        read_launch(solution.launch).check_for(replace(PROBLEM, bias=True))


def test_calls_that_lie_otherwise_are_torchs() -> None:
    problem = replace(PROBLEM, n=24, k=48)
    inputs = family_of(problem).make(problem, kind="randn", seed=0, device=torch.device("cpu"))
    given = {"x": inputs["x"], "w": inputs["w"].mT}
    conditions = launch_record(TILE | {"split": 1}, problem).launch.checked
    wide = torch.zeros(17, 80, dtype=torch.int8)

    assert holds(conditions, given)
    assert holds(conditions, given | {"x": given["x"][:9]}), "fewer rows"
    assert holds(conditions, given | {"x": wide[:, 16:64]}), "rows further apart"
    for name, other in (
        ("x", torch.zeros(18, 48, dtype=torch.int8)),
        ("x", wide[:, 1:49]),
        ("x", wide.flatten()[: 17 * 56].view(17, 56)[:, :48]),  # 56 values from row to row
        ("x", torch.zeros(48, 17, dtype=torch.int8).t()),
        ("w", torch.zeros(48, 24, dtype=torch.int8).t()),
    ):
        assert not holds(conditions, given | {name: other}), (name, other.shape)
