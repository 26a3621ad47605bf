"""moe_decode's products of MXFP4 as int8, on the CPU, as PTX: all sizes, what is no number; planted faults show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # ptx.py needs it

import ptx_code
import ptx_moe
from ptx_moe import is_right, run

from gemmtuned.kernels.cuda import moe_decode as moe
from gemmtuned.kernels.cuda import nvrtc
from gemmtuned.kernels.cuda.moe_decode import Experts, Stage

pytestmark = pytest.mark.skipif(nvrtc.version() is None, reason="needs NVRTC")
COLUMNS = Experts(
    width=608, inter=96, experts=4, topk=2, weight="mxfp4", scales="group", group=32, act="swiglu_clamped", bias=True
)
IN_COLUMNS = Stage(warps=2, depth=2, tiles=1, parts=2), Stage(warps=2, depth=1, tiles=1, parts=2, pairs=2)


@pytest.mark.parametrize("tokens", [3, pytest.param(9, marks=pytest.mark.long)])
def test_products_of_int8(tokens: int) -> None:
    """More items than thread blocks, parts of K of two steps and of one, up to eight pairs of an expert."""
    ids = torch.tensor([[0, 1], [2, 1], [3, 1]]) if tokens == 3 else torch.tensor([[1, i % 3] for i in range(tokens)])
    assert is_right(COLUMNS, ids, *IN_COLUMNS)
    assert is_right(COLUMNS, ids, Stage(warps=3, depth=1, tiles=2, parts=3), Stage(warps=1, depth=2, tiles=2, pairs=2))


@pytest.mark.parametrize(("of_w", "of_x"), [(66, -66), (-66, 66), pytest.param(-110, 100, marks=pytest.mark.long)])
def test_scales_and_tokens_of_any_size(monkeypatch: pytest.MonkeyPatch, of_w: int, of_x: int) -> None:
    """Powers of two by which scales and X are multiplied, beyond where both exponents are simply added up."""
    layer, usual = replace(COLUMNS, width=64, inter=32, act="silu", bias=False), ptx_moe.weights_of

    def far(layer: Experts, rows: int, k: int, seed: int) -> Any:
        w, s, exact = usual(layer, rows, k, seed)
        assert s is not None
        power = of_w if seed == 1 else 0
        return w, (s.to(torch.int64) + power).to(torch.uint8), exact * 2.0**power

    monkeypatch.setattr(ptx_moe, "weights_of", far)
    h, exact_h, _, _ = run(layer, torch.tensor([[0, 1]]), *IN_COLUMNS, of_x=lambda x: x * 2.0**of_x)
    assert torch.allclose(h.double(), exact_h, rtol=2.0**-7, atol=0.0)


def are_none(monkeypatch: pytest.MonkeyPatch, what: str, **more: Any) -> bool:
    """Whether results are NaN where `what` (a scale of W, or what X is at one point) is, and right elsewhere."""
    layer, usual = replace(COLUMNS, width=64, act="silu", bias=False), ptx_moe.weights_of

    def with_one(x: torch.Tensor) -> torch.Tensor:
        if what != "scale":
            x[1, 40] = float(what)
        return x

    def with_nan(layer: Experts, rows: int, k: int, seed: int) -> Any:
        w, s, exact = usual(layer, rows, k, seed)
        assert s is not None
        if what == "scale" and seed == 1:
            s[2, :, 1] = 255
        return w, s, exact

    monkeypatch.setattr(ptx_moe, "weights_of", with_nan)
    h, exact_h, _, _ = run(layer, torch.tensor([[0, 1], [2, 2]]), *IN_COLUMNS, of_x=with_one, **more)
    return bool(h[2:].isnan().all()) and torch.allclose(h[:2].double(), exact_h[:2], rtol=2.0**-7)


@pytest.mark.parametrize("what", ["nan", "inf", "scale"])
def test_what_is_no_number_is_none(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """An infinite value of X becomes NaN, where 16 bits would have it infinite; a scale of 255 is NaN."""
    assert are_none(monkeypatch, what)


PLANTED = {
    "a positive number too small": ("0x04030200", "0x04030100"),
    "a negative number too large": ("0xf4f8fafc", "0xf4f8fbfc"),
    "high columns are not rounded": ("12583040.0f", "12582912.0f"),
    "low columns without their sign": ("^ 0x80808080, high", ", high"),
    "the columns of the tile before": ("if (KEPT && tile != kept)", "if (KEPT && kept < 0)"),
    "the units of another token": ("(t * 8 + chunk) * 4", "chunk * 4"),
    "another column": ("(g ^ chunk) * 32 + t * 8", "g * 32 + t * 8"),
    "K of another warp": ("((from + i) * PARTS + part) * STEP", "(from + i) * STEP"),
    "another row of W": ("(chunk ^ row % 8) * 16", "chunk * 16"),
    "the K tail of X is read": ("if (k + lane * 8 < K)", "if (true)"),
    "the scale of another chunk": ("chunk * 32 / GROUP))", "0))"),
    "nobody waits for columns": ("  __syncwarp();\n  const bool plain", "  const bool plain"),
    "tokens change places": ("2 * t % 4;", "(2 * t + 2) % 4;"),
    "columns of W's other half": ("first >> 16)", "first)"),
}


@pytest.mark.long
@pytest.mark.part(4)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_shows(name: str) -> None:
    change = PLANTED[name]
    assert any(change[0] in moe.source(COLUMNS, stage, how, most_pairs=8) for stage, how in enumerate(IN_COLUMNS, 1))
    try:
        seen = is_right(COLUMNS, torch.tensor([[0, 1], [2, 1], [3, 1]]), *IN_COLUMNS, change=change)
    except ptx_code.Wrong:
        return
    assert not seen


BEYOND = {
    "scale": ("is_right = is_right && are_scales_right(slot, column, step);", ""),
    "inf": ("return exponent >= LEAST && exponent < BELOW;", "return true;"),
}


@pytest.mark.long
@pytest.mark.parametrize("what", BEYOND)
def test_it_shows_that_nobody_looks(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    assert not are_none(monkeypatch, what, change=BEYOND[what])
