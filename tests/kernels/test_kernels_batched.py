"""The batched kernel without a GPU: clean from the compiler, launched for no call that it is not written for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from own_kernels import published

from gemmtuned.configs.errors import CandidateFailed, TableError
from gemmtuned.configs.launch import read_launch
from gemmtuned.configs.launch_values import arguments_of, holds
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device
from gemmtuned.kernels import catalog
from gemmtuned.kernels.compile import compile_record
from gemmtuned.kernels.triton.batched import KERNEL, launch_record

pytestmark = pytest.mark.usefixtures("kept_compiler_cache")
H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
HEADS = Problem(family="batched", batch=16, m=8, n=512, k=128, dtype="bf16", layout="nn", math_mode="reduced")


def configs(problem: Problem, arch: str = "sm_90") -> list[dict[str, int]]:
    return [config for _, config in KERNEL.scored(problem, replace(H200, arch=arch))]


@pytest.mark.long
@pytest.mark.part(2)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942", "gfx950"])
def test_the_first_candidates_compile_without_spills(arch: str) -> None:
    for problem in (HEADS, replace(HEADS, m=256, layout="nt", dtype="fp16", wdtype="fp16", out_dtype="fp16")):
        for config in configs(problem, arch)[:2]:
            binary = compile_record(launch_record(config, problem), arch)
            assert binary.spill_bytes == 0 and binary.data[:4] == b"\x7fELF"


def test_it_is_offered_for_batched_products_of_16_bits_and_few_rows_alone() -> None:
    found = catalog.offers(HEADS, H200)
    assert {offer.kernel for offers in found.values() for offer in offers} == {"triton.batched"}
    for m in (1, 17, 64, 256, 1024):
        for n, k in ((512, 128), (128, 512), (264, 72)):
            assert len(catalog.candidates(replace(HEADS, m=m, n=n, k=k), H200)["triton"]) >= 6
    for other in (
        replace(HEADS, dtype="fp32", wdtype="fp32", out_dtype="fp32"),
        replace(HEADS, m=1025),
        replace(HEADS, layout="tn"),
        replace(HEADS, family="batched_add"),
        replace(HEADS, out_dtype="fp32"),
        replace(HEADS, batch=65536),
        replace(HEADS, m=1024, n=1 << 21),
        Problem(m=8, n=512, k=128, dtype="bf16"),
    ):
        assert not KERNEL.offers(other, H200, "triton"), other


@pytest.mark.parametrize(
    "changed",
    [
        {"n": 516}, {"k": 124}, {"layout": "tt"}, {"family": "grouped"}, {"dtype": "fp32"}, {"out_dtype": "fp32"},
        {"m": 2000},
    ],
)  # fmt: skip
def test_what_it_is_not_written_for_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(CandidateFailed, match=r"batched runs|multiples"):
        launch_record(configs(HEADS)[0], replace(HEADS, **changed))


def test_every_offer_for_a_wide_n_has_a_record_that_can_be_read() -> None:
    wide = replace(HEADS, n=1 << 21)
    assert {config["rows"] for config in configs(HEADS)} > {config["rows"] for config in configs(wide)} >= {64}
    for config in configs(wide):
        read_launch(replace(launch_record(config, wide).launch, binary="0" * 64, name="batched").text())
    with pytest.raises(CandidateFailed, match="131072 tiles"):
        launch_record(configs(HEADS)[0] | {"rows": 16}, wide)


def test_what_is_published_for_it_is_found_by_the_calls_of_a_program() -> None:
    table, solution = published(KERNEL.name, configs(HEADS)[0], HEADS, H200)

    assert not table.refused
    assert table.find(HEADS, "graph", "cuda:0") == ("exact", solution)
    read_launch(solution.launch).check_for(HEADS)
    with pytest.raises(TableError, match="takes"):
        read_launch(solution.launch).check_for(replace(HEADS, family="batched_add"))


@pytest.mark.parametrize("layout", ["nt", "nn"])
def test_calls_of_other_sizes_or_strides_are_torchs(layout: str) -> None:
    problem = Problem(family="batched", batch=3, m=16, n=32, k=64, dtype="fp16", layout=layout)
    conditions = launch_record(configs(problem)[0], problem).launch.checked

    def half(*sizes: int) -> torch.Tensor:
        return torch.zeros(*sizes, dtype=torch.float16)

    w = half(3, 32, 64) if layout == "nt" else half(3, 64, 32).mT
    good = {
        "as the problem has it": half(3, 16, 64), "fewer rows": half(3, 9, 64), "one row": half(3, 1, 64),
        "heads of each token": half(16, 3, 64).transpose(0, 1), "one matrix for all": half(1, 16, 64).expand(3, 16, 64),
    }  # fmt: skip
    for name, x in good.items():
        assert holds(conditions, {"x": x, "w": w}), name
    assert holds(conditions, {"x": good["one row"], "w": w[:1].expand(3, 32, 64)})
    for name, other in {
        "x": half(3, 17, 64), "x of more matrices": half(4, 16, 64),
        "x apart by odd numbers": half(3, 16, 66)[..., :64],
        "x not aligned": half(3, 16, 72)[..., 4:68], "x turned": half(3, 64, 16).mT,
        "w turned": w.mT.contiguous().mT if layout == "nt" else w.contiguous(), "w of fewer": w[:2],
        "w apart by odd numbers": half(3, 33, 66)[:, :32, :64] if layout == "nt" else half(3, 64, 34)[..., :32].mT,
    }.items():  # fmt: skip
        operands = {"x": good["as the problem has it"], "w": w, name[0]: other}
        assert not holds(conditions, operands), name


def test_a_view_of_tokens_and_heads_is_read_as_it_lies() -> None:
    record = launch_record(configs(HEADS)[0], HEADS).launch
    x = torch.zeros(8, 16, 128, dtype=torch.bfloat16).transpose(0, 1)
    operands = {"x": x, "w": torch.zeros(16, 128, 512, dtype=torch.bfloat16).mT, "y": torch.zeros(16, 8, 512)}
    found = dict(zip(record.arguments, arguments_of(record, operands, pointer=lambda t: t), strict=True))
    assert {name: found[name] for name in ("x.size1", "x.stride0", "x.stride1", "w.stride0", "w.stride2")} == {
        "x.size1": 8, "x.stride0": 128, "x.stride1": 16 * 128, "w.stride0": 128 * 512, "w.stride2": 512,
    }  # fmt: skip
