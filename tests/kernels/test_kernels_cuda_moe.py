"""moe_decode on the CPU, as PTX: every kind of weight, routing of all sorts, tails; planted faults show."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # ptx.py needs it

import ptx_code
import ptx_cuda
import ptx_moe
from ptx_moe import is_right, run
from ptx_warps import Warps

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.cuda import moe_decode as moe
from gemmtuned.kernels.cuda import nvrtc
from gemmtuned.kernels.cuda.moe_compile import described
from gemmtuned.kernels.cuda.moe_decode import Experts, Stage
from gemmtuned.kernels.families.error import measure_error
from gemmtuned.kernels.families.moe import MOE

pytestmark = pytest.mark.skipif(nvrtc.version() is None, reason="needs NVRTC")
SMALL = Stage(warps=2, depth=2, tiles=1)
LAYERS = {
    "bf16": Experts(width=96, inter=40, experts=5, topk=2),
    "fp16": Experts(width=64, inter=32, experts=3, topk=1, dtype="fp16", weight="fp16", act="gelu"),
    "tensor": Experts(width=160, inter=32, experts=5, topk=2, weight="fp8_e4m3", scales="tensor"),
    "row": Experts(width=144, inter=48, experts=4, topk=2, weight="fp8_e4m3", scales="row", dtype="fp16"),
    "block": Experts(width=256, inter=144, experts=3, topk=2, weight="fp8_e4m3", scales="128x128"),
    "int4": Experts(width=320, inter=64, experts=4, topk=2, weight="int4", scales="group", group=32),
    "int4, scales in 16 bytes": Experts(
        width=256, inter=32, experts=3, topk=1, weight="int4", scales="group", group=32
    ),
    "int4 in 64": Experts(
        width=128, inter=64, experts=4, topk=2, weight="int4", scales="group", group=64, dtype="fp16"
    ),
    "gpt-oss": Experts(
        width=64, inter=96, experts=4, topk=2, weight="mxfp4", scales="group", group=32, act="swiglu_clamped", bias=True
    ),
    "mxfp4": Experts(width=288, inter=32, experts=3, topk=1, weight="mxfp4", scales="group", group=32, dtype="fp16"),
}


def drawn(layer: Experts, tokens: int, seed: int = 3) -> torch.Tensor:
    """Each token's experts, all different."""
    random = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, layer.experts, generator=random).topk(layer.topk, 1).indices


@pytest.mark.long
@pytest.mark.part(3)
@pytest.mark.parametrize("name", LAYERS)
def test_right(name: str) -> None:
    layer = LAYERS[name]
    assert is_right(layer, drawn(layer, 3), SMALL, Stage(warps=3, depth=1, tiles=1))


def few(**more: Any) -> Experts:
    return Experts(width=32, inter=24, experts=5, topk=2, **more)


ROUTED = {
    "one token": [[4, 0]],
    "all to the same": [[2, 1]] * 11,
    "an expert named twice": [[3, 3], [0, 3], [3, 3]],
    "not ours": [[-1, 2], [-1, -1], [1, 7]],
    "in many tiles": [[i % 2, 2 + i % 3] for i in range(40)],
}


@pytest.mark.long
@pytest.mark.part(2)
@pytest.mark.parametrize("name", ROUTED)
def test_every_routing(name: str) -> None:
    layer, ids = few(long_ids=len(name) % 2 == 0), torch.tensor(ROUTED[name])
    assert is_right(layer, ids, Stage(warps=1, depth=2, tiles=1), Stage(warps=2, depth=2, tiles=1))


def test_the_weight_before_the_activation() -> None:
    layer = few(weight_first=True)
    assert is_right(layer, torch.tensor([[3, 3], [0, 1]]), SMALL, SMALL)


@pytest.mark.parametrize("parts", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(8, marks=pytest.mark.long)])
def test_a_cluster_deals_out_the_pairs(parts: int) -> None:
    """Also more blocks than pairs, and sums that do not divide by them."""
    layer = few(bias=True)
    down = Stage(warps=2, depth=2, tiles=1, parts=parts)
    assert is_right(layer, torch.tensor([[3, 3], [0, 3], [4, 1]]), SMALL, down, turns=ptx_code.WARP)


@pytest.mark.parametrize("pairs", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["an expert named twice", pytest.param("in many tiles", marks=pytest.mark.long)])
def test_fewer_pairs_are_computed_at_once_than_an_expert_has(name: str, pairs: int) -> None:
    layer, ids = few(), torch.tensor(ROUTED[name])
    up, down = Stage(warps=2, depth=1, tiles=1, pairs=pairs), Stage(warps=2, depth=2, tiles=1, parts=2, pairs=pairs)
    assert is_right(layer, ids, up, down)


