"""The native hook's CUDA half on a driver that is a fake: products with scales, a whole C, a batch or a wider result.

What the fake of cuBLASLt computes comes from the descriptors that it is given, and the kernel's from its arguments.
"""

from __future__ import annotations

from typing import Any

import pytest
from fake_families import OPERANDS, SCALED
from operators_of_torch import OPERATORS


def test_every_operator_of_the_list_is_there_on_a_gpu(run: Any) -> None:
    """A torch like this one has each as the list calls it, and the fake of its CUDA library is made from the list."""
    listed = (*OPERATORS.everywhere, *OPERATORS.gpus_alone)
    there = run("    print(json.dumps([name for name in hook.operators() if name.startswith('CUDA ')]))\n")

    assert OPERATORS.gpus_alone and sorted(there) == sorted(f"CUDA aten::{name}" for name in listed)


def test_a_kernel_serves_scaled_products_of_every_form(run: Any) -> None:
    said = run(
        OPERANDS,
        SCALED,
        """
    record = KernelLaunch(
        shared=0, threads=32, grid=(Axis("w.size0", 8), Axis("x.size0", 64), Axis("", 1)),
        arguments=("x.ptr", "w.ptr", "scale_x.ptr", "scale_w.ptr", "y.ptr", "x.size0", "x.stride0", "w.stride0"),
        conditions=tuple(Condition(*c) for c in sizes),
    )
    record.check_for(problem)
    served(problem, record, 5, packed.kernel_launch(record, 0x3001, 2))
    print(json.dumps(check(lambda: calls("cuLaunchKernel"))))
    """,
    )
    assert said == [True, [True, True, True], ["scaled exact 3", "scaled miss 1"], 3, []]


def test_cublaslt_is_given_both_scales_and_their_modes(run: Any) -> None:
    said = run(
        OPERANDS,
        SCALED,
        """
    served(problem, *library(problem, *sizes, scale_x="row", scale_w="row"))
    said = check(lambda: calls("cublasLtMatmul"))
    # One scale a tensor is another problem; a result that torch scales is torch's
    right = ((x8.float() * 2) @ (w8.float() * 4).t()).bfloat16()
    [gsx, gsw] = to_gpu(torch.tensor([[2.0]]), torch.tensor([[4.0]]))
    tensor = replace(problem, scale="tensor", wscale="tensor")
    served(tensor, *library(tensor, ("scale_x.numel", "==", 1), scale_x="tensor", scale_w="tensor"))
    said += check(lambda: calls("cublasLtMatmul"))
    [one] = to_gpu(torch.tensor(1.0))
    of_v1(scale_result=one)
    print(json.dumps([said, outcomes()]))
    """,
    )
    [rows, tensor], last = [said[0][:5], said[0][5:]], said[1]
    assert rows == [True, [True, True, True], ["scaled exact 3", "scaled miss 1"], 3, []]
    assert tensor == [True, [True, True, True], ["scaled exact 3", "scaled miss 1"], 6, []]
    assert last == ["scaled miss 1"]


def test_cublaslt_is_told_of_each_operand_which_blocks_its_scales_are_of(run: Any) -> None:
    """Those of X for 128 of a row, those of W for 128 rows of it, too."""
    said = run(
        OPERANDS,
        SCALED,
        """
    x8 = torch.randint(-2, 3, (4, 256)).to(torch.float8_e4m3fn)
    w8 = torch.randint(-2, 3, (8, 256)).to(torch.float8_e4m3fn)
    sx, sw = torch.exp2(torch.arange(8.0).reshape(2, 4).t() - 4), torch.tensor([[2.0], [0.25]])
    right = ((x8.float() * sx.repeat_interleave(128, 1)) @ (w8.float().t() * sw.repeat_interleave(128, 0))).bfloat16()
    gx8, gw8, by_col, gsw = to_gpu(x8, w8, sx.t().contiguous(), sw)
    problem = replace(problem, k=256, scale="1x128", wscale="128x128", scale_layout="col")
    served(problem, *library(problem, scale_x="1x128", scale_w="128x128"))
    y = torch._scaled_mm(gx8, gw8.t(), by_col.t(), gsw, out_dtype=torch.bfloat16)
    print(json.dumps([torch.equal(host(y), right), outcomes(), calls("cublasLtMatmul"), hook.failures()]))
    """,
    )
    assert said == [True, ["scaled exact 1"], 1, []]


