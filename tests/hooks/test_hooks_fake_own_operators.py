"""Our own operators on a GPU whose driver is a fake: kernels serve what they take, engines keep theirs."""

from __future__ import annotations

from typing import Any

import pytest
from fake_families import ENGINE, OPERANDS, SCALED


def test_the_record_of_our_own_kernel_takes_the_calls_it_is_for(run: Any) -> None:
    said = run(
        OPERANDS,
        SCALED,
        """
    from gemmtuned.kernels.cuda.scaled_one_shot import scaled_one_shot
    record = scaled_one_shot({"rows": 8, "parts": 1, "tokens": 16, "halves": 1}, problem).launch
    record.check_for(problem)
    served(problem, record, 5, packed.kernel_launch(record, 0x3001, 2))
    print(json.dumps(check(lambda: calls("cuLaunchKernel"))))
    """,
    )
    assert said == [True, [True, True, True], ["scaled exact 3", "scaled miss 1"], 3, []]


def test_our_own_operator_of_int8_is_served_by_a_kernel_and_an_engines_is_left_to_it(run: Any) -> None:
    """The fake kernel reads the same bytes as e4m3, so its result is none that int8 could have by another way."""
    said = run(
        OPERANDS,
        SCALED,
        ENGINE,
        """
    import gemmtuned.ops
    from gemmtuned.kernels.cuda.scaled_fragments import scaled_fragments
    problem = replace(problem, dtype="i8", wdtype="i8")
    config = {"rows": 8, "tokens": 4, "parts": 1, "warps": 1, "ahead": 1, "resident": 1}
    record = scaled_fragments(config, problem).launch
    record.check_for(problem)
    served(problem, record, 5, packed.kernel_launch(record, 0x3001, 2))
    for one in operators():
        if one.name in ("_C::cutlass_scaled_mm", "gemmtuned::int8_scaled_mm"):
            hook.stand_before(one.name, one.schema, one.arguments, one.code)
    ix, iw = to_gpu(x8.view(torch.int8), w8.view(torch.int8))
    out, other = to_gpu(*torch.zeros(2, 4, 8, dtype=torch.bfloat16))
    torch.ops.gemmtuned.int8_scaled_mm(out, ix, iw.t(), gsx, gsw.t(), None)
    same, launched = torch.equal(host(out), right), calls("cuLaunchKernel")
    torch.ops._C.cutlass_scaled_mm(other, ix, iw.t(), gsx, gsw.t(), None)
    print(json.dumps([same, launched, stock, outcomes(), calls("cuLaunchKernel") - launched, hook.failures()]))
    """,
    )
    assert said == [True, 1, [6], ["scaled exact 1", "scaled miss 1"], 0, []]