@pytest.mark.parametrize("name", ["gpt-oss", pytest.param("block", marks=pytest.mark.long)])
def test_warps_share_k_of_the_first_launch(name: str) -> None:
    """Also a warp that has nothing to do, for there are fewer steps of K; and biases, which a thread adds once."""
    layer = LAYERS[name]
    up = Stage(warps=3, depth=2, tiles=1, parts=3)
    assert is_right(layer, drawn(layer, 3), up, SMALL, turns=ptx_code.WARP, last_first=True)


@pytest.mark.long
def test_more_tiles_of_rows_and_the_last_warp_first() -> None:
    layer = Experts(width=80, inter=56, experts=4, topk=2)
    wide = Stage(warps=2, depth=3, tiles=2)
    assert is_right(layer, drawn(layer, 5), wide, wide, turns=ptx_code.WARP, last_first=True)


@pytest.mark.long
def test_a_scale_that_the_type_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """2^125 times 6 is beyond neither fp32 nor bf16, but is beyond the scale that the fast way multiplies by."""
    layer = Experts(width=32, inter=32, experts=1, topk=1, weight="mxfp4", scales="group", group=32)
    usual = ptx_moe.weights_of

    def far(*how: Any) -> Any:
        w, s, exact = usual(*how)
        assert s is not None
        return w, s + 10, exact * 2.0**10

    monkeypatch.setattr(ptx_moe, "weights_of", far)
    h, exact_h, _, _ = run(layer, torch.tensor([[0]]), SMALL, SMALL)
    assert torch.allclose(h.double(), exact_h, rtol=2.0**-7)


def test_nan_of_a_weight_is_nan_of_its_result() -> None:
    layer = Experts(width=64, inter=16, experts=2, topk=1, weight="fp8_e4m3", scales="tensor")
    text = moe.source(layer, 2, SMALL, most_pairs=2, early=False)
    w = torch.ones(2, layer.width, layer.inter).to(torch.float8_e4m3fn)
    w.view(torch.uint8)[1, 5, 3] = 0x7F
    h, y = torch.ones(2, layer.inter, dtype=torch.bfloat16), torch.zeros(2, layer.width, dtype=torch.bfloat16)
    ids, weights = torch.tensor([[0], [1]], dtype=torch.int32), torch.ones(2, 1)
    launch = ptx_cuda.Launch(
        moe.grid(layer, 2, SMALL, 2, 3), 32 * SMALL.warps, moe.shared_bytes(layer, 2, SMALL, 2 * layer.topk), 1
    )  # fmt: skip
    arguments = [h, ids, weights, w.view(torch.uint8), torch.ones(2), torch.zeros(1), y, 2, layer.width]
    ptx_cuda.run(ptx_cuda.compiled(text, moe.TARGET), launch, arguments, kind=Warps)
    assert y[1, 5].isnan()
    y[1, 5] = layer.inter
    assert (y == layer.inter).all()


