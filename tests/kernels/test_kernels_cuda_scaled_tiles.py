"""scaled_tiles on the CPU, as PTX: tiles, shares, parts of K, every kind of scale, tails; planted faults show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # ptx.py needs it

import own_kernels
import ptx_code
from scaled_operands import as_given, problem
from scaled_tiles_cases import (
    ACROSS,
    ALL,
    GROUPS,
    HALVES,
    ONE_STEP,
    PARTS,
    QUARTERS,
    SHARED,
    SHARED_W,
    SHARED_X,
    THREE_PARTS,
    TOO_MANY,
    TOO_MANY_PARTS,
    TURNS,
    config,
    of_int8,
    run,
)

from gemmtuned.configs import launch_values
from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import read_launch
from gemmtuned.configs.launch_values import holds
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tensor_maps import byte_matrix
from gemmtuned.kernels import catalog
from gemmtuned.kernels.cuda import nvrtc
from gemmtuned.kernels.cuda import scaled_tiles as kernel

pytestmark = pytest.mark.skipif(nvrtc.version() is None, reason="needs NVRTC")
LAST_WARP = {"turns": ptx_code.WARP, "last_first": True}
SHAPES = [
    ONE_STEP, TURNS, QUARTERS, GROUPS, HALVES, SHARED_W, SHARED_X, SHARED, PARTS, THREE_PARTS, ALL, TOO_MANY,
    TOO_MANY_PARTS,
]  # fmt: skip
KINDS = [("TENSOR", False), ("ROW", False), ("ROW", True), ("BLOCK", True)]


def each_shape_once() -> list[Any]:
    """Every shape with every kind in a long run; in a quick one each shape with one kind, and each kind with some."""
    cases = []
    for i, shape in enumerate([*SHAPES, ACROSS]):
        for j, (kind, promoted) in enumerate(KINDS):
            marks = [] if j == (3 if shape == ACROSS else i % 4) else [pytest.mark.long]
            cases.append(pytest.param(shape, kind, promoted, marks=marks, id=f"{shape}-{kind}-{promoted}"))
    return cases


@pytest.mark.parametrize(("shape", "kind", "promoted"), each_shape_once())
def test_sums_are_right_and_nothing_else_is_read_or_written(shape: tuple[int, ...], kind: str, promoted: bool) -> None:
    out = ("bf16", "fp16")[sum(shape) % 2]
    one = config(*shape, kind=kind, promoted=promoted, bias=sum(shape) % 3 != 0, out=out)
    y, exact = run(one)
    assert torch.equal(y, exact), one


@pytest.mark.long
@pytest.mark.parametrize("shape", [TURNS, GROUPS, HALVES, SHARED, PARTS, ALL], ids=str)
def test_as_many_steps_may_be_on_their_way_as_fit(shape: tuple[int, ...]) -> None:
    one = config(*shape, kind="BLOCK", promoted=True, depth=0)
    assert one.depth == 8
    y, exact = run(one)
    assert torch.equal(y, exact)


def test_every_code_is_the_number_that_torch_takes_it_for() -> None:
    y, exact = run(config(*TURNS, kind="ROW", promoted=False, bias=False, out="fp16"), codes=True)
    assert torch.equal(y, exact)


@pytest.mark.parametrize(
    "shape",
    [TURNS, SHARED, *(pytest.param(shape, marks=pytest.mark.long) for shape in (GROUPS, ACROSS))],
    ids=str,
)
def test_scales_of_blocks_may_lie_by_token(shape: tuple[int, ...]) -> None:
    y, exact = run(config(*shape, kind="BLOCK", promoted=True, by_token=True))
    assert torch.equal(y, exact)


QUICK_OF_INT8 = [HALVES, SHARED_X, THREE_PARTS]


@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=[] if s in QUICK_OF_INT8 else [pytest.mark.long], id=str(s)) for s in SHAPES]
)
def test_sums_of_int8_are_right_up_to_its_ends(shape: tuple[int, ...]) -> None:
    y, exact = run(of_int8(shape, ("TENSOR", "ROW")[shape[0] % 4 // 2], bias=sum(shape) % 3 != 0))
    assert torch.equal(y, exact)


def test_sums_of_int8_are_whole_numbers_over_the_cluster() -> None:
    one = of_int8((16, 8, 2816, 8, 64, 1, 1, 1, 2, 1), bias=False)  # 22 steps, each of 2 million and more
    y, exact = run(one, huge=True)
    assert torch.equal(y, exact)
    assert y.unique().numel() > 4
    y, _ = run(one, ("sum.x += one.x, ", "sum.x += one.x & ~1, "), huge=True)  # as fp32 has them
    assert not torch.equal(y, exact)


@pytest.mark.parametrize(
    ("shape", "zero", "kind"),
    [
        (QUARTERS, 2, "ROW"), (ALL, 1, "W_ROW"),
        *(pytest.param(shape, zero, kind, marks=pytest.mark.long)
          for shape, zero, kind in ((TURNS, 1, "TENSOR"), (HALVES, 2, "ROW"), (PARTS, 1, "TENSOR"))),
    ],
    ids=str,
)  # fmt: skip
def test_zero_points_are_subtracted_from_whole_sums(shape: tuple[int, ...], zero: int, kind: str) -> None:
    y, exact = run(of_int8(shape, kind, zero=zero))
    assert torch.equal(y, exact)


@pytest.mark.parametrize("turns", [LAST_WARP, pytest.param({"turns": ptx_code.WARP}, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=pytest.mark.long) if s != THREE_PARTS else s for s in SHAPES], ids=str
)
def test_results_are_the_same_bits_whichever_warp_runs_ahead(shape: tuple[int, ...], turns: dict[str, Any]) -> None:
    one = config(*shape, kind="ROW", promoted=True, bias=False, out="fp16")
    y, _ = run(one, rounded=True)
    again, exact = run(one, rounded=True, **turns)
    assert torch.equal(y, again)
    assert torch.equal(y, exact) == (one.k == 128), "a step is not rounded before it is added, the others are"


def test_another_order_of_parts_would_be_other_bits() -> None:
    one = config(*THREE_PARTS, kind="ROW", promoted=True, bias=False, out="fp16")
    y, _ = run(one, rounded=True)
    other, _ = run(one, ("sums[(p * EACH + i)", "sums[((PARTS - 1 - p) * EACH + i)"), rounded=True)
    assert not torch.equal(y, other)


OFFERED = [
    {}, {"dtype": "i8", "bias": True}, {"dtype": "i8", "scale": "row+zero"}, {"math_mode": "ieee", "out_dtype": "fp16"},
    {"scale": "1x128", "scale_layout": "col"}, {"scale": "1x128", "scale_layout": "row", "bias": True},
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param(kind, size, marks=[] if (i + j) % 4 == 0 else [pytest.mark.long], id=f"{kind}-{size}")
        for i, kind in enumerate(OFFERED)
        for j, size in enumerate([(33, 576, 7168), (64, 2110, 7168), (256, 4096, 512), (2048, 7168, 4096)])
    ],
)
def test_what_is_offered_compiles_without_spills(kind: dict[str, str], size: tuple[int, int, int]) -> None:
    asked = problem(*size, **kind)
    best = kernel.scored(asked, 132)

    assert [us for us, _ in best] == sorted(us for us, _ in best)
    assert len(best) >= 12
    assert not nvrtc.compiled(kernel.scaled_tiles(best[0][1], asked).source(), kernel.KERNEL.target).spill_bytes


@pytest.mark.parametrize("kind", OFFERED, ids=str)
@pytest.mark.parametrize("units", [132, 78, 7])
def test_what_is_offered_fits_on_the_device(units: int, kind: dict[str, str]) -> None:
    asked = problem(300, 1536, 1024, **kind)
    for _, values in kernel.scored(asked, units):
        one = kernel.scaled_tiles(values, asked)
        assert one.launch.check_for(asked) is None
        assert one.clusters * one.cluster <= max(units, one.cluster)
        assert one.clusters <= one.tiles and one.turns * one.clusters >= one.tiles
        assert one.turns == 1 or one.parts == 1
        assert one.shared <= 227 * 1024 and one.depth >= 3
        assert one.received <= one.depth * (one.rows + one.tokens) * 128, "sums would lie over scales and barriers"


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "fp8_e5m2"}, {"out_dtype": "fp32"}, {"layout": "nn"}, {"weight_state": "packed"},
        {"weight_state": "shuffled"}, {"scale": "1x32"}, {"scale": "row", "wscale": "tensor"},
        {"scale": "1x128", "wscale": "1x128"}, {"scale": "1x128", "scale_layout": "other"},
        {"scale": "1x128", "wscale_layout": "col"}, {"m": 16385}, {"k": 520}, {"n": 63}, {"batch": 2},
        {"dtype": "i8", "scale": "1x128", "scale_layout": "col"}, {"dtype": "i8", "k": 1 << 17}, {"scale": "row+zero"},
        {"dtype": "i8", "scale": "row+zero", "wscale": "tensor"}, {"dtype": "i8", "scale": "tensor+zero", "k": 65552},
    ],
    ids=str,
)  # fmt: skip
def test_what_it_is_not_written_for_is_refused(other: dict[str, Any]) -> None:
    asked = problem(**{"m": 64, "n": 64, "k": 512, **other})
    values = {"rows": 32, "tokens": 64, "halves": 1, "share_w": 1, "share_x": 1, "parts": 1, "clusters": 2}

    assert kernel.scored(asked, 132) == []
    with pytest.raises(CandidateFailed, match=r"scaled_tiles: .*(runs|scales|has|layout|stores|tiles)"):
        kernel.scaled_tiles(values, asked)


@pytest.mark.parametrize(
    "other",
    [
        {"rows": 12}, {"rows": 264}, {"rows": 24, "halves": 2}, {"rows": 24, "share_w": 2}, {"tokens": 96},
        {"tokens": 128, "halves": 2}, {"share_x": 16}, {"share_w": 4, "share_x": 4}, {"parts": 5}, {"clusters": 0},
        {"parts": 2, "clusters": 2}, {"rows": 136}, {"tokens": 64, "share_x": 3}, {"unknown": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_that_is_none_is_refused(other: dict[str, int]) -> None:
    fits = {"rows": 32, "tokens": 64, "halves": 1, "share_w": 1, "share_x": 1, "parts": 1, "clusters": 4}
    asked = problem(64, 128, 512, math_mode="ieee")
    kernel.scaled_tiles(fits, asked)
    with pytest.raises(CandidateFailed, match="scaled_tiles"):
        kernel.scaled_tiles(fits | other, asked)


@pytest.mark.parametrize("kind", KINDS)
def test_its_launch_is_a_record_that_refuses_scales_of_another_kind(kind: tuple[str, bool]) -> None:
    one = config(70, 320, 640, *TURNS[3:], kind=kind[0], promoted=kind[1])
    text = replace(one.launch, binary="0" * 64, name=kernel.NAME).text()
    assert read_launch(text).text() == text
    x, w = (torch.zeros(rows, 640).to(torch.float8_e4m3fn) for rows in (70, 320))
    plain = {"x": x, "w": w, "bias": torch.zeros(320).bfloat16()}
    given = {
        name: as_given(config(70, 320, 640, *TURNS[3:], kind=name, promoted=True), *of)
        for name, of in {
            "TENSOR": (torch.ones(1), torch.ones(1), 0, 0), "ROW": (torch.ones(70), torch.ones(320), 0, 0),
            "BLOCK": (torch.ones(5 * 70), torch.ones(3 * 8), 70, 8),
        }.items()
    }  # fmt: skip
    for name, both in given.items():
        assert holds(one.launch.checked, plain | both) == (name == kind[0]), name
    own = plain | given[kind[0]]
    assert not holds(one.launch.checked, own | {"x": torch.zeros(71, 640).to(x.dtype)}), (
        "more rows than it was chosen for"
    )
    assert not holds(one.launch.checked, own | {"x": torch.zeros(70, 648).to(x.dtype)[:, 8:]}), "not aligned to 16"
    for name, t in (("x", x), ("w", w)):
        assert not holds(one.launch.checked, own | {name: t[:1].expand(t.shape)}), f"rows of {name} over others"
        assert not holds(one.launch.checked, own | {name: t.as_strided(t.shape, (624, 1))}), f"rows of {name} overlap"


@pytest.mark.parametrize(
    ("slot", "wrong", "seen"),
    [
        ("x", {"rows": 62}, "off"), ("x", {"rows": 78}, "no tensor"), ("w", {"rows": 32}, "off"),
        ("w", {"rows": 48}, "no tensor"),
        ("x", {"columns": 384}, "off"), ("w", {"stride": 400}, "off"), ("x", {"box_rows": 32}, "ever|off"),
        ("w", {"box_rows": 64}, "shared memory|read|ever|off|over a barrier"),
    ],
    ids=str,
)  # fmt: skip
def test_a_map_of_another_matrix_is_seen(
    monkeypatch: pytest.MonkeyPatch, slot: str, wrong: dict[str, int], seen: str
) -> None:
    """So what launches make of the operands is checked, too: the kernel is given all of both matrices by it alone."""
    one = config(*TURNS, kind="ROW", promoted=False)

    def other(operand: Any, box_rows: int, pointer: Any) -> Any:
        found = byte_matrix(operand, box_rows, pointer)
        return found._replace(**wrong) if (operand.shape[0] == one.m) == (slot == "x") else found

    monkeypatch.setattr(launch_values, "byte_matrix", other)
    with pytest.raises(ptx_code.Wrong, match=seen):
        y, exact = run(one)
        if not torch.equal(y, exact):
            raise ptx_code.Wrong("far off")


def test_its_launch_brings_maps_of_the_parts_that_a_thread_block_reads() -> None:
    one = config(*SHARED[:9], 3, kind="ROW", promoted=True)
    assert one.launch.arguments[:2] == (f"x.map{one.tokens // 2}", f"w.map{one.rows // 2}")
    assert not one.launch.workspace_bytes
    assert one.launch.named == {"x", "w", "bias", "scale_x", "scale_w", "y"}


def test_it_is_offered_for_scaled_products_of_many_tokens_of_its_architecture_alone() -> None:
    here = own_kernels.device("sm_90")
    for m, is_offered in ((32, False), (33, True), (2048, True), (16384, True), (16385, False)):
        for columns in ({"dtype": "i8"}, {"scale": "1x128", "scale_layout": "col"}, {"math_mode": "ieee"}):
            asked = problem(m, 4096, 7168, **columns)
            found = catalog.candidates(asked, here)["cuda"]
            ours = [c for c in found if c.kernel == kernel.NAME]
            assert bool(ours) == is_offered, asked
            assert all(catalog.record_of(c, asked)[1].launch.check_for(asked) is None for c in ours)
    assert not any(catalog.candidates(problem(64, 4096, 7168), own_kernels.device("sm_100")).values())
    dense = catalog.candidates(Problem(m=64, n=4096, k=7168), here)["cuda"]
    assert not any(c.kernel == kernel.NAME for c in dense)
