"""Engines' operators on the fake driver: a solution serves their calls where it has won over their own kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_cuda_build import PRELUDE
from fake_families import ENGINE, OPERANDS, SCALED
from hooked import Home

from gemmtuned.configs.engine_races import FIRST_OF_GOOD, OPERATORS

CUTLASS = 1 + OPERATORS.index("_C::cutlass_scaled_mm")
AZP = 1 + OPERATORS.index("_C::cutlass_scaled_mm_azp")
LOST, AS_GOOD = 1 << CUTLASS, 1 << FIRST_OF_GOOD + CUTLASS
UNFIT = 1  # the bit of operands that a route does not take
STANDING = """
    def stand(name):
        [one] = [operator for operator in operators() if operator.name == name]
        return hook.stand_before(one.name, one.schema, one.arguments, one.code)

    def told():
        seen = [s for s in hook.drain() if s.problem.family == "scaled"]
        return sorted(f"{s.outcome} {s.calls}" for s in seen), sum(s.unserved for s in seen)
"""
SGLANG = """
    sgl, made = torch.library.Library("sgl_kernel", "FRAGMENT"), []
    scaled = "(Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, ScalarType out_dtype, Tensor? bias)"
    for name in ("fp8_scaled_mm", "int8_scaled_mm"):
        sgl.define(f"{name}{scaled} -> Tensor")
        sgl.impl(name, lambda a, b, sa, sb, out, bias: made.append(1) or a.new_empty(4, 8, dtype=out), "CUDA")
"""


@pytest.fixture
def run(home: Home, fakes: Path) -> Any:
    def program(*code: str) -> Any:
        whole = PRELUDE + OPERANDS + SCALED + "".join(code)
        return home.run(whole, str(fakes), ".", GEMMTUNED="0", AITER_TUNE_GEMM="0").said

    return program


def test_an_engines_operator_whose_kernel_has_lost_is_routed_into_its_own_result(run: Any) -> None:
    """The same key as torch's own product with fast sums; what does not fit is left to the engine."""
    said = run(
        ENGINE,
        STANDING,
        f"    engines = {LOST}",
        """
    problem = replace(problem, math_mode="reduced")
    served(problem, *library(problem, *sizes, scale_x="row", scale_w="row", fast=True), engines=engines)
    stands = [stand("_C::cutlass_scaled_mm") for _ in range(2)]
    out = torch.ops.fake.on_gpu(torch.zeros(4, 8, dtype=torch.bfloat16))
    f = torch.ops._C.cutlass_scaled_mm
    gave = [f(out, gx8, gw8.t(), gsx, gsw.t(), None) for _ in range(3)]
    same = torch.equal(host(out), right)
    f(out, gx8[:2], gw8.t(), gsx[:2], gsw.t(), None)  # another size: the engine's own
    biased = replace(problem, bias=True)
    served(biased, *library(biased, *sizes, scale_x="row", scale_w="row", fast=True), engines=engines)
    f(out, gx8, gw8.t(), gsx, gsw.t(), torch.ops.fake.on_gpu(torch.ones(8)))  # a bias of another type as well
    print(json.dumps([stands, gave, same, stock, told(), calls("cublasLtMatmul"), hook.failures()]))
    """,
    )
    assert said == [
        [["CUDA _C::cutlass_scaled_mm"]] * 2,
        [None] * 3,
        True,
        [6, 6],
        [["exact 3", "miss 1", "miss 1"], UNFIT],
        3,
        [],
    ]


@pytest.mark.parametrize(
    ("engines", "seen"),
    [(0, [["exact 2", "miss 3"], LOST]), (AS_GOOD, [["exact 5"], 0]), (1 << AZP, [["exact 2", "miss 3"], LOST])],
)
def test_torchs_own_product_of_the_same_problem_is_served_where_the_engines_is_not(
    run: Any, engines: int, seen: Any
) -> None:
    """One table, one key, in turns: the engine's kernel was not raced, is as good, or another one has lost."""
    said = run(
        ENGINE,
        STANDING,
        f"    engines = {engines}",
        """
    problem = replace(problem, math_mode="reduced")
    served(problem, *library(problem, *sizes, scale_x="row", scale_w="row", fast=True), engines=engines)
    stand("_C::cutlass_scaled_mm")
    out = torch.ops.fake.on_gpu(torch.zeros(4, 8, dtype=torch.bfloat16))
    same = []
    for at in range(5):
        if at % 2:
            same.append(torch.equal(host(of_v1(use_fast_accum=True)), right))
        else:
            torch.ops._C.cutlass_scaled_mm(out, gx8, gw8.t(), gsx, gsw.t(), None)
    print(json.dumps([same, stock, told(), told(), calls("cublasLtMatmul"), hook.failures()]))
    """,
    )
    assert said == [[True, True], [6, 6, 6], seen, [[], 0], 2, []]