def test_scales_of_another_form_than_the_record_names_are_torchs(run: Any) -> None:
    said = run(
        OPERANDS,
        SCALED,
        """
    served(problem, *library(problem, *sizes, ("scale_x.ptr", "%", 16), scale_x="row", scale_w="row"))
    apart = torch.ops.fake.on_gpu(torch.zeros(5)[1:].unsqueeze(1).copy_(sx))  # four bytes past a boundary
    y = torch._scaled_mm(gx8, gw8.t(), apart, gsw.t(), out_dtype=torch.bfloat16)
    print(json.dumps([torch.equal(host(y), right), outcomes(), calls("cublasLtMatmul"), hook.failures()]))
    """,
    )
    assert said == [True, ["scaled miss 1"], 0, []]


def test_a_sum_with_a_function_behind_it_is_no_problem_that_is_tuned(run: Any) -> None:
    said = run(
        """
    from gemmtuned.configs.tunable import can_tune
    hook.install()
    hook.set_switches(native.CAPTURE | native.DISPATCH)
    c, x, w = torch.randn(8), torch.randn(4, 16), torch.randn(16, 8)
    gc, gx, gw = to_gpu(c, x, w)
    y = [torch._addmm_activation(gc, gx, gw, use_gelu=gelu) for gelu in (False, True)]
    right = [f(c + x @ w) for f in (torch.relu, torch.nn.functional.gelu)]
    same = [torch.allclose(torch.ops.fake.on_host(a), b, atol=1e-5) for a, b in zip(y, right)]
    seen = [s for s in hook.drain() if s.place != "cpu"]
    print(json.dumps([same, [[str(s.problem), s.outcome, s.calls, can_tune(s.problem)] for s in seen]]))
    """,
    )
    assert said == [[True, True], [["fp32:4x8x16+bias,layout=nn,weight=packed,packing=opaque", "miss", 2, False]]]


INTEGERS = """
    x, w = torch.randint(-128, 128, (4, 16), dtype=torch.int8), torch.randint(-128, 128, (8, 16), dtype=torch.int8)
    right = (x.long()[:, None] * w.long()).sum(-1).int()
    gx, gw = to_gpu(x, w)
    problem = Problem(m=4, n=8, k=16, dtype="i8", out_dtype="i32")
"""


def test_products_of_integers_go_to_cublaslt_in_integers(run: Any) -> None:
    said = run(
        OPERANDS,
        INTEGERS,
        """
    served(problem, *library(problem, ("x.stride1", "==", 1), ("w.stride1", "==", 1), compute="i32"))
    y = torch._int_mm(gx, gw.t())
    out, turned = to_gpu(torch.zeros(4, 8, dtype=torch.int32), torch.zeros(8, 4, dtype=torch.int32))
    torch._int_mm(gx, gw.t(), out=out)
    launched = calls("cublasLtMatmul")
    torch._int_mm(gx, gw.t(), out=turned.t())  # it writes no columns: torch does
    said = [[torch.equal(host(t), right) for t in (y, out, turned.t())], launched, calls("cublasLtMatmul"),
            [str(y.dtype), y.stride()], outcomes()]
    # torch refuses these, whatever has a route
    [one] = to_gpu(w.t()[None].contiguous())
    for call in (lambda: torch.mm(gx, gw.t(), out_dtype=torch.int32),
                 lambda: torch.ops.aten.mm.dtype(gx, gw.t(), torch.int32)):
        call()  # the fake takes it
    said += [calls("cublasLtMatmul"), outcomes(), hook.failures()]
    print(json.dumps(said))
    """,
    )
    assert said == [[True] * 3, 2, 2, ["torch.int32", [8, 1]], ["dense exact 2", "dense miss 1"], 2, [], []]


