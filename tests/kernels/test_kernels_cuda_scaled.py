"""scaled_one_shot on the CPU, as PTX: every kind of scale, tails, rings, warp groups; planted faults show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # ptx.py needs it

import own_kernels
import ptx
import ptx_code
from scaled_operands import as_given, problem, run

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import read_launch
from gemmtuned.configs.launch_values import holds
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels import catalog
from gemmtuned.kernels.cuda import nvrtc
from gemmtuned.kernels.cuda import scaled_one_shot as kernel
from gemmtuned.kernels.cuda.scaled_one_shot import ScaledOneShot

pytestmark = pytest.mark.skipif(nvrtc.version() is None, reason="needs NVRTC")
LAST_WARP = {"turns": ptx_code.WARP, "last_first": True}
# m, n, k, rows, parts, tokens, halves, depth (0: as the kernel takes by itself)
SHAPES = [
    (16, 8, 128, 8, 1, 16, 1, 0),
    (1, 40, 384, 16, 3, 16, 1, 0),
    (17, 46, 640, 24, 2, 32, 1, 0),
    (33, 24, 896, 24, 7, 48, 1, 0),
    (64, 40, 512, 40, 4, 64, 1, 0),
    (12, 8, 2048, 8, 16, 16, 1, 0),
    (17, 40, 1408, 16, 1, 32, 1, 4),  # rings
    (64, 36, 1664, 24, 2, 64, 1, 4),
    (150, 40, 1152, 24, 1, 80, 1, 4),  # two groups of tokens
    (100, 24, 768, 24, 3, 48, 1, 0),  # three tiles of tokens
    (20, 70, 640, 48, 2, 32, 2, 0),  # halves
    (60, 36, 1664, 32, 2, 64, 2, 4),
    (70, 40, 512, 16, 2, 80, 2, 0),
    (9, 24, 400, 16, 2, 16, 1, 0),  # K that ends within a step
    (20, 40, 1040, 32, 2, 32, 2, 4),
]
ACROSS = (5, 272, 256, 80, 2, 16, 2, 0)  # tiles that meet two scales of W, in either half
KINDS = [("TENSOR", False), ("ROW", False), ("ROW", True), ("BLOCK", True)]
TWO_PRODUCTS = (23, 80, 400, 40, 2, 32, 1, 0)  # of int8: 32 rows of W and 8
OVER_FP32 = (16, 8, 2816, 8, 2, 16, 1, 4)  # 22 steps, each of 2 million and more


def config(
    m: int, n: int, k: int, rows: int, parts: int, tokens: int, halves: int, depth: int, *, kind: str, promoted: bool,
    bias: bool = True, out: str = "bf16", int8: bool = False, by_token: bool = False, zero: int = 0,
    shuffled: bool = False,
) -> ScaledOneShot:  # fmt: skip
    form = type("OfDepth", (ScaledOneShot,), {"depth": depth}) if depth else ScaledOneShot
    return form(m, n, k, bias, out, kind, promoted, rows, parts, tokens, halves, int8, by_token, zero, shuffled)


def of_int8(shape: tuple[int, ...], kind: str = "ROW", *, bias: bool = True, zero: int = 0) -> ScaledOneShot:
    return config(*shape, kind=kind, promoted=False, bias=bias, int8=True, zero=zero)


def each_shape_once() -> list[Any]:
    """Every shape with every kind in the soak; in a quick run each shape with one kind, and each kind with some."""
    cases = []
    for i, shape in enumerate([*SHAPES, ACROSS]):
        for j, (kind, promoted) in enumerate(KINDS):
            marks = [] if j == (3 if shape == ACROSS else i % 4) else [pytest.mark.soak]
            cases.append(pytest.param(shape, kind, promoted, marks=marks, id=f"{shape}-{kind}-{promoted}"))
    return cases


@pytest.mark.part(6)
@pytest.mark.parametrize(("shape", "kind", "promoted"), each_shape_once())
def test_sums_are_right_and_nothing_else_is_read_or_written(shape: tuple[int, ...], kind: str, promoted: bool) -> None:
    out = ("bf16", "fp16")[sum(shape) % 2]
    one = config(*shape, kind=kind, promoted=promoted, bias=sum(shape) % 3 != 0, out=out)
    y, exact = run(one, kernel.KERNEL)
    assert torch.equal(y, exact), one


def test_every_code_is_the_number_that_torch_takes_it_for() -> None:
    y, exact = run(config(*SHAPES[3], kind="ROW", promoted=False, bias=False, out="fp16"), kernel.KERNEL, codes=True)
    assert torch.equal(y, exact)


@pytest.mark.part(3)
@pytest.mark.parametrize("shape", [*(SHAPES[i] for i in (1, 6, 8, 9, 13)), ACROSS], ids=str)
def test_scales_of_blocks_may_lie_by_token(shape: tuple[int, ...]) -> None:
    y, exact = run(config(*shape, kind="BLOCK", promoted=True, by_token=True), kernel.KERNEL)
    assert torch.equal(y, exact)


@pytest.mark.parametrize(
    "fault", [("* next_token;", ";"), ("next_token = BY_TOKEN ? ldsx : 1", "next_token = 1")], ids=str
)
def test_a_fault_in_scales_by_token_is_seen(fault: tuple[str, str]) -> None:
    one = config(*SHAPES[9], kind="BLOCK", promoted=True, by_token=True)
    with pytest.raises(ptx_code.Wrong):
        y, exact = run(one, kernel.KERNEL, change=fault)
        if not torch.equal(y, exact):
            raise ptx_code.Wrong("far off")


@pytest.mark.part(4)
@pytest.mark.parametrize("shape", [*SHAPES, TWO_PRODUCTS], ids=str)
def test_sums_of_int8_are_right_up_to_its_ends(shape: tuple[int, ...]) -> None:
    y, exact = run(of_int8(shape, ("TENSOR", "ROW")[shape[0] % 2], bias=sum(shape) % 3 != 0), kernel.KERNEL)
    assert torch.equal(y, exact)


def test_sums_of_int8_are_whole_numbers_over_the_cluster() -> None:
    y, exact = run(of_int8(OVER_FP32, bias=False), kernel.KERNEL, huge=True)
    assert torch.equal(y, exact)
    assert y.unique().numel() > 8
    without_last_bit = ("sum.x += one.x, ", "sum.x += one.x & ~1, ")  # as fp32 has them
    y, _ = run(of_int8(OVER_FP32, bias=False), kernel.KERNEL, huge=True, change=without_last_bit)
    assert not torch.equal(y, exact)


@pytest.mark.part(3)
@pytest.mark.parametrize(("zero", "kind"), [(1, "TENSOR"), (1, "W_ROW"), (2, "ROW")])
@pytest.mark.parametrize("shape", [SHAPES[i] for i in (2, 9, 12)], ids=str)
def test_zero_points_are_subtracted_from_whole_sums(shape: tuple[int, ...], zero: int, kind: str) -> None:
    """Of a cluster, of several tiles of tokens, of halves."""
    y, exact = run(of_int8(shape, kind, bias=sum(shape) % 3 != 0, zero=zero), kernel.KERNEL)
    assert torch.equal(y, exact)


ZERO_FAULTS = {
    "a neighbour's sum of W": ("zero * (u32)zero_sums[row + 1]", "zero * (u32)zero_sums[row]"),
    "another tile's tokens": ("  zx += first_token;", ""),
    "no zero point": ("(u32)sum - zero * (u32)zero_sums[row]", "(u32)sum"),
    "one for all tokens": ("(u32)zx[token] : 1", "(u32)zx[0] : 1"),
}


@pytest.mark.part(2)
@pytest.mark.parametrize("fault", ZERO_FAULTS)
def test_a_fault_in_zero_points_is_seen(fault: str) -> None:
    y, exact = run(of_int8(SHAPES[9], zero=2), kernel.KERNEL, change=ZERO_FAULTS[fault])
    assert not torch.equal(y, exact)


def test_a_fault_in_the_one_scale_of_x_beside_those_of_w_is_seen() -> None:
    one = of_int8(SHAPES[9], "W_ROW", zero=1)
    y, exact = run(one, kernel.KERNEL, change=("second * sw[row + 1] * sx[0]", "second * sw[row] * sx[0]"))
    assert not torch.equal(y, exact)


# N a multiple of 16, K one of 32; tiles that begin within one of AITER's, and end past the last row
SHUFFLED = [
    (17, 48, 640, 24, 2, 32, 1, 0),
    (33, 32, 896, 40, 7, 48, 1, 0),
    (150, 48, 1152, 24, 1, 80, 1, 4),  # two groups of tokens, a ring
    (60, 64, 1664, 48, 2, 64, 2, 4),
    (20, 16, 1056, 32, 2, 32, 2, 4),  # K that ends within a step
    (9, 80, 416, 40, 2, 16, 1, 0),  # of int8 two products
]


@pytest.mark.part(3)
@pytest.mark.parametrize(("kind", "int8"), [("ROW", False), ("TENSOR", True), ("BLOCK", False)])
@pytest.mark.parametrize("shape", SHUFFLED, ids=str)
def test_a_weight_in_aiters_order_is_read_as_it_lies(shape: tuple[int, ...], kind: str, int8: bool) -> None:
    one = config(*shape, kind=kind, promoted=not int8, bias=shape[0] % 2 > 0, int8=int8, shuffled=True)
    y, exact = run(one, kernel.KERNEL)
    assert torch.equal(y, exact)


SHUFFLED_FAULTS = {
    "another run of a tile": (0, "my.w_chunk * 256 +", "(my.w_chunk ^ 1) * 256 +"),
    "the step of a plain weight": (0, "SHUFFLED ? 16 * 128 : 128", "128"),
    "another row of a tile": (0, "in_w % 16 * 16", "(in_w + 1) % 16 * 16"),
    "a tile of W that begins with one of AITER's": (0, "in_w = tile * ROWS + row", "in_w = tile * 16 + row"),
    "the tail of W is dropped": (4, "my.w_chunk * 16 < TAIL", "my.w_chunk * 16 < TAIL - 16"),
    "the tail of W is read": (4, "my.w_chunk * 16 < TAIL ? 16 : 0", "true ? 16 : 16"),
    "rows of eight too far apart": (0, "8ull << 32", "16ull << 32"),
    "the next 16 bytes of K too near": (1, "(u64)ROWS << 16", "(u64)(ROWS - 8) << 16"),
    "the next 32 of K too near": (1, "2 * ROWS : 2", "ROWS : 2"),
    "both halves the same rows": (3, "half * MINE * W_ROW_BYTES", "0"),
    "as if it were plain": (0, "#define SHUFFLED 1", "#define SHUFFLED 0"),
}


@pytest.mark.part(4)
@pytest.mark.parametrize("fault", SHUFFLED_FAULTS)
def test_a_fault_in_aiters_order_is_seen(fault: str) -> None:
    shape, what, instead = SHUFFLED_FAULTS[fault]
    with pytest.raises(ptx_code.Wrong):
        y, exact = run(config(*SHUFFLED[shape], kind="ROW", promoted=True, shuffled=True), kernel.KERNEL,
                       change=(what, instead))  # fmt: skip
        if not torch.equal(y, exact):
            raise ptx_code.Wrong("far off")


@pytest.mark.soak
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[6], SHAPES[8], SHAPES[11], TWO_PRODUCTS], ids=str)
def test_warps_of_int8_may_run_ahead(shape: tuple[int, ...]) -> None:
    for turns in ({"turns": ptx_code.WARP}, LAST_WARP):
        y, exact = run(of_int8(shape), kernel.KERNEL, **turns)
        assert torch.equal(y, exact)


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "promoted"), [KINDS[1], KINDS[3]])
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[6], SHAPES[8], SHAPES[11]], ids=str)
def test_warps_may_run_ahead(shape: tuple[int, ...], kind: str, promoted: bool) -> None:
    for turns in ({"turns": ptx_code.WARP}, LAST_WARP):
        y, exact = run(config(*shape, kind=kind, promoted=promoted), kernel.KERNEL, **turns)
        assert torch.equal(y, exact)


PLAIN, RING, TAIL, HALVES = SHAPES[2], SHAPES[6], SHAPES[13], SHAPES[11]
FAULTS = {
    "the tail of K is read": (TAIL, "my.chunk * 16 < TAIL ? 16 : 0", "true ? 16 : 16"),
    "the tail of K is dropped": (TAIL, "my.chunk * 16 < TAIL", "my.chunk * 16 < TAIL - 16"),
    "the tail of W is read": (TAIL, "my.w_chunk * 16 < TAIL ? 16 : 0", "true ? 16 : 16"),
    "the tail of W is dropped": (TAIL, "my.w_chunk * 16 < TAIL", "my.w_chunk * 16 < TAIL - 16"),
    "a scale of the step before": (PLAIN, "add(before, before_at)", "add(before, slot)"),
    "one scale for all tokens": (PLAIN, "low = scale[my_token % TOKENS]", "low = scale[0]"),
    "the first scale of W for all rows": (ACROSS, "second = scale[TOKENS + 1]", "second = scale[TOKENS]"),
    "the next scale of W too early": (ACROSS, "i < edge ? low", "i < edge - 1 ? low"),
    "the halves' edge is one": (ACROSS, "/ 8 - half * (MINE / 8);", "/ 8;"),
    "scales of W not waited for": (PLAIN, "wait_for(loaded + 8 * slot, phase);\n      multiply(now", "multiply(now"),
    "the last step is not added": (PLAIN, "      add(one, before_at);", "      ;"),
    "sums of the step before stay": (PLAIN, "w_mine + slot * W_BYTES, true)", "w_mine + slot * W_BYTES, false)"),
    "both halves the same rows": (HALVES, "w_mine = ws + half * MINE * W_ROW_BYTES", "w_mine = ws"),
    "added before it is there": (RING, "wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 2;"),
    "scales of tokens past the last": ((5, 24, 512, 24, 2, 64, 1, 0), "min(thread, m - 1)", "thread"),
}  # fmt: skip


@pytest.mark.part(5)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    shape, what, instead = FAULTS[fault]
    one = config(*shape, kind="BLOCK", promoted=True)
    with pytest.raises(ptx_code.Wrong):
        y, exact = run(one, kernel.KERNEL, change=(what, instead))
        if not torch.equal(y, exact):
            raise ptx_code.Wrong("far off")


ROW_FAULTS = {
    "a neighbour's scale": ("second * sw[row + 1]", "second * sw[row]"),
    "another tile's tokens": ("0 : (long long)first_token * next_token;", "0 : 0;"),
    "before the bias": ("first * sw[row] * sx[token]", "first * sw[row]"),
}


@pytest.mark.part(2)
@pytest.mark.parametrize("fault", ROW_FAULTS)
def test_a_fault_in_scales_of_rows_is_seen(fault: str) -> None:
    one = config(*SHAPES[9], kind="ROW", promoted=False)
    y, exact = run(one, kernel.KERNEL, change=ROW_FAULTS[fault])
    assert not torch.equal(y, exact)


INT8_FAULTS = {
    "the tail of K is read": (TAIL, "my.chunk * 16 < TAIL ? 16 : 0", "true ? 16 : 16"),
    "the tail of K is dropped": (TAIL, "my.chunk * 16 < TAIL", "my.chunk * 16 < TAIL - 16"),
    "operands not waited for": (PLAIN, "wait_for(loaded + 8 * slot, phase);\n      multiply(sums", "multiply(sums"),
    "a product not waited for": (PLAIN, "wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;"),
    "written over before it is read": (RING, "free = DEPTH - 2;", "free = DEPTH - 1;"),
    "both halves the same rows": (HALVES, "w_mine = ws + half * MINE * W_ROW_BYTES", "w_mine = ws"),
    "the second product of the first rows": (TWO_PRODUCTS, '"l"(b + 256)', '"l"(b)'),
    "sums are not brought over to fp32": (PLAIN, "first = (float)sum", "first = __int_as_float(sum)"),
}


@pytest.mark.part(2)
@pytest.mark.parametrize("fault", INT8_FAULTS)
def test_a_fault_in_products_of_int8_is_seen(fault: str) -> None:
    shape, what, instead = INT8_FAULTS[fault]
    with pytest.raises(ptx_code.Wrong):
        y, exact = run(of_int8(shape), kernel.KERNEL, change=(what, instead))
        if not torch.equal(y, exact):
            raise ptx_code.Wrong("far off")


OFFERED = [
    {},
    {"dtype": "i8"},
    {"dtype": "i8", "scale": "row+zero"},
    {"math_mode": "ieee"},
    {"scale": "1x128", "scale_layout": "col"},
    {"weight_state": "shuffled"},
]


@pytest.mark.part(3)
@pytest.mark.parametrize("kind", OFFERED, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(9, 2112, 7168), (64, 576, 7168), (256, 4096, 512)], ids=str)
def test_what_is_offered_compiles_without_spills(m: int, n: int, k: int, kind: dict[str, str]) -> None:
    asked = problem(m, n, k, **kind)
    best = kernel.scored(asked, 132)

    assert len(best) >= 4
    assert best[0][0] == min(us for us, _ in best)
    assert not nvrtc.compiled(kernel.scaled_one_shot(best[0][1], asked).source(), kernel.KERNEL.target).spill_bytes


def test_many_sums_of_int8_spill_nothing() -> None:
    asked = problem(64, 7168, 16384, dtype="i8")
    config = {"rows": kernel.MAX_INT8, "parts": 4, "tokens": 64, "halves": 1}
    assert not nvrtc.compiled(kernel.scaled_one_shot(config, asked).source(), kernel.KERNEL.target).spill_bytes
    with pytest.raises(CandidateFailed, match="does not fit"):
        kernel.scaled_one_shot(config | {"rows": kernel.MAX_INT8 + 8}, asked)


@pytest.mark.part(2)
@pytest.mark.parametrize("kind", OFFERED, ids=str)
def test_products_of_a_step_are_under_way_while_the_one_before_is_added(kind: dict[str, str], tmp_path: Path) -> None:
    asked = problem(1, 2112, 7168, **kind)
    one = kernel.scaled_one_shot({"rows": 72, "parts": 4, "tokens": 16, "halves": 1}, asked)
    text = ptx.disassembled(nvrtc.compiled(one.source(), kernel.KERNEL.target).data, tmp_path)

    # where the compiler cannot tell sums apart it waits after each product, and says so nowhere else
    of_a_step = 4 * len(one.at_once)
    assert text.count("IGMMA" if one.int8 else "QGMMA") == of_a_step * text.count("WARPGROUP.ARRIVE") > 0
    assert "WARPGROUP.DEPBAR.LE gsb0, 0x1" in text


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "fp8_e5m2"}, {"out_dtype": "fp32"}, {"layout": "nn"}, {"weight_state": "packed"},
        {"weight_state": "shuffled", "n": 40}, {"weight_state": "shuffled", "k": 528},
        {"scale": "1x32"}, {"scale": "row", "wscale": "tensor"}, {"scale": "1x128", "wscale": "1x128"},
        {"scale": "1x128", "scale_layout": "other"}, {"scale": "1x128", "wscale_layout": "col"},
        {"m": 257}, {"k": 520}, {"n": 63}, {"batch": 2}, {"dtype": "i8", "scale": "1x128", "scale_layout": "col"},
        {"dtype": "i8", "k": 1 << 17}, {"scale": "row+zero"}, {"dtype": "i8", "scale": "row+zero", "wscale": "tensor"},
        {"dtype": "i8", "scale": "tensor+zero", "k": 65552},
    ],
    ids=str,
)  # fmt: skip
def test_what_it_is_not_written_for_is_refused(other: dict[str, Any]) -> None:
    asked = problem(**{"m": 8, "n": 64, "k": 512, **other})

    assert kernel.scored(asked, 132) == []
    with pytest.raises(CandidateFailed, match="scaled_one_shot"):
        kernel.scaled_one_shot({"rows": 8, "parts": 1, "tokens": 16, "halves": 1}, asked)


@pytest.mark.parametrize(
    "config",
    [{"rows": 12}, {"parts": 17}, {"tokens": 8}, {"halves": 3}, {"rows": 264}, {"rows": 200, "halves": 2}],
    ids=str,
)
def test_a_config_that_is_none_is_refused(config: dict[str, int]) -> None:
    values = {"rows": 16, "parts": 2, "tokens": 16, "halves": 1} | config
    with pytest.raises(CandidateFailed, match="scaled_one_shot"):
        kernel.scaled_one_shot(values, problem(8, 4096, 7168, math_mode="ieee"))


@pytest.mark.parametrize("kind", KINDS)
def test_its_launch_is_a_record_that_refuses_scales_of_another_kind(kind: tuple[str, bool]) -> None:
    one = config(17, 320, 640, 16, 2, 32, 1, 0, kind=kind[0], promoted=kind[1])
    text = replace(one.launch, binary="0" * 64, name=kernel.NAME).text()
    assert read_launch(text).text() == text
    x, w = (torch.zeros(rows, 640).to(torch.float8_e4m3fn) for rows in (17, 320))
    plain = {"x": x, "w": w, "bias": torch.zeros(320).bfloat16()}
    given = {
        name: as_given(config(17, 320, 640, 16, 2, 32, 1, 0, kind=name, promoted=True), *scales_of(name))
        for name in ("TENSOR", "ROW", "BLOCK")
    }
    for name, both in given.items():
        assert holds(one.launch.checked, plain | both) == (name == kind[0]), name
    if kind[0] != "TENSOR":
        turned = {name: t.mT.contiguous().mT if kind[0] == "BLOCK" else t.mT for name, t in given[kind[0]].items()}
        turned["scale_x"] = turned["scale_x"].contiguous()  # the steps of one token side by side
        assert not holds(one.launch.checked, plain | turned)


def scales_of(kind: str) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return {
        "TENSOR": (torch.ones(1), torch.ones(1), 0, 0), "ROW": (torch.ones(17), torch.ones(320), 0, 0),
        "BLOCK": (torch.ones(5 * 17), torch.ones(3 * 8), 17, 8),
    }[kind]  # fmt: skip


def test_it_is_offered_for_scaled_products_of_its_architecture_alone() -> None:
    here = own_kernels.device("sm_90")
    for scale, lies in (("tensor", "row"), ("row", "row"), ("1x128", "col"), ("1x128", "row")):
        asked = problem(16, 4096, 7168, scale=scale, scale_layout=lies)
        found = catalog.candidates(asked, here)
        assert sum(c.kernel == kernel.NAME for c in found["cuda"]) >= 8
        assert all(catalog.record_of(c, asked)[1].launch.check_for(asked) is None for c in found["cuda"])
        assert not any(catalog.candidates(asked, own_kernels.device("sm_80")).values())
    for m, is_offered in ((8, False), (9, True), (256, True), (257, False)):
        found = catalog.candidates(problem(m, 4096, 7168, dtype="i8"), here)
        assert any(c.kernel == kernel.NAME for c in found["cuda"]) == is_offered
    assert not any(c.kernel == kernel.NAME for c in catalog.candidates(Problem(m=16, n=4096, k=7168), here)["cuda"])
    assert not catalog.candidates(problem(16, 4096, 7168, scale="row", threads=2), here)["cuda"]


@pytest.mark.parametrize(
    ("n", "k", "kind"),
    [
        (57344, 8192, {"scale": "row", "math_mode": "ieee"}),
        (28672, 4096, {"scale": "row", "math_mode": "ieee"}),
        (24576, 1536, {"scale": "1x128", "scale_layout": "col"}),
    ],
    ids=str,
)
def test_a_weight_with_more_rows_than_fit_at_once_takes_turns(n: int, k: int, kind: dict[str, Any]) -> None:
    asked = problem(16, n, k, **kind)
    found = [kernel.scaled_one_shot(values, asked) for _, values in kernel.scored(asked, 132)]
    assert len(found) >= 4
    assert all(132 < one.grid[0] <= kernel.MOST_TURNS * 132 for one in found)
    assert all(one.grid[0] * one.rows >= n * one.parts for one in found)