@pytest.mark.parametrize("lost", [True, False])
def test_an_engines_int8_is_served_where_its_kernel_has_lost(run: Any, lost: bool) -> None:
    said = run(
        ENGINE,
        STANDING,
        f"    engines = {LOST if lost else 0}",
        """
    from gemmtuned.kernels.cuda.scaled_fragments import scaled_fragments
    problem = replace(problem, dtype="i8", wdtype="i8")
    config = {"rows": 8, "tokens": 4, "parts": 1, "warps": 1, "ahead": 1, "resident": 1}
    record = scaled_fragments(config, problem).launch
    served(problem, record, 5, packed.kernel_launch(record, 0x3001, 2), engines=engines)
    stand("_C::cutlass_scaled_mm")
    ix, iw = to_gpu(x8.view(torch.int8), w8.view(torch.int8))
    (out,) = to_gpu(torch.zeros(4, 8, dtype=torch.bfloat16))
    torch.ops._C.cutlass_scaled_mm(out, ix, iw.t(), gsx, gsw.t(), None)
    print(json.dumps([torch.equal(host(out), right), stock, told(), calls("cuLaunchKernel"), hook.failures()]))
    """,
    )
    assert said == ([True, [], [["exact 1"], 0], 1, []] if lost else [False, [6], [["miss 1"], LOST], 0, []])


@pytest.mark.parametrize("lost", [True, False])
def test_an_engines_zero_points_are_passed_to_a_kernel_where_its_own_has_lost(run: Any, lost: bool) -> None:
    """The fake kernel knows of none: it is launched with the arguments of one without."""
    said = run(
        ENGINE,
        STANDING,
        f"    engines = {1 << AZP if lost else 0}",
        """
    from gemmtuned.kernels.cuda.scaled_fragments import scaled_fragments
    problem = replace(problem, dtype="i8", wdtype="i8", scale="row+zero", wscale="row")
    config = {"rows": 8, "tokens": 4, "parts": 1, "warps": 1, "ahead": 1, "resident": 1}
    record = scaled_fragments(config, problem).launch
    plain = tuple(a for i, a in enumerate(record.arguments) if i not in (4, 5))
    served(problem, record, 5, packed.kernel_launch(replace(record, arguments=plain), 0x3001, 2), engines=engines)
    engine.define("cutlass_scaled_mm_azp(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, "
                  "Tensor azp_adj, Tensor? azp, Tensor? bias) -> ()")
    engine.impl("cutlass_scaled_mm_azp", lambda *given: stock.append(len(given)), "CUDA")
    stand("_C::cutlass_scaled_mm_azp")
    ix, iw, sums, zero = to_gpu(x8.view(torch.int8), w8.view(torch.int8), torch.ones(8).int(), torch.ones(4).int())
    (out,) = to_gpu(torch.zeros(4, 8, dtype=torch.bfloat16))
    torch.ops._C.cutlass_scaled_mm_azp(out, ix, iw.t(), gsx, gsw.t(), sums, zero, None)
    print(json.dumps([stock, told(), calls("cuLaunchKernel"), hook.failures()]))
    """,
    )
    assert said == ([[], [["exact 1"], 0], 1, []] if lost else [[8], [["miss 1"], 1 << AZP], 0, []])


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("name", ["fp8_scaled_mm", "int8_scaled_mm"])
def test_an_engines_operator_that_returns_its_result_returns_a_routes(run: Any, name: str, lost: bool) -> None:
    """As its own is: fresh, contiguous, of the type asked for; what a route does not take is left to the engine."""
    number = 1 + OPERATORS.index(f"sgl_kernel::{name}")
    said = run(
        ENGINE,
        STANDING,
        SGLANG,
        f"    name, engines = {name!r}, {1 << number if lost else 0}",
        """
    if name == "int8_scaled_mm":
        from gemmtuned.kernels.cuda.scaled_fragments import scaled_fragments
        problem = replace(problem, dtype="i8", wdtype="i8")
        record = scaled_fragments({"rows": 8, "tokens": 4, "parts": 1, "warps": 1, "ahead": 1, "resident": 1}, problem)
        served(problem, record.launch, 5, packed.kernel_launch(record.launch, 0x3001, 2), engines=engines)
        gx8, gw8 = to_gpu(x8.view(torch.int8), w8.view(torch.int8))
    else:
        problem = replace(problem, math_mode="reduced")
        served(problem, *library(problem, *sizes, scale_x="row", scale_w="row", fast=True), engines=engines)
    stand(f"sgl_kernel::{name}")
    f = getattr(torch.ops.sgl_kernel, name)
    y, again = [f(gx8, gw8.t(), gsx, gsw.t(), torch.bfloat16, None) for _ in range(2)]
    facts = [y.dtype == torch.bfloat16, y.stride() == (8, 1), y.data_ptr() != again.data_ptr()]
    seen, runs = told(), calls("cublasLtMatmul") + calls("cuLaunchKernel")
    f(gx8, gw8.t(), gsx, gsw.t(), torch.bfloat16, torch.ops.fake.on_gpu(torch.ones(8)))  # another type than its result
    more = calls("cublasLtMatmul") + calls("cuLaunchKernel") - runs
    print(json.dumps([facts, torch.equal(host(y), right), seen, runs, len(made), more, hook.failures()]))
    """,
    )
    served = [["exact 2"], 0] if lost else [["miss 2"], 1 << number]
    assert said == [[True] * 3, lost, served, 2 if lost else 0, 1 if lost else 3, 0, []]


