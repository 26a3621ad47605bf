"""The grouped kernel without a GPU: clean from the compiler, launched for no call that it is not written for."""

from __future__ import annotations

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
from gemmtuned.kernels.compile import compile_record
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.triton.grouped import KERNEL, launch_record, most_tiles

pytestmark = pytest.mark.usefixtures("kept_compiler_cache")
H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
EXPERTS = Problem(family="grouped", batch=128, m=64, n=1536, k=2048, dtype="bf16", math_mode="reduced")


def configs(problem: Problem, arch: str = "sm_90") -> list[dict[str, int]]:
    return [config for _, config in KERNEL.scored(problem, replace(H200, arch=arch))]


@pytest.mark.long
@pytest.mark.part(2)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942", "gfx950"])
def test_the_first_candidates_compile_without_spills(arch: str) -> None:
    for problem in (EXPERTS, replace(EXPERTS, m=32768, layout="nn", dtype="fp16", wdtype="fp16", out_dtype="fp16")):
        config = configs(problem, arch)[0]
        binary = compile_record(launch_record(config, problem), arch)
        assert binary.spill_bytes == 0 and binary.data[:4] == b"\x7fELF"


def test_it_is_offered_for_grouped_products_of_16_bits_alone() -> None:
    found = catalog.offers(EXPERTS, H200)
    assert {offer.kernel for offers in found.values() for offer in offers} == {"triton.grouped"}
    assert len(catalog.candidates(EXPERTS, H200)["triton"]) >= 6
    for other in (
        replace(EXPERTS, dtype="fp32", wdtype="fp32", out_dtype="fp32"),
        replace(EXPERTS, batch=2048),
        Problem(m=64, n=1536, k=2048, dtype="bf16"),
    ):
        assert not KERNEL.offers(other, H200, "triton"), other


@pytest.mark.parametrize(
    "changed",
    [{"n": 1537}, {"k": 2044}, {"layout": "tt"}, {"family": "batched"}, {"dtype": "fp32"}, {"out_dtype": "fp32"}],
)
def test_what_it_is_not_written_for_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(CandidateFailed):
        launch_record(configs(EXPERTS)[0], replace(EXPERTS, **changed))


def test_every_way_to_deal_out_rows_has_places_enough() -> None:
    random = torch.Generator().manual_seed(0)
    for groups, m, tokens in ((128, 8, 16), (4, 100, 16), (3, 64, 64), (1, 1, 16), (8, 8, 32), (5, 1000, 128)):
        most = 0
        for _ in range(200):
            ends = torch.randint(0, m + 1, (groups - 1,), generator=random).sort().values.tolist()
            sizes = [b - a for a, b in zip([0, *ends], [*ends, m], strict=True)]
            most = max(most, sum(-(-size // tokens) for size in sizes))
        assert most <= most_tiles(m, groups, tokens)
    assert most_tiles(8, 128, 16) == 8 and most_tiles(130, 128, 16) == 128 and most_tiles(160, 128, 16) == 130


def test_what_is_published_for_it_is_found_by_the_calls_of_a_program() -> None:
    table, solution = published(KERNEL.name, configs(EXPERTS)[0], EXPERTS, H200)

    assert not table.refused
    assert table.find(EXPERTS, "graph", "cuda:0") == ("exact", solution)
    read_launch(solution.launch).check_for(EXPERTS)
    with pytest.raises(TableError, match="takes"):
        read_launch(solution.launch).check_for(Problem(m=64, n=1536, k=2048, dtype="bf16"))


@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_calls_of_other_sizes_or_strides_are_torchs(layout: str) -> None:
    problem = Problem(family="grouped", batch=3, m=16, n=32, k=64, dtype="fp16", layout=layout)
    conditions = launch_record(configs(problem)[0], problem).launch.checked
    inputs = family_of(problem).make(problem, kind="randn", seed=0, device=torch.device("cpu"))
    x, w, offs = inputs["x"], inputs["w"].mT, inputs["offs"]

    assert holds(conditions, {"x": x, "w": w, "offs": offs})
    assert holds(conditions, {"x": x[:9], "w": w, "offs": offs}), "fewer rows"
    wide = torch.zeros(16, 130, dtype=torch.float16)
    for name, other in (
        ("x", torch.zeros(17, 64, dtype=torch.float16)),
        ("x", wide[:, 1:65]),  # not aligned, and 130 values apart
        ("x", torch.zeros(64, 16, dtype=torch.float16).t()),
        ("w", w.mT.contiguous().mT if layout == "nt" else w.contiguous()),
        ("w", w[:2]),
        ("offs", offs[:2]),
        ("offs", offs.repeat_interleave(2)[::2]),
    ):
        assert not holds(conditions, {"x": x, "w": w, "offs": offs, name: other}), (name, other.shape)
