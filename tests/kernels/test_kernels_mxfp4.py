"""MXFP4 by MXFP4 without a GPU: the gate sees planted faults, and the kernel is an instruction where there is one."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from own_kernels import published

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch_values import holds
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.configs.tunable import WEIGHT_ONLY_ROWS, can_tune
from gemmtuned.daemon.child.verify import verify
from gemmtuned.kernels import catalog
from gemmtuned.kernels.compile import compile_kernel, compile_record
from gemmtuned.kernels.dequantise import dequantised
from gemmtuned.kernels.families import family_of, tunable
from gemmtuned.kernels.kernel import StatelessKernel
from gemmtuned.kernels.triton.mxfp4_tiles import KERNEL, launch_record

pytestmark = pytest.mark.usefixtures("kept_compiler_cache")
B200 = Device("cuda-nvidia-b200-148", "cuda", "NVIDIA B200", "sm_100", 148)
TILE = {"rows": 128, "tokens": 16, "block_k": 256, "split": 2, "decoded": 0, "warps": 4, "stages": 3}
INSTRUCTIONS = {
    "sm_100": r"tcgen05\.mma\.cta_group::1\.kind::mxf4\.block_scale",
    "sm_120": r"mma\.sync\.aligned\.m16n8k64\.row\.col\.kind::mxf4nvf4\.block_scale\S*e2m1\.e2m1\.f32\.ue8m0",
    "gfx950": r"v_mfma_scale_f32_\d+x\d+x\d+_f8f6f4",
}
CPU = torch.device("cpu")
Scales = Callable[[Tensor], Tensor]


def problem(m: int = 16, n: int = 576, k: int = 1024, **more: Any) -> Problem:
    of = {"dtype": "fp4_e2m1", "out_dtype": "bf16", "scale": "1x32"}
    return Problem(**{"family": "scaled", "m": m, "n": n, "k": k, **of, **more})


def same(scales: Tensor) -> Tensor:
    return scales


def sums(asked: Problem, of_x: Scales = same, of_w: Scales = same, drop: int = 0) -> StatelessKernel:
    """A right kernel but for a planted fault: other scales, or blocks of K that are lost."""

    def call(x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor, bias: Tensor | None) -> Tensor:
        a = dequantised(x, of_x(scale_x), "mxfp4", torch.float32)[:, : asked.k - drop]
        b = dequantised(w.mT, of_w(scale_w.mT), "mxfp4", torch.float32)[:, : asked.k - drop]
        y = a @ b.t()
        return (y if bias is None else y + bias.float()).to({"bf16": torch.bfloat16}.get(asked.out_dtype, torch.half))

    return StatelessKernel(call)


FAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "a neighbour's scale of W along K": {"of_w": lambda s: s.roll(1, 1)},
    "another row's scale of W": {"of_w": lambda s: s.roll(1, 0)},
    "a neighbour's scale of X along K": {"of_x": lambda s: s.roll(1, 1)},
    "another row's scale of X": {"of_x": lambda s: s.roll(1, 0)},
    "a lost block of K": {"drop": 32},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("size", [(5, 40, 256), (9, 24, 288)])
def test_the_gate_takes_a_right_kernel_and_sees_planted_faults(size: tuple[int, int, int], fault: str) -> None:
    asked = problem(*size, threads=1, bias=size[0] == 9, out_dtype="fp16" if size[0] == 9 else "bf16")
    candidate = Candidate("sums")
    with torch.inference_mode():
        kernels: Any = {candidate: sums(asked, **FAULTS[fault])}
        said = verify(asked, kernels, family_of(asked).default(asked), device=CPU)[candidate]
    assert said.outcome == ("ok" if fault == "none" else "wrong"), said.note


def test_what_is_none_of_its_problems_cannot_be_tuned_and_says_so() -> None:
    assert can_tune(problem()) and can_tune(problem(threads=2))
    assert all(problem().operands in tunable(kind) for kind in ("cuda", "cpu"))
    for other in (
        problem(k=1040), problem(layout="nn"), problem(out_dtype="fp32"), problem(wscale_layout="swizzled"),
        problem(wdtype="fp8_e4m3"), problem(scale="1x128"), problem(scale_dtype="fp8_e4m3"), problem(batch=2),
        problem(weight_state="shuffled"),
    ):  # fmt: skip
        assert not can_tune(other), other
        with pytest.raises(CandidateFailed, match=r"fp4_e2m1|fp8|shuffled|cannot be tuned"):
            family_of(other)


@pytest.mark.parametrize(
    "arch", [pytest.param("sm_100", marks=pytest.mark.long), "sm_120", pytest.param("gfx950", marks=pytest.mark.long)]
)
def test_it_becomes_the_instruction_of_those_gpus(arch: str) -> None:
    found = KERNEL.scored(problem(), replace(B200, arch=arch))
    compiled = compile_kernel(launch_record(found[0][1], problem()), arch)
    text = compiled.asm["amdgcn" if arch.startswith("gfx") else "ptx"]
    assert re.search(INSTRUCTIONS[arch], text) and not re.search(r"mma\S*f32\.bf16|kind::f16", text)
    if not arch.startswith("gfx"):
        assert compile_record(launch_record(found[0][1], problem()), arch).spill_bytes == 0


@pytest.mark.long
@pytest.mark.parametrize("m", [1, 64, 1024])
def test_all_that_is_tried_there_becomes_it_and_most_without_spills(m: int) -> None:
    asked = problem(m, 2112, 7168)
    dealt = list(catalog.candidates(asked, B200)["triton"])
    assert dealt and {candidate.kernel for candidate in dealt} == {KERNEL.name}
    refused = 0
    for candidate in dealt[:8]:
        _, record = catalog.record_of(candidate, asked)
        compiled = compile_kernel(record, "sm_100")
        assert re.search(INSTRUCTIONS["sm_100"], compiled.asm["ptx"]), candidate
        try:
            compile_record(record, "sm_100")
        except CandidateFailed:
            refused += 1
    assert refused <= 1


def test_codes_are_decoded_where_there_is_no_instruction_and_for_few_rows_alone() -> None:
    for arch, decoded in (("sm_80", 1), ("sm_89", 1), ("sm_90", 1), ("sm_100", 0), ("sm_103", 0), ("sm_120", 0)):
        there = replace(B200, arch=arch)
        offered = [one for offers in catalog.offers(problem(), there).values() for one in offers]
        assert {one.kernel for one in offered} == {"triton.mxfp4_tiles"}
        assert {json.loads(one.candidate.config)["decoded"] for one in offered} == {decoded}, arch
        assert bool(KERNEL.scored(problem(WEIGHT_ONLY_ROWS + 1), there)) is not bool(decoded)
    assert not any(catalog.offers(problem(), replace(B200, arch="gfx942")).values())
    assert not KERNEL.offers(problem(dtype="fp8_e4m3", scale="row"), B200, "triton")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_both_operands_are_decoded_on_their_way_into_the_product(arch: str) -> None:
    config = TILE | {"decoded": 1, "block_k": 128, "tokens": 32}
    compiled = compile_kernel(launch_record(config, problem(20)), arch)
    assert compile_record(launch_record(config, problem(20)), arch).spill_bytes == 0
    text = compiled.asm["ptx"]
    if arch == "sm_80":
        assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in text
        return
    assert "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16" in text
    copies = re.findall(r"cp\.async\.(\w+)\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", text)
    assert {size for kind, size in copies if kind == "cg"} == {"0x10"}, "codes come 16 bytes at once"


@pytest.mark.long
@pytest.mark.parametrize("m", [1, 64, 1024])
def test_most_that_is_tried_on_an_h200_compiles_without_spills(m: int) -> None:
    asked, there, refused = problem(m, 2112, 7168), replace(B200, arch="sm_90", units=132), 0
    for candidate in list(catalog.candidates(asked, there)["triton"])[:12]:
        _, record = catalog.record_of(candidate, asked)
        with contextlib.suppress(CandidateFailed):
            compile_record(record, "sm_90")
            continue
        refused += 1
    assert refused <= 2


def test_what_is_published_for_it_is_found_by_the_calls_of_a_program() -> None:
    on = replace(B200, key="cuda-nvidia-rtx-pro-6000-188", arch="sm_120", units=188)
    table, solution = published(KERNEL.name, TILE, problem(), on)
    assert not table.refused and table.find(problem(), "graph", "cuda:0") == ("exact", solution)


@pytest.mark.parametrize(
    ("changed", "config"),
    [
        ({"k": 1040}, {}), ({"layout": "nn"}, {}), ({"scale": "1x128"}, {}), ({"wscale_layout": "other"}, {}),
        ({}, {"rows": 16}), ({}, {"block_k": 64}), ({}, {"tokens": 8}), ({}, {"split": 1 << 16}),
        ({"n": 1 << 23}, {}), ({"m": 2049}, {"decoded": 1}), ({}, {"decoded": 1, "warps": 16}),
    ],
    ids=str,
)  # fmt: skip
def test_what_it_is_not_written_for_is_refused(changed: dict[str, Any], config: dict[str, int]) -> None:
    launch_record(TILE, problem())
    with pytest.raises(CandidateFailed):
        launch_record(TILE | config, replace(problem(), **changed))


def test_operands_that_lie_otherwise_are_torchs() -> None:
    asked = problem(20, 256, 512)
    inputs = family_of(asked).make(asked, kind="randn", seed=0, device=CPU)
    given = {"x": inputs["x"], "w": inputs["w"].mT, "scale_x": inputs["scale_x"], "scale_w": inputs["scale_w"].mT}
    checked = launch_record({**TILE, "split": 1}, asked).launch.checked
    assert holds(checked, given)
    one = torch.zeros(1, dtype=torch.uint8)
    for name, other in {
        "x": torch.zeros(21, 256, dtype=torch.uint8), "w": torch.zeros(256, 272, dtype=torch.uint8)[:, 8:264],
        "scale_x": inputs["scale_x"].t().contiguous().t(), "scale_w": torch.zeros(256, 32, dtype=torch.uint8)[:, ::2],
    }.items():  # fmt: skip
        assert not holds(checked, given | {name: other}), name
    assert not holds(checked, given | {"scale_x": torch.cat([one, inputs["scale_x"].reshape(-1)])[1:].view(20, 16)})
