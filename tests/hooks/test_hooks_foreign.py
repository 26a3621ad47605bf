"""Operators of engines: stand-ins of the same schemas are counted under the right problems, and left as they are."""

from __future__ import annotations

import json
import os
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from engine_programs import ORDERS, STAND_INS
from hooked import Home

from gemmtuned.db.queries import sessions
from gemmtuned.hooks.native import build

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10), reason="torch 2.9 has no way to the kernel beneath"
)

ENGINE = """
    import json, sys, threading, time
    import torch
    from torch.library import Library

    torch.set_num_threads(1)
    torch.mm(torch.ones(4, 16), torch.ones(16, 8))  # the hook is there

    vllm, calls = Library("_C", "FRAGMENT"), []
    vllm.define("cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, "
                "Tensor? bias) -> ()")
    vllm.define("onednn_mm(Tensor! c, Tensor a, Tensor? bias, Tensor handler_tensor) -> ()")
    vllm.define("weight_packed_linear(Tensor! out, Tensor mat1, Tensor mat2, Tensor? bias, "
                "int is_vnni) -> ()")  # another one
    sgl = Library("sgl_kernel", "FRAGMENT")
    sgl.define("fp8_scaled_mm(Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, ScalarType out_dtype, "
               "Tensor? bias) -> Tensor")

    def scaled(a, b, sa, sb, bias):
        y = (a.float() * sa) @ (b.float() * sb)
        return y if bias is None else y + bias

    def cutlass_scaled_mm(out, a, b, sa, sb, bias):
        calls.append("cutlass")
        out.copy_(scaled(a, b, sa, sb, bias))

    def onednn_mm(c, a, bias, handler):
        c.copy_(a @ handler)

    vllm.impl("cutlass_scaled_mm", cutlass_scaled_mm, "CPU")
    vllm.impl("onednn_mm", onednn_mm, "CPU")
    vllm.impl("weight_packed_linear", lambda out, a, b, bias, vnni: None, "CPU")
    sgl.impl("fp8_scaled_mm", lambda a, b, sa, sb, out, bias: scaled(a, b, sa, sb, bias).to(out), "CPU")

    import gemmtuned
    from gemmtuned.hooks import activate
    fp8 = torch.float8_e4m3fn
    a, w = torch.ones(6, 256).to(fp8), torch.ones(64, 256).to(fp8)
    out = torch.zeros(6, 64, dtype=torch.bfloat16)
    one, rows, columns = torch.tensor([2.0]), torch.full((6, 1), 2.0), torch.full((1, 64), 0.5)
"""

FOUND_BY_THE_THREAD = """
    until = time.monotonic() + 20
    while len(gemmtuned.status()["engine_operators"]) < 3 and time.monotonic() < until:
        time.sleep(0.05)
"""


def seen_in(home: Home, code: str) -> dict[str, int]:
    done = home.run(ENGINE + FOUND_BY_THE_THREAD + code + "\n    print(json.dumps(sys.exit_value))\n")
    assert done.said is True, done
    return {problem: calls for (problem, _), calls in home.counts().items()}


def test_plain_operands_have_the_keys_of_torchs_own_product(home: Home) -> None:
    counts = seen_in(
        home,
        """
    f = torch.ops._C.cutlass_scaled_mm
    f(out, a, w.t(), one, one, None)
    f(out, a, w.t(), rows, columns, None)
    f(out, a, w.t(), rows, columns, torch.ones(64, dtype=torch.bfloat16))
    f(out[:1], a[:1], w.t(), one, columns, None)
    y = torch.ops.sgl_kernel.fp8_scaled_mm(a, w.t(), rows, columns, torch.bfloat16, None)
    sys.exit_value = bool((y == 256).all() and (out[1:] == 257).all() and (out[0] == 256).all() and len(calls) == 4)
    """,
    )

    scaled = {problem: calls for problem, calls in counts.items() if problem.startswith("scaled")}
    row = "scaled:fp8_e4m3>bf16:6x64x256,scale=row,math=reduced,threads=1"
    assert scaled == {
        row.replace("scale=row", "scale=tensor"): 1,
        row: 2,
        row.replace("256,", "256+bias,"): 1,
        row.replace("6x64", "1x64"): 1,
    }