PLANTED = {
    "another chunk": ("(part + q) ^ g", "(part + (1 - q)) ^ g"),
    "the K tail is read": ("step * STEP + chunk * PER_QUAD < K", "true"),
    "no wait for the ring": ('"n"(DEPTH - 1)', '"n"(DEPTH)'),
    "warps do not meet": ("      wait_for_oldest();\n      __syncwarp();", "      wait_for_oldest();"),
    "a scale of the row before": ("row_of_w(of.column, r) * S_OF", "row_of_w(of.column, r - r % 2) * S_OF"),
    "gate and up in halves": ("2 * of + side : of + side * INTER", "of + side * INTER : of + side * INTER"),
    "no limit": ("gate = gate > 7.0f ? 7.0f : gate", "gate = gate"),
    "the bias of each part": ("if (BIAS && part == 0)", "if (BIAS)"),
    "no bias": ("if (BIAS)\n", "if (false)\n"),
    "the weight of another pair": ("min(2 * t + i, many - 1)]]", "min(2 * t + i, many - 1)] ^ 1]"),
    "sums of a warp are lost": ("v = 0; v < WARPS; v++) sum += partial", "v = 1; v < WARPS; v++) sum += partial"),
    "the token of another pair": ("r.first[tile] + g]", "r.first[tile]]"),
    "the item before": ("if (next_step == 0) of", "if (next == first && next_step == 0) of"),
    "rows that do not exist": ("D % ROWS == 0 : INTER % (16 * TILES) == 0", "true : true"),
    "a chunk of another token": ("(c / 8 | g % 2 * X_QUADS);", "(c / 8 | X_QUADS);"),
    "the scale of another row": ("(row_of_w(column, r) * S_OF_ROW + first * SCALE_BYTES) % 4", "0"),
    "scales past the row's end": ("(first & ~3u) + word * 4 < row + S_OF_ROW", "word < 1"),
    "a part is lost": ("p = 0; p < PARTS; p++) sum += received", "p = 1; p < PARTS; p++) sum += received"),
    "the sums of another part": ("rank * each + i - owner * each", "i - owner * each"),
    "high codes first": ("of % 2 ? 0x7632 : 0x5410", "of % 2 ? 0x5410 : 0x7632"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.part(5)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_shows(name: str) -> None:
    layer, change = LAYERS["gpt-oss"], PLANTED[name]
    if name == "the bias of each part":  # needs as many parts of K as warps
        layer = Experts(width=32, inter=136, experts=2, topk=1, bias=True)
    ids = drawn(layer, 2)
    if name in ("the item before", "rows that do not exist"):  # needs many items, a last tile that is not whole
        layer, ids = few(), torch.tensor(ROUTED["in many tiles"])
    assert any(change[0] in moe.source(layer, stage, SMALL, most_pairs=8) for stage in (1, 2))
    try:
        down = Stage(warps=4, depth=1, tiles=1, parts=2)
        seen = is_right(layer, ids, SMALL, down, change=change)
    except ptx_code.Wrong:
        return
    assert not seen


@pytest.mark.parametrize(
    "text",
    [
        "bf16/fp8_e4m3:3x96x96,wscale=row",
        "bf16/i4:3x96x96,wscale=1x32,wscaledtype=bf16",
        pytest.param("bf16/fp4_e2m1:3x96x96,wscale=1x32", marks=pytest.mark.long),
    ],
)
def test_a_problems_inputs_give_the_familys_exact_result(text: str) -> None:
    """What the gate draws, by what the daemon compiles: equal bits on whole numbers, no NaN of unvisited experts."""
    problem = Problem.parse(f"moe:{text},experts=4,topk=2,inter=64,act=silu_gated")
    layer = described(problem)
    assert layer is not None
    for kind in ("integers", "unvisited"):
        inputs = MOE.make(problem, kind=kind, seed=1, device=torch.device("cpu"))
        x, ids, gates = inputs["x"], inputs["ids"], inputs["gates"]
        h = torch.full((ids.numel(), layer.inter), math.nan, dtype=x.dtype)
        y = torch.full(x.shape, math.nan, dtype=x.dtype)
        for stage, given, to in ((1, x, h), (2, h, y)):
            source = moe.source(layer, stage, SMALL, most_pairs=ids.numel(), early=False)
            launch = ptx_cuda.Launch(
                moe.grid(layer, stage, SMALL, len(x), 3), 32 * SMALL.warps,
                moe.shared_bytes(layer, stage, SMALL, ids.numel()), 1,
            )  # fmt: skip
            w, scale = inputs[f"w{stage}"].view(torch.uint8), inputs[f"scale{stage}"]
            arguments = [given, ids, gates, w, scale, torch.zeros(1), to, ids.numel(), layer.width]
            ptx_cuda.run(ptx_cuda.compiled(source, moe.TARGET), launch, arguments, kind=Warps)
        sample = MOE.sample(problem, seed=1, device=torch.device("cpu"))
        exact = MOE.reference(problem, inputs, sample)
        if kind == "integers":
            assert torch.equal(y, exact.to(y.dtype)) and float(exact.abs().max()) > 8
        assert measure_error(y, exact).r < (6e-3 if x.dtype == torch.bfloat16 else 8e-4)


@pytest.mark.parametrize(
    "layer",
    [
        Experts(width=100, inter=32, experts=4, topk=2),
        Experts(width=64, inter=32, experts=4, topk=5),
        Experts(width=64, inter=32, experts=4, topk=2, weight="fp8_e4m3"),
        Experts(width=64, inter=32, experts=4, topk=2, weight="fp16"),
        Experts(width=96, inter=64, experts=4, topk=2, weight="int4", scales="group", group=64),
        Experts(width=96, inter=96, experts=4, topk=2, weight="mxfp4", scales="group", group=96),
        Experts(width=64, inter=32, experts=4, topk=2, act="tanh"),
    ],
    ids=str,
)
def test_what_they_are_not_written_for(layer: Experts) -> None:
    with pytest.raises(CandidateFailed):
        moe.source(layer, 1, SMALL, most_pairs=8)


def test_what_does_not_fit() -> None:
    with pytest.raises(CandidateFailed, match="shared memory"):
        moe.source(LAYERS["block"], 1, Stage(warps=16, depth=8, tiles=2), most_pairs=8)
