"""gemm_a8w8 with zero points: exact in whole numbers, compiled and eager; bad operands are named; the hook's keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hooked import Home
from torch import Tensor

from gemmtuned import ops
from gemmtuned.configs.errors import GemmtunedError, ProblemError
from gemmtuned.configs.problem import Problem

RANDOM = torch.Generator().manual_seed(11)
ONE = torch.ones(1)


def codes(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=dtype, generator=RANDOM)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape, generator=RANDOM) * 2.0**-6 + 2.0**-8


def expected(
    x: Tensor, w: Tensor, of_x: Tensor, of_w: Tensor, less: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """less: zero points [M, 1], or one; each step rounded as torch rounds it."""
    whole = (x.long() - less.long()) @ w.long().t()
    assert whole.abs().max() < 1 << 31 if whole.numel() else True
    steps = whole.float() * of_w.reshape(1, -1) * of_x.reshape(-1, 1)
    return (steps if bias is None else steps + bias).to(dtype)


SHAPES = [(1, 48, 64), (5, 40, 256), (33, 7, 9), (0, 16, 32)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["tensor", "row", "mixed"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_zero_points_of_rows_and_of_the_tensor(m: int, n: int, k: int, kind: str, dtype: torch.dtype) -> None:
    x, w = codes(m, k), codes(n, k)
    of_x = scales(1) if kind != "row" else scales(m, 1)
    of_w = scales(1) if kind == "tensor" else scales(1, n)
    of_rows, of_all, sums = codes(m, dtype=torch.int32), codes(1, dtype=torch.int32), w.sum(1, dtype=torch.int32)
    for bias in (None, torch.randn(n, generator=RANDOM).to(dtype)):

        def op(bias: Tensor | None = bias, **zero: Tensor) -> Tensor:
            return ops.gemm_a8w8(x, w, of_x, of_w, bias, dtype, **zero)

        right = expected(x, w, of_x, of_w, of_rows[:, None], bias, dtype)
        for given in ({}, {"w_sums": sums}, {"w_sums": sums[None]}):
            assert torch.equal(op(x_zero=of_rows, **given), right)
        assert torch.equal(op(x_zero=of_rows[:, None].to(torch.int8)), right)
        right = expected(x, w, of_x, of_w, of_all, bias, dtype)
        assert torch.equal(op(x_zero=of_all), right)
        assert torch.equal(op(w_sums=sums * of_all), right), "the zero point is in the sums"
        assert torch.equal(op(x_zero=torch.zeros_like(of_all)), op())


def test_whole_numbers_are_exact_up_to_the_largest() -> None:
    """fp32 holds none of these sums."""
    x, w = torch.full((3, 65536), -128, dtype=torch.int8), torch.full((8, 65536), -128, dtype=torch.int8)
    w[:, :8] = torch.arange(8, dtype=torch.int8)[:, None]
    zero = torch.tensor([127, 126, -128], dtype=torch.int32)
    y = ops.gemm_a8w8(x, w, ONE, ONE, dtype=torch.float32, x_zero=zero)
    whole = (x.long() - zero[:, None]) @ w.long().t()
    assert torch.equal(y.double(), whole.float().double()) and whole.abs().max() > 1 << 30


CALLS: dict[str, dict[str, Tensor]] = {
    "rows": {"x_zero": codes(4, dtype=torch.int32), "w_sums": codes(32, dtype=torch.int32)},
    "one": {"x_zero": codes(1)},
    "in the sums": {"w_sums": codes(32, dtype=torch.int32)},
}


@pytest.mark.parametrize("name", CALLS)
def test_compiled_in_one_graph_is_eager(name: str) -> None:
    operands = codes(4, 64), codes(32, 64), scales(4 if name == "rows" else 1), scales(32)

    def op(*given: Tensor) -> Tensor:
        return ops.gemm_a8w8(*given, **CALLS[name])

    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*operands), op(*operands))
    zero = {key: t.to("meta") for key, t in CALLS[name].items()}
    found = ops.gemm_a8w8(*(t.to("meta") for t in operands), **zero)
    assert (found.shape, found.dtype, found.is_meta) == ((4, 32), torch.bfloat16, True)


@pytest.mark.parametrize("of_rows", [True, False])
def test_the_operator_is_what_the_op_runs(of_rows: bool) -> None:
    x, w, of_x, of_w = codes(4, 64), codes(24, 64), scales(4, 1) if of_rows else scales(1), scales(1, 24)
    sums, zero = w.sum(1, dtype=torch.int32), codes(4, dtype=torch.int32) if of_rows else None
    given = torch.empty(4, 24, dtype=torch.float16), x, w.t(), of_x, of_w, sums, zero, None
    torch.ops.gemmtuned.int8_scaled_mm_zero(*given)
    assert torch.equal(given[0], ops.gemm_a8w8(x, w, of_x, of_w, None, torch.float16, x_zero=zero, w_sums=sums))
    torch.library.opcheck(torch.ops.gemmtuned.int8_scaled_mm_zero.default, given, test_utils="test_faketensor")


def test_each_of_a_batch_by_vmap_has_its_own_zero_points() -> None:
    x, w, zero = codes(4, 64), codes(24, 64), codes(3, 4, dtype=torch.int32)
    sums = w.sum(1, dtype=torch.int32)

    def op(zero: Tensor) -> Tensor:
        return ops.gemm_a8w8(x, w, ONE, ONE, dtype=torch.float32, x_zero=zero, w_sums=sums)

    assert torch.equal(torch.vmap(op)(zero), torch.stack([op(one) for one in zero]))


X, W = codes(4, 64), codes(32, 64)
E4M3 = X.float().to(torch.float8_e4m3fn), W.float().to(torch.float8_e4m3fn)
INT = torch.int32
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "one too many": (
        lambda: ops.gemm_a8w8(X, W, ONE, ONE, x_zero=torch.ones(5, dtype=INT)),
        r"gemm_a8w8: x_zero is \(5,\) of torch.int32, expected one integer or 4 of torch.int8 or torch.int32",
    ),
    "a row of a matrix": (
        lambda: ops.gemm_a8w8(X, W, ONE, ONE, x_zero=torch.ones(2, 2, dtype=INT)), r"x_zero is \(2, 2\)",
    ),
    "floats": (lambda: ops.gemm_a8w8(X, W, ONE, ONE, x_zero=torch.ones(4)), "x_zero is .* of torch.float32"),
    "codes without a sign": (lambda: ops.gemm_a8w8(X, W, ONE, ONE, x_zero=torch.ones(4).byte()), "of torch.uint8"),
    "a Python number": (lambda: ops.gemm_a8w8(X, W, ONE, ONE, x_zero=3), "x_zero is 3, expected a tensor"),  # type: ignore[arg-type]
    "one sum": (
        lambda: ops.gemm_a8w8(X, W, ONE, ONE, w_sums=torch.ones(1, dtype=INT)),
        r"gemm_a8w8: w_sums is \(1,\) of torch.int32, expected 32 of torch.int32, one for each row",
    ),
    "sums of 64 bits": (lambda: ops.gemm_a8w8(X, W, ONE, ONE, w_sums=W.sum(1)), "w_sums is .* of torch.int64"),
    "sums of 8 bits": (lambda: ops.gemm_a8w8(X, W, ONE, ONE, w_sums=codes(32)), "w_sums is .* of torch.int8"),
    "elsewhere": (
        lambda: ops.gemm_a8w8(X, W, ONE, ONE, x_zero=torch.ones(4, dtype=INT, device="meta")), "x_zero is on meta",
    ),
    "fp8": (
        lambda: ops.gemm_a8w8(*E4M3, ONE, ONE, x_zero=torch.ones(4, dtype=INT)),
        "with XQ of torch.float8_e4m3fn, zero points are of torch.int8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_zero_points_are_named(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(GemmtunedError, match=message):
        call()


HOOKED = """
    import json
    import torch
    from gemmtuned import ops
    from gemmtuned.hooks import activate

    torch.set_num_threads(1)
    torch.mm(torch.ones(4, 16), torch.ones(16, 8))
    hook = activate.current()
    hook.patches.look_for_foreign()
    list(hook.native.drain())
    x, w = torch.ones(4, 64).char(), torch.ones(24, 64).char()
    one, rows, columns, sums = torch.ones(1), torch.ones(4, 1), torch.ones(1, 24), torch.full((24,), 64).int()
    zero, seen = torch.ones(4).int(), []

    def call(rows_of_x, *scales, **zero):
        y = ops.gemm_a8w8(x[:rows_of_x], w, *scales, **zero)
        seen.append([y.unique().tolist(), *(str(s.problem) for s in hook.native.drain() for _ in range(s.calls))])