@pytest.mark.parametrize("lost", [True, False])
def test_an_engines_product_of_blocks_with_a_weight_by_rows_is_served(run: Any, lost: bool) -> None:
    """W and its scales come as [N, K]; where scales are to be made powers of two, it is left to the engine."""
    number = 1 + OPERATORS.index("vllm::fp8_gemm_nt_op")
    said = run(
        ENGINE,
        STANDING,
        f"    engines = {1 << number if lost else 0}",
        """
    from gemmtuned.kernels.cuda.scaled_fragments import scaled_fragments
    x8 = torch.randint(-2, 3, (4, 256)).to(torch.float8_e4m3fn)
    w8 = torch.randint(-2, 3, (8, 256)).to(torch.float8_e4m3fn)
    sx, sw = torch.full((4, 2), 4.0), torch.full((8, 2), 0.5)[:1]  # the fake kernel reads one a row, of eight rows
    right = (x8.float() @ w8.float().t() * 2).bfloat16()
    problem = Problem(family="scaled", m=4, n=8, k=256, dtype="fp8_e4m3", out_dtype="bf16", scale="1x128",
                      math_mode="reduced")
    config = {"rows": 8, "tokens": 4, "parts": 1, "warps": 1, "ahead": 2, "resident": 1}
    record = scaled_fragments(config, problem).launch
    record = replace(record, arguments=record.arguments[:-2])  # how far scales are apart
    served(problem, record, 5, packed.kernel_launch(record, 0x3001, 2), engines=engines)
    vllm = torch.library.Library("vllm", "FRAGMENT")
    vllm.define("fp8_gemm_nt_op(Tensor q_input, Tensor input_scale, Tensor weight, Tensor weight_scale, "
                "Tensor(a!) output, bool use_deep_gemm_e8m0) -> ()")
    vllm.impl("fp8_gemm_nt_op", lambda *given: stock.append(len(given)), "CUDA")
    stand("vllm::fp8_gemm_nt_op")
    cuda.fake_shape(8, 256, 1.0)
    gx8, gw8, gsx, gsw = to_gpu(x8, w8, sx, sw)
    out, other = to_gpu(*torch.zeros(2, 4, 8, dtype=torch.bfloat16))
    torch.ops.vllm.fp8_gemm_nt_op(gx8, gsx, gw8, gsw, out, False)
    seen, launched = told(), calls("cuLaunchKernel")
    torch.ops.vllm.fp8_gemm_nt_op(gx8, gsx, gw8, gsw, other, True)
    print(json.dumps([torch.equal(host(out), right), seen, launched, stock, told(), hook.failures()]))
    """,
    )
    assert said == (
        [True, [["exact 1"], 0], 1, [6], [["miss 1"], UNFIT], []]
        if lost
        else [False, [["miss 1"], 1 << number], 0, [6, 6], [["miss 1"], UNFIT], []]
    )


