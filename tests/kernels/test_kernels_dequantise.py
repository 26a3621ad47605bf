"""Weights of 8 and 4 bits as numbers: each way gives the same bits, of every code and every kind of scales."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gemmtuned.kernels import dequantise
from gemmtuned.kernels.dequantise import dequantised

ALL_BYTES = torch.arange(256, dtype=torch.uint8)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def said(codes: Tensor, scale: Tensor, quant: str, dtype: torch.dtype) -> Tensor:
    """In plain words: a code's number times its scale in fp32, rounded once (in fp64 there, where it is exact)."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    if quant in ("int4", "mxfp4"):
        both = torch.stack([codes & 15, codes >> 4], -1).flatten(1).tolist()
        value = (lambda c: math.copysign(E2M1[c & 7], 7.5 - c)) if quant == "mxfp4" else (lambda c: c - 8)
        numbers = torch.tensor([[float(value(c)) for c in row] for row in both], dtype=exact)
        if quant == "mxfp4":
            scale = torch.tensor([[2.0 ** (s - 127) if s < 255 else math.nan for s in row] for row in scale.tolist()])
        spread = scale.to(exact).repeat_interleave(numbers.shape[1] // scale.shape[1], 1)
    else:
        numbers = codes.to(exact)
        spread = scale.to(exact).reshape(len(scale), -1)
        if quant == "128x128":
            spread = spread.repeat_interleave(128, 0)[: len(codes)].repeat_interleave(128, 1)[:, : codes.shape[1]]
    return (numbers * spread).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quant", ["int4", "int4 of its own type", "mxfp4"])
def test_codes_of_4_bits_are_looked_up(quant: str, dtype: torch.dtype) -> None:
    codes = ALL_BYTES.repeat(2).view(8, 64)
    if quant == "mxfp4":
        scale = torch.tensor([0, 1, 2, 3, 120, 126, 127, 128, 130, 140, 150, 200, 252, 253, 254, 255] * 2).byte()
        scale = scale.view(8, 4)
    else:
        scale = (torch.rand(8, 4) * 3).to(dtype if quant.endswith("type") else torch.float32)
    found = dequantised(codes, scale, quant.split()[0], dtype)
    right = said(codes, scale, quant.split()[0], dtype)
    assert found.dtype == dtype and torch.equal(found.nan_to_num(777), right.nan_to_num(777))
    assert torch.equal(found.signbit(), right.signbit()) or quant == "mxfp4"  # of NaN


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("quant", ["tensor", "row", "128x128", "128x128 and a part"])
def test_8_bits_in_one_pass_have_the_bits_of_several(quant: str, kind: torch.dtype, dtype: torch.dtype) -> None:
    k = 256 if quant == "128x128" else 200
    codes = ALL_BYTES.repeat(200)[: 136 * k].view(kind).view(136, k)
    shape = {"tensor": (1,), "row": (136, 1)}.get(quant, (2, 2))
    scale = torch.rand(shape) * 2
    for in_one_pass in (False, True):
        found = dequantised(codes, scale, quant.split()[0], dtype, in_one_pass=in_one_pass)
        right = said(codes, scale, quant.split()[0], dtype)
        assert found.dtype == dtype and torch.equal(found.nan_to_num(777), right.nan_to_num(777)), in_one_pass


def test_a_compiler_is_given_arithmetic_with_the_same_bits() -> None:
    codes = ALL_BYTES.view(4, 64)
    for quant, dtype in itertools.product(("int4", "mxfp4"), DTYPES[:2]):
        scale = torch.rand(4, 4) if quant == "int4" else torch.arange(118, 134, dtype=torch.uint8).view(4, 4)
        form = torch.compile(
            lambda c, s, q=quant, d=dtype: dequantised(c, s, q, d), backend="aot_eager", fullgraph=True
        )
        assert torch.equal(form(codes, scale), dequantised(codes, scale, quant, dtype))


def test_what_a_tracer_has_seen_is_not_kept_for_others() -> None:
    codes, scale = ALL_BYTES.view(4, 64), torch.rand(4, 4, dtype=torch.float16)
    dequantise._kept.clear()
    with FakeTensorMode() as mode:
        fake = dequantised(mode.from_tensor(codes), mode.from_tensor(scale), "int4", torch.float16)
    traced = make_fx(lambda c, s: dequantised(c, s, "int4", torch.float16))(codes, scale)
    each = torch.vmap(lambda c, s: dequantised(c, s, "int4", torch.float16))(codes[None], scale[None])
    found = dequantised(codes, scale, "int4", torch.float16)
    beside = dequantised(mode.from_tensor(codes), mode.from_tensor(scale), "int4", torch.float16)
    powers = dequantised(mode.from_tensor(codes), mode.from_tensor(ALL_BYTES[:16].view(4, 4)), "mxfp4", torch.float16)
    assert fake.shape == beside.shape == powers.shape == found.shape and type(beside) is type(powers) is type(fake)
    assert type(found) is Tensor and len(dequantise._kept) == 1
    assert torch.equal(traced(codes, scale), found) and torch.equal(each[0], found)


def test_tables_that_are_made_in_inference_mode_are_no_tensors_of_it() -> None:
    codes, scale = ALL_BYTES.view(4, 64).to("meta"), torch.rand(4, 4).to("meta")
    dequantise._kept.clear()
    with torch.inference_mode():
        dequantised(codes, scale, "int4", torch.float16)
    assert [table.is_inference() for table in dequantise._kept.values()] == [False]


def test_scales_have_derivatives_and_empty_weights_a_shape() -> None:
    codes, scale = ALL_BYTES.view(4, 64), torch.rand(4, 4, dtype=torch.bfloat16, requires_grad=True)
    dequantised(codes, scale, "int4", torch.bfloat16).float().sum().backward()
    assert scale.grad is not None and scale.grad.shape == scale.shape
    for n, k in ((0, 64), (4, 0)):
        empty = dequantised(torch.empty(n, k // 2, dtype=torch.uint8), torch.empty(n, k // 32), "int4", torch.float16)
        assert empty.shape == (n, k)


def test_a_weight_that_lies_otherwise_is_the_same() -> None:
    codes = ALL_BYTES.view(32, 8).t()
    assert torch.equal(
        dequantised(codes, torch.full((8, 2), 0.5), "int4", torch.float32),
        dequantised(codes.contiguous(), torch.full((8, 2), 0.5), "int4", torch.float32),
    )
    wide = torch.randint(-128, 128, (256, 300), dtype=torch.int8)[:, :256]
    scale = torch.rand(2, 2)
    assert torch.equal(
        dequantised(wide, scale, "128x128", torch.bfloat16, in_one_pass=True),
        dequantised(wide.contiguous(), scale, "128x128", torch.bfloat16),
    )