@pytest.mark.long
def test_packed_weights_are_counted_and_not_tuned(home: Home) -> None:
    counts = seen_in(
        home,
        """
    x, handler, c = torch.ones(2, 3, 32), torch.ones(32, 8), torch.zeros(2, 3, 8)

    def calls():
        torch.set_num_threads(1)  # a new thread has OpenMP's number until it says so, or runs a loop of torch's
        for _ in range(50):
            torch.ops._C.onednn_mm(c, x, None, handler)

    workers = [threading.Thread(target=calls) for _ in range(4)]
    [t.start() for t in workers]
    [t.join() for t in workers]
    compiled = torch.compile(lambda x: torch.ops._C.onednn_mm(c, x, None, handler), backend="aot_eager")
    compiled(x)
    sys.exit_value = bool((c == 32).all())
    """,
    )

    [packed] = [problem for problem in counts if "packing=opaque" in problem]
    assert "6x8x32" in packed
    assert counts[packed] == 201


def test_another_schema_is_left_alone_and_named(home: Home) -> None:
    code = """
    gone = gemmtuned.status()["engine_operators"]
    torch.ops._C.weight_packed_linear(out, out, out, None, 1)
    sys.exit_value = sorted(gone) == ["_C::cutlass_scaled_mm", "_C::onednn_mm", "sgl_kernel::fp8_scaled_mm"]
    """
    done = home.run(ENGINE + FOUND_BY_THE_THREAD + code + "\n    print(json.dumps(sys.exit_value))\n")

    assert done.said is True
    assert any("weight_packed_linear" in line and "int is_vnni" in line for line in done.ours), done.ours


def test_a_product_that_returns_its_result_is_timed_and_its_inside_not_counted(home: Home) -> None:
    done = home.run(
        ENGINE
        + """
    hook = activate.current()
    inside = torch.ones(400, 400)

    def product(mat1, mat2, scales2, bias, out_dtype, is_vnni):
        torch.mm(inside, inside), time.sleep(0.001)
        return torch.ones(6, 64)

    vllm.define("int8_scaled_mm_with_quant(Tensor mat1, Tensor mat2, Tensor scales2, Tensor? bias, "
                "ScalarType out_dtype, bool is_vnni) -> Tensor")
    vllm.impl("int8_scaled_mm_with_quant", product, "CPU")
    hook.patches.look_for_foreign()
    list(hook.native.drain())
    for _ in range(320):
        torch.ops._C.int8_scaled_mm_with_quant(a, w, one, None, torch.float, False)
    print(json.dumps([[str(s.problem), s.calls, s.sampled_calls, s.sampled_us] for s in hook.native.drain()]))
    """,
        GEMMTUNED_FLUSH_S="1000",
    )
    [[problem, calls, sampled, time_us]] = done.said

    assert "packing=opaque" in problem
    assert calls == 320
    assert 3 <= sampled <= 7, "one in 64"
    assert time_us >= sampled * 1000


def test_an_operator_that_came_a_moment_ago_is_counted_in_a_graph(home: Home) -> None:
    done = home.run(
        ORDERS
        + """
    from gemmtuned.hooks import patches

    class Graph:
        def capture_begin(self):
            pass
        def replay(self):
            pass

    torch.cuda.CUDAGraph = Graph
    type(hook.native).has_cuda = property(lambda self: True)
    hook.patches.graphs = patches.watch_graphs(hook.native, hook.settings, hook.patches.before_graph)
    put("E", 1.0)
    Graph().capture_begin()
    call()
    print(json.dumps(sum(s.calls for s in hook.native.drain() if s.problem.packing == "opaque")))
    """,
        GEMMTUNED_FLUSH_S="1000",
    )
    assert done.said == 2


def test_what_scales_stand_for_is_told_by_both_of_them(home: Home) -> None:
    """Every kind on a grid of sizes; with K = 16384 a weight has as many blocks as rows."""
    code = """
    f, seen = torch.ops._C.cutlass_scaled_mm, []
    hook = activate.current()
    hook.patches.look_for_foreign()
    list(hook.native.drain())

    def some(dtype, *shape):
        return torch.empty(1, dtype=dtype).as_strided(shape, (0, 0))

    for m, n, k in ((m, n, k) for m in (1, 2, 128) for n in (2, 128, 256, 16384) for k in (128, 256, 16384)):
        a, w, out, of_k, of_n = some(fp8, m, k), some(fp8, k, n), some(torch.bfloat16, m, n), k // 128, -(-n // 128)
        for kind, sa, sb in (("tensor tensor", (1,), (1,)), ("row row", (m, 1), (1, n)),
                             ("1x128 128x128", (m, of_k), (of_k, of_n))):
            f(out, a, w, torch.ones(sa), torch.ones(sb), None)
            seen.append([m, n, k, kind, [f"{s.problem.scale} {s.problem.wscale}" for s in hook.native.drain()]])
    print(json.dumps(seen))
    """
    engine = ENGINE.replace("out.copy_(scaled(a, b, sa, sb, bias))", "pass")
    for m, n, k, kind, found in home.run(engine + code, GEMMTUNED_FLUSH_S="1000").said:
        if kind == "1x128 128x128" and k == 128 and n <= 128:  # a block is a row here, or all of W: the same product
            kind = "tensor tensor" if m == 1 else "row tensor"
        assert found == [kind], (m, n, k)