@pytest.mark.parametrize("lost", [True, False])
def test_an_engines_triton_product_of_blocks_is_served_with_scales_by_rows(run: Any, lost: bool) -> None:
    """Scales of X lie with those of one row side by side, as vLLM has them for it; other blocks are another product."""
    number = 1 + OPERATORS.index("vllm::w8a8_triton_block_scaled_mm_func")
    said = run(
        ENGINE,
        STANDING,
        f"    engines = {1 << number if lost else 0}",
        """
    from gemmtuned.kernels.cuda.scaled_fragments import scaled_fragments
    x8 = torch.randint(-2, 3, (4, 256)).to(torch.float8_e4m3fn)
    w8 = torch.randint(-2, 3, (8, 256)).to(torch.float8_e4m3fn)
    sx, sw = torch.full((4, 2), 4.0), torch.full((8, 2), 0.5)[:1]  # the fake kernel reads one a row, of eight rows
    right = (x8.float() @ w8.float().t() * 2).bfloat16()
    problem = Problem(family="scaled", m=4, n=8, k=256, dtype="fp8_e4m3", out_dtype="bf16", scale="1x128",
                      math_mode="reduced")
    config = {"rows": 8, "tokens": 4, "parts": 1, "warps": 1, "ahead": 2, "resident": 1}
    record = scaled_fragments(config, problem).launch
    record = replace(record, arguments=record.arguments[:-2])  # how far scales are apart
    served(problem, record, 5, packed.kernel_launch(record, 0x3001, 2), engines=engines)

    def func(qx: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor,
             block_size: list[int], output_dtype: torch.dtype) -> torch.Tensor:
        stock.append(list(block_size))
        return qx.new_empty(4, 8, dtype=output_dtype)

    name = "w8a8_triton_block_scaled_mm_func"
    vllm = torch.library.Library("vllm", "FRAGMENT")
    vllm.define(name + torch.library.infer_schema(func, mutates_args=[]))
    vllm.impl(name, func, "CUDA")
    stand(f"vllm::{name}")
    cuda.fake_shape(8, 256, 1.0)
    given = to_gpu(x8, w8, sx, sw)
    y = getattr(torch.ops.vllm, name)(*given, [128, 128], torch.bfloat16)
    seen, launched = told(), calls("cuLaunchKernel")
    facts = [y.dtype == torch.bfloat16, y.stride() == (8, 1), torch.equal(host(y), right)]
    of_columns = given[2].t().contiguous().t()
    getattr(torch.ops.vllm, name)(given[0], given[1], of_columns, given[3], [128, 128], torch.bfloat16)
    columns = [str(s.problem) for s in hook.drain()]
    getattr(torch.ops.vllm, name)(*given, [64, 256], torch.bfloat16)
    opaque = [str(s.problem) for s in hook.drain()]
    print(json.dumps([facts, seen, launched, stock, columns, opaque, hook.failures()]))
    """,
    )
    block, other = [128, 128], [64, 256]
    columns = ["scaled:fp8_e4m3>bf16:4x8x256,scale=1x128,scalelayout=col,math=reduced"]
    opaque = ["fp8_e4m3>bf16:4x8x256,weight=packed,packing=opaque"]
    assert said == (
        [[True] * 3, [["exact 1"], 0], 1, [block, other], columns, opaque, []]
        if lost
        else [[True, True, False], [["miss 1"], 1 << number], 0, [block, block, other], columns, opaque, []]
    )


def test_graphs_are_not_called_stale_for_calls_that_nothing_may_serve(run: Any) -> None:
    """Captured anew they would run the engine's own kernel again."""
    said = run(
        ENGINE,
        STANDING,
        f"    lost, as_good = {LOST}, {AS_GOOD}",
        """
    problem = replace(problem, math_mode="reduced")
    hook.install()
    hook.set_switches(native.CAPTURE | native.DISPATCH)
    stand("_C::cutlass_scaled_mm")
    out = torch.ops.fake.on_gpu(torch.zeros(4, 8, dtype=torch.bfloat16))
    fake.fake_stream(0x5000)
    cuda.fake_capture(0x5000, 1, 1, 0x9000)
    hook.capture_begun(0)
    torch.ops._C.cutlass_scaled_mm(out, gx8, gw8.t(), gsx, gsw.t(), None)
    cuda.fake_capture(0x5000, 0, 0, 0)
    stale = []
    from gemmtuned.hooks.dispatch import NATIVE_CODES
    record, code, launch = library(problem, *sizes, scale_x="row", scale_w="row", fast=True)
    raced = [native.Row(problem, "exact", "graph", next(idents), code, "cuda:0", launch, (), engines=engines)
             for engines in (0, as_good, lost)]
    torchs = native.Row(problem, "exact", "graph", next(idents), NATIVE_CODES["torch"], "cuda:0")
    for generation, row in enumerate((*raced, torchs), 5):
        hook.load([row], generation)
        stale.append(hook.stale_launches())
    print(json.dumps([stock, stale]))
    """,
    )
    assert said == [[6], [0, 0, 1, 0]]


