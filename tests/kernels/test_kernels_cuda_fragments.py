"""scaled_fragments on the CPU, as PTX: every kind of scale, tails, clusters, warps; planted faults show."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # ptx.py needs it

import own_kernels
import ptx_code
from ptx_warps import Warps
from scaled_operands import problem, run

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import read_launch
from gemmtuned.kernels import catalog
from gemmtuned.kernels.cuda import nvrtc
from gemmtuned.kernels.cuda import scaled_fragments as kernel
from gemmtuned.kernels.cuda.scaled_fragments import ScaledFragments

pytestmark = pytest.mark.skipif(nvrtc.version() is None, reason="needs NVRTC")
# m, n, k, rows, tokens, parts, warps, ahead
SHAPES = [
    (1, 8, 128, 8, 4, 1, 1, 1),
    (4, 40, 1024, 8, 4, 2, 2, 2),
    (3, 37, 896, 8, 4, 1, 4, 2),  # rows past the last, warps with one step less
    (7, 48, 2176, 16, 8, 4, 2, 4),
    (16, 72, 1536, 32, 16, 3, 2, 2),
    (13, 40, 784, 8, 16, 5, 1, 3),  # K that ends within a step
    (2, 24, 400, 16, 4, 1, 2, 2),
    (9, 16, 2064, 8, 12, 8, 2, 2),
]
KINDS = ("TENSOR", "ROW", "BLOCK")


def config(
    m: int, n: int, k: int, rows: int, tokens: int, parts: int, warps: int, ahead: int, *, kind: str, bias: bool = True,
    out: str = "bf16", int8: bool = False, by_token: bool = False, zero: int = 0, shuffled: bool = False,
) -> ScaledFragments:  # fmt: skip
    more = (int8, by_token, zero, shuffled)
    return ScaledFragments(m, n, k, bias, out, kind, rows, tokens, parts, warps, ahead, 1, *more)


def is_right(one: ScaledFragments, **how: Any) -> bool:
    y, exact = run(one, kernel.KERNEL, kind=Warps, **how)
    return torch.equal(y, exact)


@pytest.mark.part(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_right_and_nothing_else_is_read_or_written(shape: tuple[int, ...], kind: str) -> None:
    out = ("bf16", "fp16")[sum(shape) % 2]
    assert is_right(config(*shape, kind=kind, bias=sum(shape) % 3 != 0, out=out))


def test_every_code_is_the_number_that_torch_takes_it_for() -> None:
    """The kernel turns codes of e4m3 into fp16 itself."""
    one = config(*SHAPES[4], kind="ROW", bias=False, out="fp16")
    assert is_right(one, codes=True)
    assert not is_right(one, codes=True, change=("cvt.rn.f16x2.e4m3x2 %1, high", "cvt.rn.f16x2.e4m3x2 %1, low"))


@pytest.mark.part(2)
@pytest.mark.parametrize("shape", [SHAPES[i] for i in (0, 2, 5, 7)], ids=str)
def test_sums_of_int8_are_right_up_to_its_ends(shape: tuple[int, ...]) -> None:
    assert is_right(config(*shape, kind=("TENSOR", "ROW")[shape[0] % 2], bias=shape[0] > 1, int8=True))


@pytest.mark.part(5)
@pytest.mark.parametrize(("zero", "kind"), [(1, "TENSOR"), (1, "W_ROW"), (2, "ROW")])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[5]], ids=str)
def test_zero_points_are_subtracted_from_whole_sums(shape: tuple[int, ...], zero: int, kind: str) -> None:
    """Over clusters and their warps; of rows past the last one, too, nothing is read."""
    assert is_right(config(*shape, kind=kind, bias=shape[0] > 1, int8=True, zero=zero))


# N a multiple of 16, K one of 32
SHUFFLED = [
    (1, 16, 128, 8, 4, 1, 1, 1),
    (4, 48, 1024, 32, 4, 2, 2, 2),  # rows past the last
    (7, 48, 2176, 16, 8, 4, 2, 4),
    (13, 32, 800, 8, 16, 5, 1, 3),  # K that ends within a step
    (3, 16, 928, 8, 4, 1, 4, 2),
]


@pytest.mark.part(6)
@pytest.mark.parametrize(("kind", "int8"), [("ROW", False), ("TENSOR", True), ("BLOCK", False)])
@pytest.mark.parametrize("shape", SHUFFLED, ids=str)
def test_a_weight_in_aiters_order_is_read_as_it_lies(shape: tuple[int, ...], kind: str, int8: bool) -> None:
    assert is_right(config(*shape, kind=kind, bias=shape[0] > 1, int8=int8, shuffled=True))


SHUFFLED_FAULTS = {
    "the other half of a tile": ("t % 2 * 256", "(t % 2 ^ 1) * 256"),
    "tiles in the order of K": ("i * WARPS * 2048", "i * WARPS * 512"),
    "another row of a tile": ("row % 16 * 16", "(row + 1) % 16 * 16"),
    "a row of tiles too few": ("(u64)(row / 16)", "(u64)(row / 32)"),
    "the part of the others": ("i % 2 * 1024", "(i + 1) % 2 * 1024"),
    "a part dropped": ("all[0] + all[3]", "all[0]"),
    "as if it were plain": ("#define SHUFFLED 1", "#define SHUFFLED 0"),
}


@pytest.mark.part(3)
@pytest.mark.parametrize("fault", SHUFFLED_FAULTS)
def test_a_fault_in_aiters_order_is_seen(fault: str) -> None:
    with pytest.raises(ptx_code.Wrong):
        if not is_right(config(*SHUFFLED[2], kind="ROW", shuffled=True), change=SHUFFLED_FAULTS[fault]):
            raise ptx_code.Wrong("far off")


@pytest.mark.parametrize("part", ["t * 16 < TAIL", "64 + t * 16 < TAIL"])
def test_a_tail_of_either_part_is_seen(part: str) -> None:
    for shape, k in ((SHUFFLED[3], 800), (SHUFFLED[3], 864)):
        one = config(*shape[:2], k, *shape[3:], kind="ROW", shuffled=True)
        assert is_right(one)
        if part.startswith("64") == (k == 864):
            with pytest.raises(ptx_code.Wrong):
                if not is_right(one, change=(part, part.replace("TAIL", "TAIL - 16"))):
                    raise ptx_code.Wrong("far off")


@pytest.mark.part(3)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_scales_of_blocks_may_lie_by_token(shape: tuple[int, ...]) -> None:
    assert is_right(config(*shape, kind="BLOCK", by_token=True))


@pytest.mark.parametrize("fault", [("(BY_TOKEN ? ldsx : 1)", "1"), ("BY_TOKEN ? 1 : ldsx", "ldsx")], ids=str)
def test_a_fault_in_scales_by_token_is_seen(fault: tuple[str, str]) -> None:
    with pytest.raises(ptx_code.Wrong):
        if not is_right(config(*SHAPES[3], kind="BLOCK", by_token=True), change=fault):
            raise ptx_code.Wrong("far off")


def test_tiles_of_more_than_one_block_of_scales_take_their_own() -> None:
    assert is_right(config(2, 264, 256, 32, 4, 1, 2, 1, kind="BLOCK"))


@pytest.mark.long
@pytest.mark.part(2)
@pytest.mark.parametrize("turns", [{"turns": ptx_code.WARP}, {"turns": ptx_code.WARP, "last_first": True}], ids=str)
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[3]], ids=str)
def test_warps_may_run_ahead(shape: tuple[int, ...], turns: dict[str, Any]) -> None:
    assert is_right(config(*shape, kind="BLOCK"), **turns)


FAULTS = {
    "the tail of K is read": (SHAPES[5], "i != my.last || my.in_tail", "true"),
    "the tail of K is dropped": (SHAPES[5], "byte < TAIL", "byte < TAIL - 16"),
    "a warp's last step is dropped": (SHAPES[2], "base + u < my.many) grow", "base + u < my.many - 1) grow"),
    "one scale for all tokens": (SHAPES[3], "my.token[side], mine)", "my.token[0], mine)"),
    "the scale of the step before": (SHAPES[1], "my.sw + i * WARPS, mine", "my.sw + i, mine"),
    "the first scale of W for all rows": ((2, 264, 256, 32, 4, 1, 2, 1), "tile * ROWS / 128) * ldsw", "0) * ldsw"),
    "a part of K for both": (SHAPES[1], "second ? even : odd, 4", "second ? even : odd, 8"),
    "rows past the last": (SHAPES[2], "N % ROWS == 0 ? row : min(row, N - 1)", "row"),
    "tokens past the last": (SHAPES[2], "min(i * 4 + g / 2, m - 1)", "i * 4 + g / 2"),
    "warps are not waited for": (SHAPES[3], "  __syncthreads();", ""),
    "a cluster is not waited for": (SHAPES[3], "barrier.cluster.wait.aligned;", ""),
    "a part is left out": (SHAPES[3], "for (int p = 0; p < PARTS; p++) sum", "for (int p = 0; p < PARTS - 1; p++) sum"),
    "the bias is scaled": ((7, 48, 2176, 16, 8, 4, 2, 4), "  sum += f.bias;", "  sum += f.bias * 2;"),
}  # fmt: skip


@pytest.mark.part(5)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    shape, what, instead = FAULTS[fault]
    with pytest.raises(ptx_code.Wrong):
        if not is_right(config(*shape, kind="BLOCK"), change=(what, instead), turns=ptx_code.WARP):
            raise ptx_code.Wrong("far off")


ROW_FAULTS = {
    "a neighbour's scale of W": ("f.sw = sw[row]", "f.sw = sw[max(row - 1, 0)]"),
    "the first token's scale": ("f.sx = sx[token]", "f.sx = sx[0]"),
    "no scale of X": ("(float)whole * f.sw * f.sx", "(float)whole * f.sw"),
}


@pytest.mark.part(2)
@pytest.mark.parametrize("fault", ROW_FAULTS)
def test_a_fault_in_scales_of_rows_is_seen(fault: str) -> None:
    assert not is_right(config(*SHAPES[3], kind="ROW"), change=ROW_FAULTS[fault])


INT8_FAULTS = {
    "the tail of K is dropped": ("byte < TAIL", "byte < TAIL - 16"),
    "half of a load is dropped": ("i += 2)\n          multiply(sums", "i += 4)\n          multiply(sums"),
    "sums are not brought over to fp32": ("(float)whole", "__int_as_float(whole)"),
    "a part in fp32 as bits": ("return (u32)sum;", "return __float_as_uint((float)sum);"),
}


@pytest.mark.part(2)
@pytest.mark.parametrize("fault", INT8_FAULTS)
def test_a_fault_in_products_of_int8_is_seen(fault: str) -> None:
    with pytest.raises(ptx_code.Wrong):
        if not is_right(config(*SHAPES[5], kind="ROW", int8=True), change=INT8_FAULTS[fault], turns=ptx_code.WARP):
            raise ptx_code.Wrong("far off")


ZERO_FAULTS = {
    "a neighbour's sum of W": ("f.less = (u32)zero_sums[row];", "f.less = (u32)zero_sums[max(row - 1, 0)];"),
    "the first token's zero point": ("(u32)zx[token]", "(u32)zx[0]"),
    "no zero point": ("(u32)whole - f.less", "(u32)whole"),
    "after the scales": ("(float)whole * f.sw * f.sx;", "(float)whole * f.sw * f.sx - (float)(int)f.less;"),
    "the zero point added": ("(u32)whole - f.less", "(u32)whole + f.less"),
}


@pytest.mark.part(3)
@pytest.mark.parametrize("fault", ZERO_FAULTS)
def test_a_fault_in_zero_points_is_seen(fault: str) -> None:
    assert not is_right(config(*SHAPES[5], kind="ROW", int8=True, zero=2), change=ZERO_FAULTS[fault])


KEYS = [
    {},
    {"dtype": "i8"},
    {"dtype": "i8", "scale": "row+zero"},
    {"dtype": "i8", "scale": "tensor+zero", "wscale": "row"},
    {"math_mode": "ieee"},
    {"scale": "1x128", "scale_layout": "col"},
    {"scale": "tensor"},
    {"scale": "1x128"},
]


@pytest.mark.part(8)
@pytest.mark.parametrize("kind", KEYS, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 2112, 7168), (8, 576, 7168), (16, 24576, 1536)], ids=str)
def test_what_is_offered_compiles(m: int, n: int, k: int, kind: dict[str, str]) -> None:
    asked = problem(m, n, k, **kind)
    best = kernel.scored(asked, 132)

    assert len(best) >= 8
    assert best[0][0] == min(us for us, _ in best)
    sources = (kernel.scaled_fragments(values, asked).source() for _, values in best[:6])
    whole = (source for source in sources if not nvrtc.compiled(source, kernel.KERNEL.target).spill_bytes)
    assert len([*islice(whole, 3)]) == 3, "of the best six three spill nothing"


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "fp8_e5m2"}, {"out_dtype": "fp32"}, {"layout": "nn"}, {"weight_state": "packed"},
        {"weight_state": "shuffled", "n": 40}, {"weight_state": "shuffled", "k": 528},
        {"scale": "1x32"}, {"scale": "row", "wscale": "tensor"}, {"m": 17}, {"k": 520}, {"batch": 2},
        {"dtype": "i8", "scale": "1x128"}, {"dtype": "i8", "k": 1 << 17}, {"scale": "row+zero"},
        {"dtype": "i8", "scale": "row+zero", "wscale": "tensor"}, {"dtype": "i8", "scale": "row+zero", "k": 65552},
    ],
    ids=str,
)  # fmt: skip
def test_what_it_is_not_written_for_is_refused(other: dict[str, Any]) -> None:
    asked = problem(**{"m": 8, "n": 64, "k": 512, **other})

    assert kernel.scored(asked, 132) == []
    with pytest.raises(CandidateFailed, match="scaled_fragments"):
        kernel.scaled_fragments({"rows": 8, "tokens": 8, "parts": 1, "warps": 1, "ahead": 2, "resident": 1}, asked)


@pytest.mark.parametrize(
    "other", [{"rows": 24}, {"tokens": 4}, {"parts": 9}, {"warps": 3}, {"warps": 8, "parts": 8}, {"ahead": 0}], ids=str
)
def test_a_config_that_is_none_is_refused(other: dict[str, int]) -> None:
    values = {"rows": 16, "tokens": 8, "parts": 2, "warps": 2, "ahead": 2, "resident": 1} | other
    with pytest.raises(CandidateFailed, match="scaled_fragments"):
        kernel.scaled_fragments(values, problem(8, 4096, 7000 // 16 * 16 if "parts" not in other else 2048))


def test_its_launch_is_a_record() -> None:
    text = replace(config(*SHAPES[3], kind="BLOCK").launch, binary="0" * 64, name=kernel.NAME).text()
    assert read_launch(text).text() == text


def test_it_gets_places_for_few_tokens_alone() -> None:
    for m, is_there in ((1, True), (16, True), (17, False)):
        asked = problem(m, 4096, 7168)
        found = catalog.candidates(asked, own_kernels.device("sm_90"))["cuda"]
        assert ("scaled_fragments" in {c.kernel for c in found}) == is_there
        assert all(catalog.record_of(c, asked)[1].launch.check_for(asked) is None for c in found)
