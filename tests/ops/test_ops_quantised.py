"""The ops of 8-bit and 4-bit operands on CPUs: right against fp64, compiled and eager; bad operands are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gemmtuned import ops
from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.problem import MAX_DIM
from gemmtuned.kernels.integers import scaled_int_product
from gemmtuned.ops import mxfp4, quantised, weight_only

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}
RANDOM = torch.Generator().manual_seed(3)


@pytest.fixture(autouse=True)
def _same_numbers_in_whatever_order() -> None:
    """Of int8 with large scales some draws are beyond what fp16 holds: none of these are."""
    RANDOM.manual_seed(3)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RANDOM)


def eight(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-8, 9, shape, dtype=dtype, generator=RANDOM)  # fp16 ends at 65504
    return normal(*shape).to(dtype)


def scales(*shape: int) -> Tensor:
    """Far apart, so that a neighbour's shows; some are negative."""
    found = torch.randint(-3, 4, shape, generator=RANDOM)
    return torch.exp2(found.float()) * torch.where(found == 2, -1.0, 1.0)


def is_near(y: Tensor, exact: Tensor, size: Tensor, dtype: torch.dtype) -> bool:
    """size: the sum of the products' magnitudes, which rounding is measured by."""
    assert y.dtype == dtype and y.shape == exact.shape
    return bool(((y.double() - exact).abs() <= ROUNDING[dtype] * exact.abs() + 2**-16 * size + 1e-30).all())


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    added = 0 if bias is None else bias.double()
    return x @ w.mT + added, x.abs() @ w.abs().mT + abs(added)