@pytest.mark.parametrize("of_rows", [True, False])
def test_zero_points_are_passed_to_a_kernel_from_our_own_operator_and_an_engines_is_left_to_it(
    run: Any, of_rows: bool
) -> None:
    """The fake kernel knows of none: it is launched with the arguments of one without, at its places."""
    said = run(
        OPERANDS,
        SCALED,
        ENGINE,
        f"    of_rows = {of_rows}",
        """
    import gemmtuned.ops
    from gemmtuned.kernels.cuda.scaled_fragments import scaled_fragments
    problem = replace(problem, dtype="i8", wdtype="i8", scale="row+zero" if of_rows else "tensor+zero", wscale="row")
    config = {"rows": 8, "tokens": 4, "parts": 1, "warps": 1, "ahead": 1, "resident": 1}
    record = scaled_fragments(config, problem).launch
    record.check_for(problem)
    places = [record.arguments.index(name) for name in ("sums_w.ptr", "zero_x.ptr") if name in record.arguments]
    plain = tuple(a for i, a in enumerate(record.arguments) if i not in (4, 5))
    served(problem, record, 5, packed.kernel_launch(replace(record, arguments=plain), 0x3001, 2))
    engine.define("cutlass_scaled_mm_azp(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, "
                  "Tensor azp_adj, Tensor? azp, Tensor? bias) -> ()")
    engine.impl("cutlass_scaled_mm_azp", lambda *given: stock.append(len(given)), "CUDA")
    for one in operators():
        if one.sums_w:
            hook.stand_before(one.name, one.schema, one.arguments, one.code)
    ix, iw, sums, zero = to_gpu(x8.view(torch.int8), w8.view(torch.int8), torch.ones(8).int(), torch.ones(4).int())
    gsx, zero = (gsx, zero) if of_rows else (gsx[:1, 0], None)
    out, other = to_gpu(*torch.zeros(2, 4, 8, dtype=torch.bfloat16))
    ours = torch.ops.gemmtuned.int8_scaled_mm_zero
    ours(out, ix, iw.t(), gsx, gsw.t(), sums, zero, None)
    launched = calls("cuLaunchKernel")
    torch.ops._C.cutlass_scaled_mm_azp(other, ix, iw.t(), gsx, gsw.t(), sums, zero, None)
    wrong = [hook.failures(), outcomes(), calls("cuLaunchKernel") - launched, stock]
    try:  # sums on the host: torch's own says what it thinks of them, and no kernel is given their address
        ours(out, ix, iw.t(), gsx, gsw.t(), torch.ones(8).int(), zero, None)
    except (RuntimeError, NotImplementedError):
        pass
    wrong.append(calls("cuLaunchKernel") - launched)
    print(json.dumps([launched, places, *wrong]))
    """,
    )
    assert said == [1, [5, 4] if of_rows else [5], [], ["scaled exact 1", "scaled miss 1"], 0, [8], 0]


def test_a_shuffled_weight_is_served_by_kernels_of_its_own_key(run: Any) -> None:
    """The fake kernel reads W as if it were plain, so W is of equal rows of equal halves: any order is right."""
    said = run(
        OPERANDS,
        ENGINE,
        """
    import gemmtuned.ops
    from gemmtuned.kernels.cuda.scaled_fragments import scaled_fragments
    x8, w8 = torch.randint(-2, 3, (4, 32), dtype=torch.int8), torch.full((16, 32), 3, dtype=torch.int8)
    sx, sw = torch.exp2(torch.randint(-2, 3, (4, 1)).float()), torch.exp2(torch.randint(-2, 3, (16, 1)).float())
    right = ((x8.float() * sx) @ (w8.float() * sw).t()).bfloat16()
    problem = Problem(family="scaled", m=4, n=16, k=32, dtype="i8", out_dtype="bf16", scale="row",
                      weight_state="shuffled", math_mode="ieee")
    config = {"rows": 8, "tokens": 4, "parts": 1, "warps": 1, "ahead": 1, "resident": 1}
    record = scaled_fragments(config, problem).launch
    record.check_for(problem)
    served(problem, record, 5, packed.kernel_launch(record, 0x3001, 2))
    for one in operators():
        if one.name in ("gemmtuned::int8_scaled_mm", "gemmtuned::shuffled_scaled_mm"):
            hook.stand_before(one.name, one.schema, one.arguments, one.code)
    gx, gw, gsx, gsw = to_gpu(x8, w8, sx, sw)
    out, other, gap = to_gpu(*torch.zeros(3, 4, 16, dtype=torch.bfloat16))
    torch.ops.gemmtuned.shuffled_scaled_mm(out, gx, gw.t(), gsx, gsw.t(), None)
    launched = calls("cuLaunchKernel")
    keys = sorted(f"{s.problem} {s.outcome}" for s in hook.drain() if s.place != "cpu")
    print(json.dumps([launched, keys, hook.failures()]))
    """,
    )
    assert said == [1, ["scaled:i8>bf16:4x16x32,scale=row,weight=shuffled exact"], []]


