"""weight_only on the CPU, as PTX: every type of weight and kind of scale, tails, clusters; planted faults show."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # ptx.py needs it

import own_kernels
import ptx_code
from matrices import matrix
from weight_only_operands import E2M1, launched, problem, run

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import read_launch
from gemmtuned.configs.tunable import WEIGHT_ONLY
from gemmtuned.kernels import catalog
from gemmtuned.kernels.cuda import nvrtc
from gemmtuned.kernels.cuda import weight_only as kernel
from gemmtuned.kernels.cuda.weight_only import WeightOnly

pytestmark = pytest.mark.skipif(nvrtc.version() is None, reason="needs NVRTC")
# m, n, k in pieces of 128 bytes of a row, rows, tokens, parts, warps, depth
SHAPES = [
    (1, 16, 1, 16, 8, 1, 1, 1),
    (3, 20, 2, 16, 8, 1, 2, 1),  # rows past the last
    (9, 40, 4.5, 32, 16, 2, 2, 2),  # K that ends within a step, warps with one step less
    (16, 24, 3, 16, 16, 3, 1, 2),
    (2, 136, 2, 64, 8, 1, 1, 2),  # rows of two blocks of scales
]
KINDS = [(weight, *scales) for (x, weight), kinds in WEIGHT_ONLY.items() if x == "bf16" for scales in kinds]


def config(shape: tuple[float, ...], kind: tuple[str, str, str], *, bias: bool = True, out: str = "bf16") -> WeightOnly:
    m, n, pieces, *rest = shape
    weight, scales, scale_type = kind
    k = int(pieces * (256 if weight in ("i4", "fp4_e2m1") else 128))
    if scale_type == "bf16":
        scale_type = out
    return WeightOnly(int(m), int(n), k, bias, out, weight, scales, scale_type, *map(int, rest))


def is_right(one: WeightOnly, **how: Any) -> bool:
    y, exact = run(one, **how)
    return torch.equal(y, exact)


@pytest.mark.part(2)
@pytest.mark.parametrize("number", range(len(KINDS)), ids=lambda i: " ".join(KINDS[i]))
def test_sums_are_right_and_nothing_else_is_read_or_written(number: int) -> None:
    shape = SHAPES[number % 2]
    assert is_right(config(shape, KINDS[number], bias=number % 3 != 0, out=("bf16", "fp16")[number % 2]))


@pytest.mark.long
@pytest.mark.part(8)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_sums_are_right_in_every_shape(shape: tuple[float, ...], kind: tuple[str, str, str]) -> None:
    if kind[1] == "1x128" and kind[2] == "bf16" and shape[2] == 4.5:
        pytest.skip("K is no such number of groups")
    for out in ("bf16", "fp16"):
        assert is_right(config(shape, kind, out=out), turns=ptx_code.WARP, last_first=out == "fp16")


@pytest.mark.part(2)
@pytest.mark.parametrize("kind", [KINDS[0], ("fp4_e2m1", "1x32", "e8m0")], ids=" ".join)
def test_sums_are_right_where_k_ends_within_a_step(kind: tuple[str, str, str]) -> None:
    assert is_right(config((1, 17, 1.5, 16, 8, 2, 1, 1), kind))


@pytest.mark.parametrize("out", ["bf16", "fp16"])
def test_every_code_of_a_byte_and_scales_at_their_ends(out: str) -> None:
    """One number of X at a time picks numbers of W: all 256 of e4m3 and int8, all e2m1 times powers near and far."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[out]
    for weight, given in (("i8", torch.int8), ("fp8_e4m3", torch.float8_e4m3fn)):
        one = WeightOnly(1, 256, 128, False, out, weight, "tensor", "fp32", 16, 8, 1, 1, 1)
        w = torch.zeros(256, 128, dtype=torch.uint8)
        w[:, 77] = torch.arange(256)
        x, y = torch.zeros(1, 128, dtype=dtype), torch.zeros(1, 256, dtype=dtype)
        x[0, 77] = 1
        launched(one, {"x": x, "w": w.view(given), "y": y, "scale_w": torch.ones(1, 1)})
        torch.testing.assert_close(y[0], w[:, 77].contiguous().view(given).to(dtype), rtol=0, atol=0, equal_nan=True)