@pytest.mark.parametrize("by", ["engine", "torch"])
def test_replays_of_what_the_table_would_run_anyway_are_hits(run: Any, by: str) -> None:
    """Captured before there was a table: an engine's kernel that is as good, torch's own that is the best."""
    said = run(
        ENGINE,
        STANDING,
        f"    by, as_good = {by!r}, {AS_GOOD}",
        """
    from gemmtuned.hooks.dispatch import NATIVE_CODES
    problem = replace(problem, math_mode="reduced")
    hook.install()
    hook.set_switches(native.CAPTURE | native.DISPATCH)
    stand("_C::cutlass_scaled_mm")
    out = torch.ops.fake.on_gpu(torch.zeros(4, 8, dtype=torch.bfloat16))
    fake.fake_stream(0x5000)
    cuda.fake_capture(0x5000, 1, 1, 0x9000)
    hook.capture_begun(0)
    if by == "engine":
        torch.ops._C.cutlass_scaled_mm(out, gx8, gw8.t(), gsx, gsw.t(), None)
    else:
        of_v1(use_fast_accum=True)
    cuda.fake_capture(0x5000, 0, 0, 0)
    told()
    record, code, launch = library(problem, *sizes, scale_x="row", scale_w="row", fast=True)
    torchs = native.Row(problem, "exact", "graph", next(idents), NATIVE_CODES["torch"], "cuda:0")
    raced = [native.Row(problem, "exact", "graph", next(idents), code, "cuda:0", launch, (), engines=engines)
             for engines in (0, as_good)]
    seen = []
    for switches in (native.CAPTURE | native.DISPATCH, native.CAPTURE):
        for generation, row in enumerate((None, *raced, torchs), 5):
            hook.load([row] if row else [], generation)
            hook.set_switches(switches)
            hook.graph_replayed(1, 2)
            seen.append(told())
    print(json.dumps(seen))
    """,
    )
    waits = LOST if by == "engine" else 0
    dispatched, captured = said[:4], said[4:]
    as_good = [["exact 2"], 0] if by == "engine" else [["miss 2"], 0]
    assert dispatched == [[["miss 2"], waits], [["miss 2"], waits], as_good, [["exact 2"], 0]]
    assert captured == [[["miss 2"], waits]] * 4, "the table is not in use"


@pytest.mark.parametrize("engines", [0, LOST])
def test_replays_of_an_engines_calls_that_no_solution_served_say_so(run: Any, engines: int) -> None:
    """Captured before there was any, they are not called again.  What is served, or cannot be, waits for none."""
    said = run(
        ENGINE,
        STANDING,
        f"    engines = {engines}",
        """
    problem = replace(problem, math_mode="reduced")
    hook.install()
    hook.set_switches(native.CAPTURE | native.DISPATCH)
    stand("_C::cutlass_scaled_mm")
    out, of_another_type = to_gpu(torch.zeros(4, 8, dtype=torch.bfloat16), torch.ones(8))
    fake.fake_stream(0x5000)

    def capture(number, *biases):
        cuda.fake_capture(0x5000, number, 1, 0x9000 + number)
        hook.capture_begun(0)
        for bias in biases:
            torch.ops._C.cutlass_scaled_mm(out, gx8, gw8.t(), gsx, gsw.t(), bias)
        cuda.fake_capture(0x5000, 0, 0, 0)
        seen = [told()]
        hook.graph_replayed(number, 3)
        return [*seen, told()]

    before = capture(1, None, of_another_type)
    record, code, launch = library(problem, *sizes, scale_x="row", scale_w="row", fast=True)
    row = native.Row(problem, "exact", "graph", next(idents), code, "cuda:0", launch, (), engines=engines)
    hook.load([row], 5)
    hook.graph_replayed(1, 2)
    print(json.dumps([before, told(), capture(2, None)]))
    """,
    )
    misses = ["miss 3", "miss 3"]
    assert said[0] == [[["miss 1", "miss 1"], 0], [misses, LOST | UNFIT]]
    assert said[1] == [["miss 2", "miss 2"], LOST | UNFIT]
    if engines:
        assert said[2] == [[["exact 1"], 0], [["exact 3"], 0]]
    else:
        assert said[2] == [[["miss 1"], LOST], [["miss 3"], LOST]]