"""


def test_each_form_is_counted_as_a_problem_of_its_own_eager_and_compiled(home: Home) -> None:
    done = home.compiling().run(
        HOOKED
        + """
    call(4, rows, columns)
    call(4, rows, columns, x_zero=zero, w_sums=sums)
    call(1, rows[:1], columns, x_zero=zero[:1], w_sums=sums)
    call(4, one, columns, x_zero=zero, w_sums=sums)  # by rows, which serves a mixture too
    call(4, one, columns, w_sums=sums)
    call(1, one, columns, w_sums=sums)
    call(4, one, one, w_sums=sums, bias=torch.ones(24))
    call(4, rows, columns, w_sums=sums)  # as one zero point a row
    compiled = torch.compile(lambda x: ops.gemm_a8w8(x, w, rows, columns, x_zero=zero, w_sums=sums),
                             backend="aot_eager", fullgraph=True)
    compiled(x), compiled(x)
    seen.append([str(s.problem) for s in hook.native.drain() for _ in range(s.calls)])
    print(json.dumps(seen))
    """,
        GEMMTUNED_FLUSH_S="1000",
    )
    by_rows = "scaled:i8>bf16:4x24x64,scale=row+zero,threads=1"
    by_tensor = "scaled:i8>bf16:4x24x64,scale=tensor+zero,wscale=row,threads=1"
    assert done.said == [
        [[64.0], by_rows.replace("+zero", "")],
        [[0.0], by_rows],
        [[0.0], by_rows.replace("4x24", "1x24")],
        [[0.0], by_rows],
        [[0.0], by_tensor],
        [[0.0], by_tensor.replace("4x24", "1x24")],
        [[1.0], "scaled:i8>bf16:4x24x64+bias,scale=tensor+zero,threads=1"],
        [[0.0], by_rows],
        [by_rows, by_rows],
    ]


def test_zero_points_of_w_are_of_no_key_and_int4_with_them_is_counted_as_the_dense_product_that_it_is(
    home: Home,
) -> None:
    with pytest.raises(ProblemError, match="Zero points are those of X"):
        Problem.parse("scaled:i8>bf16:8x64x256,scale=row,wscale=row+zero")
    code = """
    import json, torch, gemmtuned
    from gemmtuned import ops
    torch.set_num_threads(1)
    x, w = torch.randn(3, 256).bfloat16(), torch.randint(0, 256, (48, 128)).byte()
    scale, zeros = torch.rand(48, 2) / 8, torch.randint(0, 16, (48, 2)).float()
    codes = torch.stack([w & 15, w >> 4], -1).view(48, 256).float()
    values = (codes - zeros.repeat_interleave(128, 1)) * scale.repeat_interleave(128, 1)
    y = ops.gemm_a16w4(x, w, scale, zeros)
    print(json.dumps(torch.allclose(y, torch.nn.functional.linear(x, values.bfloat16()), rtol=0.02, atol=0.5)))
    """
    done = home.run(code)
    assert done.said is True, done
    assert home.counts() == {("bf16:3x48x256,threads=1", "miss"): 2}