def test_switched_off_they_are_as_without_us(home: Home) -> None:
    code = """
    gemmtuned.disable()
    torch.ops._C.cutlass_scaled_mm(out, a, w.t(), one, one, None)
    sys.exit_value = bool((out == 1024).all())
    """
    assert not [p for p in seen_in(home, code) if p.startswith("scaled")]


def test_zero_points_of_an_engine_make_another_problem_than_none(home: Home) -> None:
    """vLLM's asymmetric int8: with `azp` one a row, without one for all of X, which `azp_adj` holds."""
    done = home.run(
        STAND_INS
        + """
    one = next(one for one in operators() if one.name == "_C::cutlass_scaled_mm_azp")
    fragment("_C").define(one.schema.partition("::")[2].replace("Tensor out", "Tensor! out"))

    def kernel(out, a, b, sa, sb, adj, azp, bias):
        less = adj.reshape(1, -1) * (1 if azp is None else azp.reshape(-1, 1))
        y = (a.int() @ b.int() - less) * sa.reshape(-1, 1) * sb.reshape(1, -1)
        out.copy_(y if bias is None else y + bias)

    fragment("_C").impl("cutlass_scaled_mm_azp", kernel, "CPU")
    hook.patches.look_for_foreign()
    list(hook.native.drain())
    x, w = torch.ones(m, k).char(), torch.ones(n, k).char()
    one, rows, columns = torch.ones(1), torch.ones(m, 1), torch.ones(1, n)
    azp, adj = torch.full((m, 1), 3).int(), w.sum(1, keepdim=True, dtype=torch.int32).t()
    bias = torch.full((n,), 512.0).to(bf16)
    torch.set_num_threads(1)

    def call(rows_of_x, *more):
        y = torch.zeros(rows_of_x, n, dtype=bf16)
        torch.ops._C.cutlass_scaled_mm_azp(y, x[:rows_of_x], w.t(), *more)
        return [y.unique().tolist(), *(str(s.problem) for s in hook.native.drain() for _ in range(s.calls))]

    named = [call(m, rows, columns, adj, azp, None), call(m, rows, columns, adj, azp, bias),
             call(1, rows[:1], columns, adj, azp[:1], None), call(m, one, columns, 3 * adj, None, None),
             call(1, one, columns, 3 * adj, None, None), call(m, one, one, 3 * adj, None, None),
             call(m, rows, one, adj, azp, None)]
    others = [call(m, rows, columns, adj, azp[:1], None), call(m, rows, columns, adj, None, None),
              call(m, one, columns, adj, azp, None), call(m, rows, columns, adj.float(), azp, None),
              call(m, rows, columns, adj, azp.float(), None), call(m, rows, columns, adj[:, :1], azp, None)]
    print(json.dumps([named, others, hook.patches.foreign.changed]))
    """,
        GEMMTUNED_FLUSH_S="1000",
    )
    named, others, changed = done.said

    less, of = 256.0 - 3 * 256.0, "scaled:i8>bf16:4x128x256"
    assert named == [
        [[less], f"{of},scale=row+zero,threads=1"],
        [[0.0], f"{of}+bias,scale=row+zero,threads=1"],
        [[less], f"{of.replace('4x', '1x')},scale=row+zero,threads=1"],
        [[less], f"{of},scale=tensor+zero,wscale=row,threads=1"],
        [[less], f"{of.replace('4x', '1x')},scale=tensor+zero,wscale=row,threads=1"],
        [[less], f"{of},scale=tensor+zero,threads=1"],
        [[less], f"{of},scale=row+zero,wscale=tensor,threads=1"],
    ]
    assert all("packing=opaque" in problem for _, problem in others) and len(others) == 6
    assert changed == {}


@pytest.fixture(scope="module")
def extension(built_for_tests: Path) -> Path:
    """An engine's extension against torch's stable ABI, kept by the hash of what goes into it."""
    source, torch, cxx = (
        Path(__file__).parents[1] / "support/engine" / "engine.cpp",
        build.torch_folder(),
        build.compiler(),
    )
    assert torch is not None and cxx is not None
    digest = sha256(build.torch_version(torch).encode() + source.read_bytes()).hexdigest()[:12]
    file = built_for_tests / "engine" / f"{digest}.so"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        made = file.with_suffix(f".{os.getpid()}")
        uses = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}", f"-L{torch / 'lib'}"]
        command = [cxx, "-std=c++20", "-O1", "-fPIC", "-shared", *uses, str(source), "-lc10", "-ltorch_cpu", "-o", made]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        made.replace(file)
    return file