def test_scales_of_powers_at_their_ends() -> None:
    """e8m0 beyond 2 takes another way than those up to it; 0 is the smallest, 255 is NaN of its rows alone."""
    scales = torch.tensor([0, 1, 100, 127, 128, 129, 200, 255, *range(120, 128)], dtype=torch.uint8)
    for some in (scales, scales.clamp(max=128)):
        one = WeightOnly(1, 16, 128, False, "bf16", "fp4_e2m1", "1x32", "e8m0", 16, 8, 1, 1, 1)
        w = torch.full((16, 64), 0x22, dtype=torch.uint8)
        w[:, 5] = torch.arange(16, dtype=torch.uint8)  # the lower half of a byte is the first of two
        x, y = torch.zeros(1, 128, dtype=torch.bfloat16), torch.zeros(1, 16, dtype=torch.bfloat16)
        x[0, 10] = 2.0
        rows = torch.full((16, 4), 127, dtype=torch.uint8)
        rows[:, 0] = some
        launched(one, {"x": x, "w": w, "y": y, "scale_w": rows})
        values = E2M1.repeat(2) * torch.tensor([1.0] * 8 + [-1.0] * 8)
        exact = 2.0 * values.double() * torch.exp2(some.double() - 127)
        exact[some == 255] = torch.nan
        torch.testing.assert_close(y[0], exact.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


TAIL = (3, 20, 2.5, 16, 8, 1, 2, 2)
FAULTS = {
    "the tail of K is read": (TAIL, "const bool w_there = !TAIL ||", "const bool w_there = true ||"),
    "the wrong half of a pair": (SHAPES[1], "i % 2 ? 0x7632 : 0x5410", "i % 2 ? 0x5410 : 0x7632"),
    "codes without their middle": (SHAPES[1], "0x43084308", "0x43004300"),
    "a neighbour's scale": (SHAPES[1], "words[i * SCALE_BYTES / 4]", "words[0]"),
    "the scales of other rows": (SHAPES[1], "(i * 8 + g) * S_ROW", "g * S_ROW"),
    "a chunk twice": (SHAPES[1], "x_at[side] ^ chunk * RUN", "x_at[side] ^ (chunk & 6) * RUN"),
    "no wait for the ring": (SHAPES[1], '"n"(DEPTH - 1)', '"n"(DEPTH)'),
    "warps are not waited for": (SHAPES[1], "  __syncthreads();", ""),
    "sums of a warp are lost": (SHAPES[1], "other = 1; other < WARPS", "other = 1; other < WARPS - 1"),
    "a part is left out": (SHAPES[3], "for (int p = 0; p < PARTS; p++) sum", "for (int p = 0; p < PARTS - 1; p++) sum"),
    "a cluster is not waited for": (SHAPES[3], "barrier.cluster.wait.aligned;", ""),
    "rows past the last": (SHAPES[1], "N % ROWS == 0 ? r : min(r, of.last)", "r"),
    "the bias twice": (SHAPES[1], "  sum += value(bias[row]);", "  sum += 2 * value(bias[row]);"),
}  # fmt: skip


@pytest.mark.part(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    shape, what, instead = FAULTS[fault]
    with pytest.raises(ptx_code.Wrong):
        if not is_right(config(shape, ("i4", "1x32", "bf16")), change=(what, instead), turns=ptx_code.WARP):
            raise ptx_code.Wrong("far off")


BLOCK_FAULTS = {
    "the first scale of W for all rows": ("(tile * ROWS / 128) * ldsw", "0 * ldsw"),
    "the scale of the step before": ("ldsw + step]", "ldsw + step / 2 * 0]"),
}


@pytest.mark.parametrize("fault", BLOCK_FAULTS)
def test_a_fault_in_scales_of_blocks_is_seen(fault: str) -> None:
    assert not is_right(config(SHAPES[4], ("fp8_e4m3", "128x128", "fp32")), change=BLOCK_FAULTS[fault])


COMPILED = (KINDS[0], ("i4", "1x128", "bf16"), ("fp4_e2m1", "1x32", "e8m0"))
FEW, MANY = (1, 2112, 7168), (16, 7168, 2048)


@pytest.mark.parametrize(
    ("kind", "shape"), matrix(product(COMPILED, (FEW, MANY)), zip(COMPILED, (FEW, MANY, FEW), strict=True))
)
def test_what_is_offered_compiles(shape: tuple[int, int, int], kind: tuple[str, str, str]) -> None:
    m, n, k = shape
    weight, scales, scale_type = kind
    asked = problem(m, n, k, wdtype=weight, wscale=scales, wscale_dtype=scale_type)
    best = kernel.scored(asked, 132)

    assert len(best) >= 20
    assert best[0][0] == min(us for us, _ in best)
    made = nvrtc.compiled(kernel.weight_only(best[0][1], asked).source(), kernel.KERNEL.target)
    assert not made.spill_bytes


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "fp32"}, {"out_dtype": "fp32"}, {"layout": "nn"}, {"m": 17}, {"k": 528}, {"wscale": "row"},
        {"wdtype": "i8"}, {"wdtype": "fp8_e5m2", "wscale": "row", "wscale_dtype": "fp32"}, {"k": 1152}, {"batch": 2},
    ],
    ids=str,
)  # fmt: skip
def test_what_it_is_not_written_for_is_refused(other: dict[str, Any]) -> None:
    asked = problem(**{"m": 8, "n": 64, "k": 512, **other})

    assert kernel.scored(asked, 132) == []
    with pytest.raises(CandidateFailed, match="weight_only"):
        kernel.weight_only({"rows": 16, "tokens": 8, "parts": 1, "warps": 1, "depth": 1}, asked)


@pytest.mark.parametrize(
    "other", [{"rows": 24}, {"tokens": 8}, {"parts": 9}, {"warps": 3}, {"warps": 8}, {"depth": 0}], ids=str
)
def test_a_config_that_is_none_is_refused(other: dict[str, int]) -> None:
    values = {"rows": 16, "tokens": 16, "parts": 2, "warps": 2, "depth": 2} | other
    with pytest.raises(CandidateFailed, match="weight_only"):
        kernel.weight_only(values, problem(9, 4096, 2048))


def test_its_launch_is_a_record() -> None:
    text = replace(config(SHAPES[2], KINDS[0]).launch, binary="0" * 64, name=kernel.NAME).text()
    assert read_launch(text).text() == text


def test_it_gets_places_for_few_tokens_alone() -> None:
    for m, is_there in ((1, True), (16, True), (17, False)):
        asked = problem(m, 4096, 7168)
        found = catalog.candidates(asked, own_kernels.device("sm_90")).get("cuda", [])
        assert ("weight_only" in {c.kernel for c in found}) == is_there
        assert all(catalog.record_of(c, asked)[1].launch.check_for(asked) is None for c in found)