def test_a_kernel_serves_products_of_integers_that_it_takes(run: Any) -> None:
    said = run(
        OPERANDS,
        INTEGERS,
        """
    record = KernelLaunch(
        shared=0, threads=32, grid=(Axis("w.size0", 8), Axis("", 1), Axis("", 1)),
        arguments=("x.ptr", "w.ptr", "y.ptr", "x.size0", "x.stride0", "w.stride0"),
        conditions=tuple(Condition(*c) for c in (("x.size0", "<=", 4), ("x.stride1", "==", 1), ("w.stride1", "==", 1),
                                                 ("x.stride0", "%", 16), ("w.stride0", "%", 16))),
    )
    record.check_for(problem)
    served(problem, record, 5, packed.kernel_launch(record, 0x3005, 2))
    [out] = to_gpu(torch.zeros(4, 8, dtype=torch.int32))
    given = torch._int_mm(gx, gw.t(), out=out)
    said = [[torch.equal(host(t), right) for t in (torch._int_mm(gx, gw.t()), out)], given is out, outcomes()]
    wide, = to_gpu(torch.zeros(4, 24, dtype=torch.int8))  # rows 24 apart: it does not take them
    host(wide)[:, :16].copy_(x)
    said += [torch.equal(host(torch._int_mm(wide[:, :16], gw.t())), right), outcomes()]
    print(json.dumps([*said, calls("cuLaunchKernel"), hook.failures()]))
    """,
    )
    assert said == [[True] * 2, True, ["dense exact 2"], True, ["dense miss 1"], 2, []]


def test_a_whole_c_with_any_alpha_and_beta_goes_to_cublaslt(run: Any) -> None:
    said = run(
        OPERANDS,
        """
    problem = replace(problem, family="dense_add")
    served(problem, *library(problem, ("c.stride1", "==", 1)))
    c = torch.randn(4, 8)
    [gc, row, turned] = to_gpu(c, c[:1].clone(), c.t().contiguous())
    close = lambda y, want: torch.allclose(host(y), want, atol=1e-4)
    said = [close(torch.addmm(gc, gx, gw.t()), c + right)]
    said.append(close(torch.addmm(gc, gx, gw.t(), beta=0.5, alpha=-2), 0.5 * c - 2 * right))
    said.append(close(torch.addmm(gc, gx, gw.t(), beta=0), right))
    said.append(outcomes())
    said.append(close(torch.addmm(row, gx, gw.t(), beta=2), 2 * c[:1] + right))  # it is made whole first
    said.append(close(torch.addmm(turned.t(), gx, gw.t()), c + right))
    said.append(outcomes())
    where, want = gc.data_ptr(), 3 * c + right
    gc.addmm_(gx, gw.t(), beta=3)
    said += [close(gc, want), gc.data_ptr() == where, outcomes(), calls("cublasLtMatmul"), hook.failures()]
    print(json.dumps(said))
    """,
    )
    assert said[:4] == [True, True, True, ["dense_add exact 3"]]
    assert said[4:7] == [True, True, ["dense_add exact 1", "dense_add miss 1"]]
    assert said[7:] == [True, True, ["dense_add exact 1"], 5, []]


def test_a_kernel_is_never_given_a_c_that_it_does_not_take(run: Any) -> None:
    said = run(
        OPERANDS,
        """
    said, problem = [], replace(problem, family="dense_add")
    served(problem, replace(record, arguments=(*record.arguments, "c.ptr")), 5, launch)
    c = torch.randn(4, 8)
    [gc] = to_gpu(c)
    for alpha, beta in ((2, 1), (1, 2), (1, 0)):
        y = torch.addmm(gc, gx, gw.t(), alpha=alpha, beta=beta)
        said.append(torch.allclose(host(y), alpha * right + beta * c, atol=1e-4))
    print(json.dumps([said, outcomes(), calls("cuLaunchKernel")]))
    """,
    )
    assert said == [[True] * 3, ["dense_add miss 3"], 0]