@pytest.mark.parametrize("m", [1, 4])
def test_our_own_operator_of_blocks_is_served_as_its_scales_lie_and_with_sums_that_torch_has(run: Any, m: int) -> None:
    """An engine's of the same operands may have the tensor core's own sums, which is another problem."""
    said = run(
        OPERANDS,
        ENGINE,
        f"    m = {m}",
        """
    import gemmtuned.ops
    from gemmtuned.kernels.cuda.scaled_fragments import scaled_fragments
    x8 = torch.randint(-2, 3, (m, 256)).to(torch.float8_e4m3fn)
    w8 = torch.randint(-2, 3, (8, 256)).to(torch.float8_e4m3fn)
    sx, sw = torch.full((m, 2), 4.0), torch.full((8, 2), 0.5)[:1]  # the fake kernel reads one a row, of eight rows
    right = (x8.float() @ w8.float().t() * 2).bfloat16()
    problem = Problem(family="scaled", m=m, n=8, k=256, dtype="fp8_e4m3", out_dtype="bf16", scale="1x128",
                      math_mode="ieee")
    config = {"rows": 8, "tokens": 4, "parts": 1, "warps": 1, "ahead": 2, "resident": 1}
    record = scaled_fragments(config, problem).launch
    record.check_for(problem)
    record = replace(record, arguments=record.arguments[:-2])  # how far scales are apart
    served(problem, record, 5, packed.kernel_launch(record, 0x3001, 2))
    for one in operators():
        if one.name in ("_C::cutlass_scaled_mm", "gemmtuned::block_scaled_mm"):
            hook.stand_before(one.name, one.schema, one.arguments, one.code)
    cuda.fake_shape(8, 256, 1.0)
    gx8, gw8, gsx, gsw = to_gpu(x8, w8, sx, sw)
    out, other = to_gpu(*torch.zeros(2, m, 8, dtype=torch.bfloat16))
    torch.ops.gemmtuned.block_scaled_mm(out, gx8, gw8.t(), gsx, gsw.t())
    same, launched = torch.equal(host(out), right), calls("cuLaunchKernel")
    torch.ops._C.cutlass_scaled_mm(other, gx8, gw8.t(), gsx, gsw.t(), None)
    keys = sorted(f"{s.problem} {s.outcome}" for s in hook.drain() if s.place != "cpu")
    print(json.dumps([same, launched, stock, keys, calls("cuLaunchKernel") - launched, hook.failures()]))
    """,
    )
    key = f"scaled:fp8_e4m3>bf16:{m}x8x256,scale=1x128"
    assert said == [True, 1, [6], [f"{key} exact", f"{key},math=reduced miss"], 0, []]


def test_our_own_operator_of_a_quantised_weight_is_served_by_a_kernel_where_it_fits(run: Any) -> None:
    said = run(
        OPERANDS,
        """
    from gemmtuned.hooks.engine_operators import operators
    from gemmtuned.ops import gemm_a16w4
    x = torch.randint(-2, 3, (4, 32)).bfloat16()
    w, s = torch.randint(0, 256, (8, 16), dtype=torch.uint8), torch.exp2(torch.randint(-2, 3, (8, 1)).float())
    right = gemm_a16w4(x, w, s)
    gx, gw, gs = to_gpu(x, w, s)
    problem = Problem(family="weight_only", m=4, n=8, k=32, dtype="bf16", wdtype="i4", wscale="1x32",
                      wscale_dtype="fp32", math_mode="reduced")
    record = KernelLaunch(
        shared=0, threads=32, grid=(Axis("w.size0", 8), Axis("", 1), Axis("", 1)),
        arguments=("x.ptr", "w.ptr", "scale_w.ptr", "y.ptr", "x.size0", "x.stride0", "w.stride0"),
        conditions=(Condition("x.size0", "<=", 4), Condition("x.stride1", "==", 1), Condition("w.size1", "==", 16),
                    Condition("scale_w.size0", "==", 8), Condition("scale_w.size1", "==", 1)),
    )
    record.check_for(problem)
    served(problem, record, 5, packed.kernel_launch(record, 0x3003, 2))
    one = next(one for one in operators() if one.name == "gemmtuned::weight_only_mm")
    hook.stand_before(one.name, one.schema, one.arguments, one.code)
    cuda.fake_shape(8, 32, 1.0)
    [out] = to_gpu(torch.zeros(4, 8, dtype=torch.bfloat16))
    torch.ops.gemmtuned.weight_only_mm(out, gx, gw, gs, None)
    same = torch.equal(host(out), right)
    launched = calls("cuLaunchKernel")
    two = x.clone(), w.clone(), torch.full((8, 1), 127, dtype=torch.uint8)
    y = torch.zeros(4, 8, dtype=torch.bfloat16)
    torch.ops.gemmtuned.weight_only_mm(y, *two, None)  # on the CPU, and of MXFP4
    cpu = [str(s.problem).partition(",threads")[0] for s in hook.drain() if s.place == "cpu"]
    print(json.dumps([same, launched, torch.equal(y, gemm_a16w4(*two)), cpu, hook.failures()]))
    """,
    )
    assert said == [True, 1, True, ["weight_only:bf16/fp4_e2m1:4x8x32,wscale=1x32"], []]