SHAPES = [(1, 48, 64), (5, 40, 256), (33, 7, 9), (0, 16, 32)]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("eights", [E4M3, E5M2, torch.int8], ids=str)
@pytest.mark.parametrize("kind", ["tensor", "row", "mixed"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_a8w8(m: int, n: int, k: int, kind: str, eights: torch.dtype, dtype: torch.dtype) -> None:
    x, w = eight(m, k, dtype=eights), eight(n, k, dtype=eights)
    of_x = scales(1) if kind == "tensor" else scales(m, 1)
    of_w = scales(1, n) if kind == "row" else scales(1)
    for bias in (None, normal(n).to(dtype)):
        exact, size = product(x.double() * of_x.double(), w.double() * of_w.double().reshape(-1, 1), bias)
        assert is_near(ops.gemm_a8w8(x, w, of_x, of_w, bias, dtype), exact, size, dtype)


def test_a8w8_of_integers_is_exact_however_large_the_sums_are() -> None:
    x, w = torch.full((3, 4096), 127, dtype=torch.int8), torch.full((8, 4096), -128, dtype=torch.int8)
    w[0, 0] = -127
    y = ops.gemm_a8w8(x, w, torch.ones(1), torch.ones(1), dtype=torch.float32)
    assert torch.equal(y.double(), (x.double() @ w.double().t()).float().double())


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_sums_of_integers_are_scaled_alike_in_two_passes_and_in_one(dtype: torch.dtype, biased: bool) -> None:
    """What the operator runs, what a compiler is given, and each step rounded to fp32."""
    x, w = eight(5, 96, dtype=torch.int8), eight(24, 96, dtype=torch.int8)
    of_x, of_w = normal(5, 1).abs(), normal(1, 24).abs()
    bias = normal(24).to(dtype) if biased else None
    steps = (x.double() @ w.double().t()).float() * of_w * of_x
    expected = (steps + bias if bias is not None else steps).to(dtype)
    y = ops.gemm_a8w8(x, w, of_x, of_w, bias, dtype)
    assert torch.equal(y, expected) and torch.equal(scaled_int_product(x, w, of_x, of_w, bias, dtype), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_that_scales_of_16_bits_do_not_hold_are_scaled_in_fp32(dtype: torch.dtype) -> None:
    """Called by whoever looks for the operator itself: 2^26 is beyond fp16."""
    x, w = (torch.full((n, 4096), 127, dtype=torch.int8) for n in (3, 8))
    of_x, of_w = (torch.full(shape, 2.0**-9, dtype=dtype) for shape in ((3, 1), (1, 8)))
    y, expected = torch.empty(3, 8), torch.full((3, 8), 4096 * 127**2 * 2.0**-18)
    torch.ops.gemmtuned.int8_scaled_mm(y, x, w.t(), of_x, of_w, None)
    assert torch.equal(y, expected) and torch.equal(scaled_int_product(x, w, of_x, of_w, None, y.dtype), expected)


def test_a_compiler_sees_the_product_of_integers_where_no_kernel_of_ours_is_to_serve_it() -> None:
    seen: list[str] = []

    def looking(graph: torch.fx.GraphModule, given: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    x, w, of_x, of_w = eight(5, 96, dtype=torch.int8), eight(24, 96, dtype=torch.int8), scales(5, 1), scales(1, 24)
    y = torch.compile(lambda: ops.gemm_a8w8(x, w, of_x, of_w), backend=looking)()
    assert torch.equal(y, ops.gemm_a8w8(x, w, of_x, of_w))
    assert any("_int_mm" in name for name in seen) and not any("int8_scaled_mm" in name for name in seen)


@pytest.mark.parametrize("form", ["expanded", "turned", "K = 1", "gaps"])
def test_a8w8_of_integers_whatever_their_strides(form: str) -> None:
    x, w = eight(4, 64, dtype=torch.int8), eight(24, 64, dtype=torch.int8)
    if form == "expanded":
        x = x[:1].expand(4, 64)
    elif form == "turned":
        x, w = x[0].reshape(64, 1).t(), w[:1]
    elif form == "K = 1":
        x, w = x[:, :1].contiguous(), w[:, :1].contiguous()
    else:
        x, w = eight(4, 128, dtype=torch.int8)[:, ::2], eight(64, 24, dtype=torch.int8).t()
    y = ops.gemm_a8w8(x, w, torch.ones(1), torch.ones(1), dtype=torch.float32)
    assert torch.equal(y.double(), x.double() @ w.double().t())


def test_scales_that_may_be_of_rows_or_of_blocks_are_refused() -> None:
    with pytest.raises(GemmtunedError, match="one for each row or for each block"):
        ops.gemm_a16w8(normal(2, 256).bfloat16(), eight(2, 256), scales(1, 2))


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 256), (5, 300, 400), (17, 64, 128), (0, 16, 128)])
def test_a8w8_blockscale(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, w = eight(m, k), eight(n, k)
    of_x, of_w = scales(m, -(-k // 128)), scales(-(-n // 128), -(-k // 128))
    wide_x = x.double() * of_x.double().repeat_interleave(128, 1)[:, :k]
    wide_w = w.double() * of_w.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    assert is_near(ops.gemm_a8w8_blockscale(x, w, of_x, of_w, dtype), *product(wide_x, wide_w), dtype)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 256), (5, 300, 400)])
def test_the_operator_of_blocks_is_what_the_op_runs_without_the_hook(m: int, n: int, k: int) -> None:
    x, w, of_x, of_w = eight(m, k), eight(n, k), scales(m, -(-k // 128)), scales(-(-n // 128), -(-k // 128))
    given = torch.empty(m, n, dtype=torch.float16), x, w.t(), of_x, of_w.t()
    torch.ops.gemmtuned.block_scaled_mm(*given)
    assert torch.equal(given[0], ops.gemm_a8w8_blockscale(x, w, of_x, of_w, torch.float16))
    torch.library.opcheck(torch.ops.gemmtuned.block_scaled_mm.default, given, test_utils="test_faketensor")


def test_a_shuffled_weight_is_taken_by_one_op_and_refused_by_the_others() -> None:
    x, w, one = eight(3, 64), eight(32, 64), torch.ones(1)
    shuffled = ops.shuffle_weight(w)
    assert torch.equal(ops.gemm_a8w8_bpreshuffle(x, shuffled, one, one), ops.gemm_a8w8(x, w, one, one))
    with pytest.raises(GemmtunedError, match="not marked as shuffled"):
        ops.gemm_a8w8_bpreshuffle(x, w, one, one)
    with pytest.raises(GemmtunedError, match="shuffled"):
        ops.gemm_a8w8(x, shuffled, one, one)
    with pytest.raises(GemmtunedError, match="shuffled"):
        ops.gemm_a16w8(normal(3, 64).bfloat16(), shuffled.t().t(), one)


def four(rows: int, k: int) -> tuple[Tensor, Tensor]:
    """(bytes, codes)."""
    codes = torch.randint(0, 16, (rows, k), generator=RANDOM)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), codes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a4w4_reads_every_code_and_power(dtype: torch.dtype) -> None:
    (a, codes_a), (b, codes_b) = four(5, 96), four(24, 96)
    of_a, of_b = (torch.randint(122, 131, (rows, 3), generator=RANDOM).to(torch.uint8) for rows in (5, 24))
    exact, size = product(
        E2M1[codes_a] * torch.exp2(of_a.double() - 127).repeat_interleave(32, 1),
        E2M1[codes_b] * torch.exp2(of_b.double() - 127).repeat_interleave(32, 1),
    )
    assert is_near(ops.gemm_a4w4(a, b, of_a, of_b, dtype=dtype), exact, size, dtype)
    of_b[3, 1] = 255  # NaN
    y = ops.gemm_a4w4(a, b, of_a, of_b, dtype=dtype)
    assert y[:, 3].isnan().all() and not y[:, :3].isnan().any()


def test_a4w4_is_the_product_of_a_weight_as_it_lies_where_the_hook_may_serve_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = four(5, 96)[0], four(24, 96)[0]
    operands = (a, b, torch.full((5, 3), 125).byte(), torch.full((24, 3), 129).byte(), normal(24))
    as_torch = ops.gemm_a4w4(*operands)
    called = []

    def is_served(x: Tensor, w: Tensor, *more: object) -> bool:
        called.append((x.dtype, w.dtype))
        return True

    monkeypatch.setattr(weight_only, "_is_served", is_served)

    assert torch.equal(ops.gemm_a4w4(*operands), as_torch)
    assert called == [(torch.bfloat16, torch.uint8)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a4w4_is_one_operator_where_there_may_be_a_kernel(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    a, b = four(5, 96)[0], four(24, 96)[0]
    operands = (a, b, torch.randint(120, 131, (5, 3)).byte(), torch.randint(120, 131, (3, 24)).byte().t(), normal(24))
    as_torch = ops.gemm_a4w4(*operands, dtype=dtype)
    asked = []

    def can_be_multiplied(out: torch.dtype, *given: Tensor) -> bool:
        asked.append((out, [t.dtype for t in given]))
        return True

    monkeypatch.setattr(quantised, "can_be_multiplied", can_be_multiplied)

    assert torch.equal(ops.gemm_a4w4(*operands, dtype=dtype), as_torch)
    assert asked == [(dtype, [torch.uint8] * 4 + [dtype])]


PAIRS: list[tuple[float | None, float | None]] = [  # alpha and beta
    (1.0, 1.0), (1.0, 0.5), (1.0, 0.0), (0.375, 1.0), (-2.0, 3), (0.0, 1.0), (None, None), (1, None),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("alpha", "beta"), PAIRS)
def test_a4w4_has_aiters_alpha_and_beta(alpha: float | None, beta: float | None, dtype: torch.dtype) -> None:
    (a, codes_a), (b, codes_b), bias = four(5, 96), four(24, 96), normal(24)
    of_a, of_b = torch.full((5, 3), 125).byte(), torch.full((24, 3), 129).byte()
    exact, size = product(E2M1[codes_a] * 0.25, E2M1[codes_b] * 4)
    times, more = (1.0 if factor is None else factor for factor in (alpha, beta))

    y = ops.gemm_a4w4(a, b, of_a, of_b, bias, dtype, alpha, beta)
    assert y.dtype == dtype
    assert is_near(y, times * exact + more * bias.double(), abs(times) * size + abs(more) * bias.double().abs(), dtype)


@pytest.mark.parametrize(
    ("alpha", "beta", "dtype"),
    [
        pytest.param(*pair, [*ROUNDING][i % len(ROUNDING)], marks=() if i in (1, 2, 3, 6) else pytest.mark.long)
        for i, pair in enumerate(PAIRS)
    ],
)
def test_a4w4_compiled_has_alpha_and_beta_as_eager(alpha: float, beta: float, dtype: torch.dtype) -> None:
    a, b, bias = four(5, 96)[0], four(24, 96)[0], normal(24)
    operands = (a, b, torch.full((5, 3), 125).byte(), torch.full((24, 3), 129).byte(), bias, dtype, alpha, beta)
    torch.compiler.reset()  # each pair is a constant of its code
    compiled = torch.compile(ops.gemm_a4w4, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*operands), ops.gemm_a4w4(*operands))
    torch.compiler.reset()


def test_a4w4_reads_no_bias_with_a_beta_of_0_and_keeps_a_small_alpha_from_overflowing() -> None:
    a, b = four(5, 64)[0], four(24, 64)[0]
    of_a, of_b = torch.full((5, 2), 139).byte(), torch.full((24, 2), 139).byte()  # 2^12 each
    nan = torch.full((24,), torch.nan)
    plain = ops.gemm_a4w4(a, b, of_a, of_b)
    assert torch.equal(ops.gemm_a4w4(a, b, of_a, of_b, nan, beta=0.0), plain)
    assert torch.equal(ops.gemm_a4w4(a, b, of_a, of_b, beta=0.0), plain) and torch.equal(
        ops.gemm_a4w4(a, b, of_a, of_b, beta=None, bpreshuffle=False), plain
    )
    assert not ops.gemm_a4w4(a, b, of_a, of_b, dtype=torch.float16).isfinite().all()
    small = ops.gemm_a4w4(a, b, of_a, of_b, dtype=torch.float16, alpha=2.0**-24)
    assert small.isfinite().all() and torch.allclose(small.float(), plain.float() * 2.0**-24, rtol=0.01)


def test_derivatives_by_the_bias_are_scaled_by_beta() -> None:
    a, b, of_a, of_b = four(5, 64)[0], four(24, 64)[0], torch.full((5, 2), 126).byte(), torch.full((24, 2), 126).byte()
    for alpha in (1.0, 0.5):
        bias = normal(24).requires_grad_()
        ops.gemm_a4w4(a, b, of_a, of_b, bias, torch.float32, alpha, 0.25).sum().backward()
        assert bias.grad is not None and torch.allclose(bias.grad, torch.full((24,), 5 * 0.25))


def test_the_operator_of_mxfp4_refuses_what_it_would_read_as_something_else() -> None:
    def call(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, out: Tensor) -> None:
        torch.ops.gemmtuned.mxfp4_mm(out, a, b, of_a, of_b, None)

    a, b, of_a, of_b = four(1, 64)[0], four(8, 64)[0], torch.full((1, 2), 126).byte(), torch.full((8, 2), 126).byte()
    out = torch.empty(1, 8)
    call(a, b, of_a, of_b, out)
    wide = four(8, 128)[0]
    for wrong in (
        (a, b, of_a.view(torch.float8_e8m0fnu), of_b, out), (a, b, of_a, torch.ones(8, 2), out),
        (a, b, of_a, of_b, torch.empty(5, 8)), (a, b, of_a, of_b, torch.empty(1, 8, dtype=torch.int32)),
        (a.view(torch.int8), b, of_a, of_b, out), (wide[:1], wide, of_a, of_b, out), (a[0], b, of_a, of_b, out),
    ):  # fmt: skip
        with pytest.raises(GemmtunedError, match="mxfp4_mm: a, b, their scales and out are"):
            call(*wrong)


def test_aiters_triton_op_of_mxfp4_writes_into_y() -> None:
    a, b, of_a, of_b = four(5, 64)[0], four(8, 64)[0], torch.full((5, 2), 126).byte(), torch.full((8, 2), 125).byte()
    right, y = ops.gemm_a4w4(a, b, of_a, of_b), torch.full((5, 8), torch.nan, dtype=torch.bfloat16)

    assert ops.gemm_afp4wfp4(a, b, of_a, of_b, torch.bfloat16, y, {"BLOCK_SIZE_M": 16}) is y and torch.equal(y, right)
    assert torch.equal(ops.gemm_afp4wfp4(a, b, of_a, of_b), right)
    with pytest.raises(GemmtunedError, match=r"y is \(8, 5\)"):
        ops.gemm_afp4wfp4(a, b, of_a, of_b, y=y.t())
    with pytest.raises(GemmtunedError, match="skip_reduce"):
        ops.gemm_afp4wfp4(a, b, of_a, of_b, skip_reduce=True)


def test_gpus_that_multiply_mxfp4_have_its_operator_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, rows in (
        ((0, 0), 0),
        ((7, 5), 0),
        ((8, 0), 2048),
        ((9, 0), 2048),
        ((10, 0), MAX_DIM),
        ((12, 0), MAX_DIM),
    ):
        monkeypatch.setattr(mxfp4, "capability", lambda index, found=found: found)
        assert mxfp4._most_rows(0) == rows, found


@pytest.mark.parametrize("kind", ["tensor", "row", "block", "int8"])
def test_a16w8(kind: str) -> None:
    x = normal(2, 3, 256).bfloat16()
    w = eight(160, 256, dtype=torch.int8 if kind == "int8" else E4M3)
    of_w = {"tensor": scales(1), "block": scales(2, 2)}.get(kind, scales(160, 1))
    wide = of_w.double() if kind != "block" else of_w.double().repeat_interleave(128, 0)[:160].repeat_interleave(128, 1)
    bias = normal(160)
    exact, size = product(x.double(), (w.double() * wide).float().bfloat16().double(), bias.bfloat16())
    assert is_near(ops.gemm_a16w8(x, w, of_w, bias), exact, size, torch.bfloat16)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("zeros", [False, True])
def test_a16w4_of_integers(group: int, zeros: bool) -> None:
    x, (w, codes) = normal(4, 256).half(), four(20, 256)
    of_w = scales(20, 256 // group)
    zero = torch.randint(0, 16, of_w.shape, generator=RANDOM).to(torch.uint8) if zeros else torch.full_like(of_w, 8)
    wide = (codes - zero.double().repeat_interleave(group, 1)) * of_w.double().repeat_interleave(group, 1)
    y = ops.gemm_a16w4(x, w, of_w, zero if zeros else None)
    assert is_near(y, *product(x.double(), wide), torch.float16)


def test_a16w4_of_mxfp4() -> None:
    x, (w, codes) = normal(1, 64).bfloat16(), four(8, 64)
    of_w = torch.tensor([[127, 120]] * 8, dtype=torch.uint8)
    wide = E2M1[codes] * torch.exp2(of_w.double() - 127).repeat_interleave(32, 1)
    assert is_near(ops.gemm_a16w4(x, w, of_w), *product(x.double(), wide), torch.bfloat16)


def test_batched() -> None:
    x, w, bias = normal(3, 4, 32).bfloat16(), normal(3, 8, 32).bfloat16(), normal(3, 1, 8).bfloat16()
    assert is_near(ops.batched_gemm_bf16(x, w, bias), *product(x.double(), w.double(), bias), torch.bfloat16)
    a, b, of_a, of_b = eight(3, 4, 32), eight(3, 8, 32), scales(3, 4, 1), scales(3, 1, 8)
    exact, size = product(a.double() * of_a.double(), b.double() * of_b.double().mT, bias)
    assert is_near(ops.batched_gemm_a8w8(a, b, of_a, of_b, bias), exact, size, torch.bfloat16)
    assert ops.batched_gemm_a8w8(a[:0], b[:0], of_a[:0], of_b[:0]).shape == (0, 4, 8)


def test_not_a_number_stays_one_and_no_operand_is_changed() -> None:
    x, w, of_x = eight(3, 64), eight(16, 64), scales(3, 1)
    x[1, 5], of_x[2] = torch.nan, torch.inf
    before = [t.clone() for t in (x.view(torch.uint8), w.view(torch.uint8), of_x)]
    y = ops.gemm_a8w8(x, w, of_x, torch.ones(16))
    assert not y[0].isnan().any() and y[1].isnan().all() and not y[2].isfinite().any()
    assert all(torch.equal(a, b) for a, b in zip(before, (x.view(torch.uint8), w.view(torch.uint8), of_x), strict=True))


CALLS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "a8w8 fp8": (ops.gemm_a8w8, (eight(4, 64), eight(32, 64), scales(4, 1), scales(1, 32))),
    "a8w8 int8": (
        ops.gemm_a8w8, (eight(4, 64, dtype=torch.int8), eight(32, 64, dtype=torch.int8), scales(1), scales(32)),
    ),
    "blockscale": (ops.gemm_a8w8_blockscale, (eight(4, 256), eight(32, 256), scales(4, 2), scales(1, 2))),
    "a4w4": (ops.gemm_a4w4, (four(4, 64)[0], four(32, 64)[0], *(torch.full((n, 2), 126).byte() for n in (4, 32)))),
    "a16w8": (ops.gemm_a16w8, (normal(4, 64).bfloat16(), eight(32, 64), scales(32, 1))),
    "a16w4": (ops.gemm_a16w4, (normal(4, 64).bfloat16(), four(32, 64)[0], scales(32, 2))),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_compiled_in_one_graph_is_eager(name: str) -> None:
    op, operands = CALLS[name]
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*operands), op(*operands))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert op(*map(mode.from_tensor, operands)).shape == (4, 32)


BATCHED = {
    f"batched {name}": (op, tuple(t.expand(2, *t.shape) for t in operands))
    for name, op, operands in (
        ("bf16", ops.batched_gemm_bf16, (CALLS["a16w8"][1][0], CALLS["a16w8"][1][1].bfloat16())),
        ("fp8", ops.batched_gemm_a8w8, CALLS["a8w8 fp8"][1]),
        ("int8", ops.batched_gemm_a8w8, (*CALLS["a8w8 int8"][1][:2], torch.ones(4, 1), torch.ones(1, 32))),
    )
}


@pytest.mark.parametrize("name", [*CALLS, *BATCHED])
def test_operands_without_values_give_a_result_without_values(name: str) -> None:
    op, operands = (CALLS | BATCHED)[name]
    want, found = op(*operands), op(*(t.to("meta") for t in operands))
    assert (found.shape, found.dtype, found.is_meta) == (want.shape, want.dtype, True)


@pytest.mark.parametrize("name", CALLS)
def test_no_rows_give_no_rows_eager_and_compiled(name: str) -> None:
    op, (x, w, *others) = CALLS[name]
    none = (x[:0], w, *(t[:0] if t.shape[0] == len(x) else t for t in others))
    for form in (op, torch.compile(op, backend="aot_eager", fullgraph=True)):
        y = form(*none)
        assert y.shape == (0, 32) and y.dtype == torch.bfloat16


X, W, ONE = eight(4, 64), eight(32, 64), torch.ones(1)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "K differs": (lambda: ops.gemm_a8w8(X, W[:, :32], ONE, ONE), r"\(4, 64\) and w \(32, 32\)"),
    "a scale too many": (lambda: ops.gemm_a8w8(X, W, torch.ones(5), ONE), r"x_scale is \(5,\).* one float or 4"),
    "a scale of another type": (lambda: ops.gemm_a8w8(X, W, torch.ones(4).int(), ONE), "x_scale is .*int32"),
    "types differ": (lambda: ops.gemm_a8w8(X, W.float().to(torch.int8), ONE, ONE), "int8 twice, or fp8"),
    "three dimensions": (lambda: ops.gemm_a8w8(X[None], W, ONE, ONE), r"expected \[M, K\]"),
    "a result of 8 bits": (lambda: ops.gemm_a8w8(X, W, ONE, ONE, None, E4M3), "dtype is torch.float8"),
    "bias": (lambda: ops.gemm_a8w8(X, W, ONE, ONE, torch.ones(31)), r"bias is \(31,\) of .*, expected \[32\]"),
    "block scales": (lambda: ops.gemm_a8w8_blockscale(X, W, torch.ones(4, 2), ONE[None]), r"expected \[4, 1\]"),
    "blocks of int8": (
        lambda: ops.gemm_a8w8_blockscale(X.float().char(), W.float().char(), ONE, ONE), "expected an fp8",
    ),
    "4-bit type": (lambda: ops.gemm_a4w4(X, W, ONE, ONE), "of torch.uint8"),
    "4-bit scale": (
        lambda: ops.gemm_a4w4(four(4, 64)[0], four(8, 64)[0], torch.ones(4, 2), ONE), r"\[4, 64 / 32\] of bytes",
    ),
    "16-bit K": (lambda: ops.gemm_a16w4(normal(3, 62).half(), four(8, 64)[0], torch.ones(8, 2)), "K = 64"),
    "groups": (lambda: ops.gemm_a16w4(normal(3, 64).half(), four(8, 64)[0], torch.ones(8, 3)), r"\[8, 64 / group\]"),
    "batches": (lambda: ops.batched_gemm_bf16(normal(2, 3, 4), normal(3, 5, 4)), r"\[B, M, K\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_operands_are_named(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(GemmtunedError, match=message):
        call()


BAD_COMPILED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "K differs": (ops.gemm_a8w8, (X, W[:, :32], ONE, ONE), r"\(4, 64\) and w \(32, 32\)"),
    "a scale too many": (ops.gemm_a8w8, (X, W, torch.ones(5), ONE), r"x_scale is \(5,\).* one float or 4"),
    "of int8": (ops.gemm_a8w8, (X.float().char(), W.float().char(), ONE, torch.ones(31)), r"w_scale is \(31,\)"),
    "block scales": (ops.gemm_a8w8_blockscale, (X, W, torch.ones(4, 2), ONE[None]), r"expected \[4, 1\]"),
    "K of a16w8": (ops.gemm_a16w8, (normal(3, 62).half(), W, ONE), r"\(3, 62\) and w \(32, 64\)"),
    "groups": (ops.gemm_a16w4, (normal(3, 64).half(), four(8, 64)[0], torch.ones(8, 3)), r"\[8, 64 / group\]"),
}


@pytest.mark.parametrize("name", BAD_COMPILED)
def test_bad_operands_are_named_where_the_op_is_compiled(name: str) -> None:
    op, operands, message = BAD_COMPILED[name]
    with pytest.raises(GemmtunedError, match=message):
        torch.compile(op, backend="aot_eager")(*operands)


@pytest.mark.parametrize("bias", [False, True])
def test_the_operator_of_a_quantised_weight_gives_what_the_ops_give(bias: bool) -> None:
    x, added = torch.randn(3, 256).bfloat16(), torch.randn(130).bfloat16() if bias else None
    codes, w = torch.randint(0, 256, (130, 128), dtype=torch.uint8), torch.randint(-9, 9, (130, 256)).to(torch.int8)
    powers, groups = torch.randint(120, 130, (130, 8), dtype=torch.uint8), torch.rand(130, 4) + 0.5
    rows, blocks = torch.rand(130, 1) + 0.5, torch.rand(2, 2) + 0.5
    for values, scales in ((codes, powers), (codes, groups), (w, rows), (w, blocks), (w, rows[:1])):
        op = ops.gemm_a16w4 if values is codes else ops.gemm_a16w8
        expected = op(x, values, scales, bias=added)
        y = torch.empty_like(expected)
        torch.ops.gemmtuned.weight_only_mm(y, x, values, scales, added)
        assert torch.equal(y, expected)