@pytest.mark.long
def test_an_extension_of_the_stable_abi_is_counted_eager_compiled_and_in_threads(home: Home, extension: Path) -> None:
    done = home.run(
        """
    import json, sys, threading
    import torch
    from torch.library import Library, register_fake
    from gemmtuned.hooks import activate

    torch.set_num_threads(1)
    torch.mm(torch.ones(4, 16), torch.ones(16, 8))
    hook = activate.current()
    torch.ops.load_library(sys.argv[1])  # long after us
    hook.patches.look_for_foreign()
    list(hook.native.drain())
    register_fake("_C::onednn_mm", lambda c, a, bias, handler: None)
    register_fake("_C::awq_gemm", lambda a, *rest: torch.empty_like(a))
    a, handler = torch.ones(6, 64), torch.ones(1)
    fp8 = torch.float8_e4m3fn
    x, w, out = torch.ones(6, 256).to(fp8), torch.ones(64, 256).to(fp8), torch.zeros(6, 64, dtype=torch.bfloat16)
    ops, wrong = torch.ops._C, []

    def calls(times):
        torch.set_num_threads(1)  # see above
        c = torch.zeros(6, 64)
        for _ in range(times):
            ops.onednn_mm(c, a, None, handler)
            y = ops.awq_gemm(a, a, a, a, 1)
            if float(c.sum()) != 2 * 384 or float(y.sum()) != 7 * 384:
                wrong.append((c, y))

    def step(a):
        c = torch.zeros(6, 64)
        ops.onednn_mm(c, a, a[0], handler)
        return c + ops.awq_gemm(a, a, a, a, 1)

    calls(10)
    workers = [threading.Thread(target=calls, args=(50,)) for _ in range(4)]
    [w.start() for w in workers]
    [w.join() for w in workers]
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    made = [compiled(a).unique().tolist() for _ in range(5)]
    for _ in range(4):
        ops.cutlass_scaled_mm(out, x, w.t(), torch.ones(6, 1), torch.ones(1, 64), None)
    found = {}
    for s in hook.native.drain():  # each thread has its own
        found[str(s.problem)] = found.get(str(s.problem), 0) + s.calls
    print(json.dumps([found, made, out.unique().tolist(), len(wrong), hook.patches.foreign.seen]))
    """,
        str(extension),
        GEMMTUNED_FLUSH_S="1000",
    )
    found, made, out, wrong, seen = done.said

    assert (made, out, wrong) == ([[10.0]] * 5, [5.0], 0)
    assert seen == ["_C::cutlass_scaled_mm", "_C::awq_gemm", "_C::onednn_mm"]
    assert found == {
        "fp32:6x64x64,weight=packed,packing=opaque,threads=1": 210 + 210 + 5,
        "fp32:6x64x64+bias,weight=packed,packing=opaque,threads=1": 5,
        "scaled:fp8_e4m3>bf16:6x64x256,scale=row,math=reduced,threads=1": 4,
    }


def test_a_process_says_which_ways_to_products_it_has(home: Home) -> None:
    """Into the store: counted, left alone and why, and what no dispatcher sees."""
    done = home.run(
        ORDERS
        + """
    put("E", 1.0), look()
    definition.define("machete_mm(Tensor A, Tensor B, int extra) -> Tensor")
    there["machete"] = Library("_C", "IMPL")
    there["machete"].impl("machete_mm", lambda A, B, extra: A, "CPU")
    library = Library("_C", "IMPL")
    library.impl("onednn_mm", lambda *operands: None, "CPU", allow_override=True)
    import types
    sys.modules["flashinfer"] = types.ModuleType("flashinfer")
    look(), hook.flusher.flush()
    print(hook.session().operators)
    """,
    )
    known = done.said

    assert known["counted"] == ["_C::int8_scaled_mm_with_quant"]
    assert list(known["left"]) == ["_C::machete_mm", "_C::onednn_mm"]
    assert "int extra" in known["left"]["_C::machete_mm"]
    assert known["left"]["_C::onednn_mm"].startswith("served by")
    assert known["unseen"] == ["FlashInfer's functions"]
    [row] = sessions(home.path / "tune.db")
    assert json.loads(row["operators"]) == known