def test_a_batch_goes_to_cublaslt_by_its_strides_and_one_of_1_is_dense(run: Any) -> None:
    said = run(
        OPERANDS,
        """
    batched = replace(problem, family="batched", batch=3)
    served(batched, *library(batched, ("x.stride2", "==", 1), ("w.stride2", "==", 1)),
           more=[(problem, record, 5, launch)])
    x3, w3 = torch.randn(3, 6, 16)[:, :4], torch.randn(3, 8, 20)[:, :, :16]
    right3 = x3 @ w3.mT
    x3, w3 = to_gpu(x3, w3)
    out = torch.ops.fake.on_gpu(torch.zeros(3, 4, 8))
    made = [torch.bmm(x3, w3.mT), torch.bmm(x3, w3.mT, out=out)]
    said = [all(torch.allclose(host(y), right3, atol=1e-4) for y in made), made[0].stride(), outcomes()]
    turned = torch.ops.fake.on_gpu(torch.randn(3, 16, 4)).mT
    torch.bmm(turned, w3.mT)
    said.append(outcomes())
    one = torch.bmm(gx.unsqueeze(0), gw.t().unsqueeze(0))
    said += [torch.allclose(host(one)[0], right, atol=1e-4), list(one.shape), outcomes()]
    print(json.dumps([*said, calls("cublasLtMatmul"), calls("cuLaunchKernel"), hook.failures()]))
    """,
    )
    assert said[:4] == [True, [32, 8, 1], ["batched exact 2"], ["batched miss 1"]]
    assert said[4:] == [True, [1, 4, 8], ["dense exact 1"], 2, 1, []]


def test_a_result_is_written_where_the_caller_wants_it_or_stock_writes_it(run: Any) -> None:
    """A copy could take longer than the kernel saves. One that is given the strides of y writes into views."""
    said = run(
        OPERANDS,
        """
    batched = replace(problem, family="batched", batch=3)
    rows = ("x.stride2", "w.stride2", "y.stride2")
    record = KernelLaunch(
        shared=0, threads=32, grid=(Axis("", 1),) * 3,
        arguments=("x.ptr", "w.ptr", "y.ptr", "x.size0", "x.size1", *(f"{s}.stride{d}" for s in "xwy" for d in (0, 1))),
        conditions=(*(Condition(word, "==", 1) for word in rows), Condition("y.stride1", "%", 4)),
    )
    record.check_for(batched)
    of_one = ("x.ptr", "w.ptr", "y.ptr", "x.size0", "x.stride0", "w.stride0")
    plain = KernelLaunch(shared=0, threads=32, grid=(Axis("", 1),) * 3, arguments=of_one)
    served(batched, record, 5, packed.kernel_launch(record, 0x3008, 3),
           more=[(problem, plain, 5, packed.kernel_launch(plain, 0x3000, 2))])
    x3, w3 = torch.randn(4, 3, 16).transpose(0, 1), torch.randn(3, 8, 16)
    right3 = (x3[:, :, None] * w3[:, None]).sum(-1)
    x3, w3, near = *to_gpu(x3, w3), lambda y, of: torch.allclose(host(y), of, atol=1e-4)

    def into(out):
        [out] = to_gpu(out)
        return [near(torch.bmm(x3, w3.mT, out=out), right3), outcomes()]

    heads, columns = torch.zeros(4, 3, 8).transpose(0, 1), torch.zeros(3, 8, 4).mT
    wider, apart = torch.zeros(3, 4, 9)[:, :, :8], torch.zeros(97)[1:].view(3, 4, 8)
    said = [into(y) for y in (torch.zeros(3, 4, 8), heads, columns, wider, apart)]
    one, first = to_gpu(torch.zeros(1, 4, 8), torch.zeros(2, 4, 8))
    for out in (one, first[1:], torch.ops.fake.on_gpu(torch.zeros(1, 4, 9))[..., :8]):  # a batch of 1 is dense
        torch.bmm(gx[None], gw.t()[None], out=out)
        said.append([near(out[0], right), outcomes()])
    print(json.dumps([said, calls("cuLaunchKernel"), hook.failures()]))
    """,
    )
    batches, dense = [[True, [f"{of} {how} 1"]] for of, how in (("batched", "exact"), ("batched", "miss"))], ["dense"]
    assert said[0][:5] == [batches[0], batches[0], batches[1], batches[1], batches[1]]
    assert said[0][5:] == [[True, [f"{dense[0]} {how} 1"]] for how in ("exact", "exact", "miss")]
    assert said[1:] == [4, []]