def test_our_own_operator_of_two_operands_of_4_bits_is_served_by_a_kernel_where_it_fits(run: Any) -> None:
    said = run(
        OPERANDS,
        """
    from gemmtuned.hooks.engine_operators import operators
    from gemmtuned.ops import gemm_a4w4
    both = torch.tensor([1, 16])[:, None, None]
    x, w = ((torch.randint(0, 3, (2, rows, 16)) * both).sum(0).byte() for rows in (4, 8))
    w |= 0x80 * torch.randint(0, 2, w.shape, dtype=torch.uint8)  # of either sign; bf16 holds each sum
    sx, sw = (torch.randint(126, 129, (rows, 1), dtype=torch.uint8) for rows in (4, 8))
    right = gemm_a4w4(x, w, sx, sw)
    gx, gw, gsx, gsw = to_gpu(x, w, sx, sw)
    problem = Problem(family="scaled", m=4, n=8, k=32, dtype="fp4_e2m1", out_dtype="bf16", scale="1x32")
    record = KernelLaunch(
        shared=0, threads=32, grid=(Axis("w.size0", 8), Axis("", 1), Axis("", 1)),
        arguments=("x.ptr", "w.ptr", "scale_x.ptr", "scale_w.ptr", "y.ptr", "x.size0", "x.stride0", "w.stride0"),
        conditions=(Condition("x.size0", "<=", 4), Condition("x.stride1", "==", 1), Condition("w.size1", "==", 16),
                    Condition("scale_x.size0", "==", "x.size0"), Condition("scale_w.size0", "==", 8)),
    )
    record.check_for(problem)
    served(problem, record, 5, packed.kernel_launch(record, 0x3006, 2))
    one = next(one for one in operators() if one.name == "gemmtuned::mxfp4_mm")
    hook.stand_before(one.name, one.schema, one.arguments, one.code)
    cuda.fake_shape(8, 32, 1.0)
    [out] = to_gpu(torch.zeros(4, 8, dtype=torch.bfloat16))
    torch.ops.gemmtuned.mxfp4_mm(out, gx, gw, gsx, gsw, None)
    same = torch.equal(host(out), right)
    launched = calls("cuLaunchKernel")
    y = torch.zeros(4, 8, dtype=torch.bfloat16)
    torch.ops.gemmtuned.mxfp4_mm(y, x, w, sx, sw, None)  # on the CPU
    for other in ((x, w, sx.short(), sw), (x[:, :8], w, sx, sw), (x, w, sx[:3], sw)):  # none that has a key
        with suppress(Exception):
            torch.ops.gemmtuned.mxfp4_mm(y.clone(), *other, None)
    cpu = [str(s.problem).partition(",threads")[0] for s in hook.drain()
           if s.place == "cpu" and s.problem.family == "scaled"]  # a product of the numbers is dense
    print(json.dumps([same, launched, torch.equal(y, right), cpu, hook.failures()]))
    """,
    )
    assert said == [True, 1, True, ["scaled:fp4_e2m1>bf16:4x8x32,scale=1x32"], []]