def test_a_wider_result_is_routed_too(run: Any) -> None:
    said = run(
        OPERANDS,
        """
    problem = replace(problem, dtype="bf16", wdtype="bf16", out_dtype="fp32", math_mode="reduced")
    served(problem, *library(problem))
    xb, wb = x.bfloat16(), w.bfloat16()
    gxb, gwb = to_gpu(xb, wb)
    y = torch.mm(gxb, gwb.t(), out_dtype=torch.float32)
    near = torch.allclose(host(y), xb.float() @ wb.float().t(), atol=1e-4)
    print(json.dumps([near, str(y.dtype), y.stride(), outcomes(), calls("cublasLtMatmul"), hook.failures()]))
    """,
    )
    assert said == [True, "torch.float32", [8, 1], ["dense exact 1"], 1, []]


def test_an_operator_is_given_its_operands_by_name(run: Any) -> None:
    said = run(
        OPERANDS,
        SCALED,
        """
    from gemmtuned.configs.launch import OperatorLaunch
    theirs = torch.library.Library("theirs", "DEF")
    theirs.define("scaled(Tensor sx, Tensor x, Tensor w, Tensor sw) -> Tensor")
    theirs.define("into(Tensor x, Tensor w, Tensor sx, Tensor sw, str how, int type, Tensor(a!) y) -> ()")
    theirs.define("sum(Tensor c, Tensor x, Tensor b, float alpha, float beta, bool sure) -> Tensor")
    def of_rows(sx, x, w, sw):
        sx, x, w, sw = map(host, (sx, x, w, sw))
        return torch.ops.fake.on_gpu(((x.float() * sx) @ (w.float() * sw).t()).bfloat16())
    written = []
    def into(x, w, sx, sw, how, type, y):
        written.append([how, type])
        made = host(of_rows(sx, x, w, sw))
        ctypes.memmove(y.data_ptr(), made.data_ptr(), made.numel() * 2)
    theirs.impl("into", into, "CUDA")
    def of_sum(c, x, b, alpha, beta, sure):
        return torch.ops.fake.on_gpu(beta * host(c) + alpha * (host(x) @ host(b)) if sure else host(c))
    theirs.impl("scaled", of_rows, "CUDA")
    theirs.impl("sum", of_sum, "CUDA")

    def operator(problem, name, *arguments):
        record = OperatorLaunch(operator=f"theirs::{name}", schema=str(getattr(torch.ops.theirs, name).default._schema),
                                arguments=arguments, package="theirs", version="1")
        record.check_for(problem)
        hook.install()
        row = native.Row(problem, "exact", "eager", next(idents), 7, "cuda:0", packed.operator_call(record),
                         scales_sums="alpha" in arguments)
        hook.load([row], next(idents))
        hook.set_switches(native.CAPTURE | native.DISPATCH)

    operator(problem, "scaled", "scale_x", "x", "w", "scale_w")
    said = [torch.equal(host(y), right) for y in (of_v1(), of_v2())] + [outcomes()]
    operator(problem, "into", "x", "w", "scale_x", "scale_w", "=nk", 15, "y")
    said.append(check(lambda: written))
    added = Problem(family="dense_add", m=4, n=8, k=16, dtype="fp32")
    operator(added, "sum", "c", "x", "b", "alpha", "beta", True)
    c = torch.randn(4, 8)
    y = torch.addmm(*to_gpu(c), gx, gw.t(), beta=0.5, alpha=2)
    said += [torch.allclose(host(y), 0.5 * c + 2 * x @ w.t(), atol=1e-4), outcomes(), hook.failures()]
    print(json.dumps(said))
    """,
    )
    into = [True, [True, True, True], ["scaled exact 3", "scaled miss 1"], [["nk", 15]] * 3, []]
    assert said == [True, True, ["scaled exact 2"], into, True, ["dense_add exact 1"], []]


# An operator of a library that compiles at a first call with new sizes, which no capture allows
COMPILES = """
    from gemmtuned.configs.launch import OperatorLaunch
    theirs, ran = torch.library.Library("theirs", "DEF"), []
    theirs.define("mm(Tensor x, Tensor w) -> Tensor")
    def mm(x, w):
        ran.append(x.shape[0])
        return torch.ops.fake.on_gpu(host(x) @ host(w).t())
    theirs.impl("mm", mm, "CUDA")
    record = OperatorLaunch(operator="theirs::mm", schema=str(torch.ops.theirs.mm.default._schema),
                            arguments=("x", "w"), package="theirs", version="1")
    fake.fake_stream(0x5000)
    hook.install()

    def publish(generation, *modes, ident=70):
        rows = [native.Row(replace(problem, m=m), "exact", mode, ident, 7, "cuda:0", packed.operator_call(record))
                for m in (4, 2) for mode in modes]
        hook.load(rows, generation)
        hook.set_switches(native.CAPTURE | native.DISPATCH)

    def made(m=4, *, captured=False):
        before = len(ran)
        if captured:
            cuda.fake_capture(0x5000, 1, 1, 0x9000)
        y = torch.mm(gx[:m], gw.t())
        cuda.fake_capture(0x5000, 0, 0, 0)
        assert torch.allclose(host(y), right[:m], atol=1e-4)
        return [*(s.outcome for s in hook.drain()), len(ran) - before]
"""


def test_an_operator_serves_no_capture_before_it_was_called_with_these_sizes(run: Any) -> None:
    said = run(
        OPERANDS,
        COMPILES,
        """
    publish(1, "eager", "graph")
    said = [made(captured=True), made(), made(captured=True), made(2, captured=True), made(2), made(2, captured=True)]
    publish(2, "graph", ident=80)  # what it has compiled stays
    print(json.dumps([said, made(captured=True), hook.failures()]))
    """,
    )
    assert said == [[["miss", 0], ["exact", 1], ["exact", 1]] * 2, ["exact", 1], []]


def test_an_operator_that_is_best_in_graphs_alone_serves_one_call_before_the_next_capture(run: Any) -> None:
    said = run(
        OPERANDS,
        COMPILES,
        """
    publish(1, "graph")
    print(json.dumps([[made(), made()], made(captured=True), [made(), made(), made()], made(captured=True),
                      [made(2), made(2)], made(2, captured=True), hook.failures()]))
    """,
    )
    never, first, warmed, second, other, others, failures = said
    assert never == [["miss", 0]] * 2, "a program that captures nothing compiles nothing"
    assert first == ["miss", 0]
    assert warmed == [["exact", 1], ["miss", 0], ["miss", 0]] and second == ["exact", 1]
    assert other == [["exact", 1], ["miss", 0]] and others == ["exact", 1] and failures == []


@pytest.mark.long
def test_after_thousands_of_sizes_an_operator_still_serves_captures_of_new_ones(run: Any) -> None:
    said = run(
        OPERANDS,
        COMPILES,
        """
    rows = [native.Row(replace(problem, m=2**n), "coarse", mode, 90 + n, 7, "cuda:0", packed.operator_call(record))
            for n in range(4, 15) for mode in ("eager", "graph")]
    hook.load(rows, 1)
    hook.set_switches(native.CAPTURE | native.DISPATCH)
    theirs.impl("mm", lambda x, w: x.new_empty(x.shape[0], w.shape[0]), "CUDA", allow_override=True)
    (many,) = to_gpu(torch.randn(8800, 16))

    def served(m, *, captured=False):
        if captured:
            cuda.fake_capture(0x5000, 1, 1, 0x9000)
        torch.mm(many[:m], gw.t())
        cuda.fake_capture(0x5000, 0, 0, 0)

    served(600, captured=True)
    for m in range(600, 8800):  # 8,192 are kept
        served(m)
    list(hook.drain())
    newest = range(8700, 8800)
    for m in newest:
        served(m, captured=True)
    print(json.dumps([sorted({str(s.outcome) for s in hook.drain()}), hook.failures()]))
    """,
    )
    assert said == [["padded"], []]
