"""Operators of engines: stand-ins of the same schemas are counted under the right problems, and left as they are."""

from __future__ import annotations

import json
import os
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from hooked import Home

from gemmtuned.configs.engine_races import ENGINES
from gemmtuned.db.queries import sessions
from gemmtuned.hooks.engine_operators import operators
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


ORDERS = """
    import itertools, json, sys, threading
    import gemmtuned
    import torch
    from torch.library import Library

    torch.set_num_threads(1)
    torch.mm(torch.ones(4, 16), torch.ones(16, 8))
    from gemmtuned.hooks import activate
    hook = activate.current()
    definition = Library("_C", "FRAGMENT")
    definition.define("onednn_mm(Tensor! c, Tensor a, Tensor? bias, Tensor handler_tensor) -> ()")
    definition.define("int8_scaled_mm_with_quant(Tensor mat1, Tensor mat2, Tensor scales2, Tensor? bias, "
                      "ScalarType out_dtype, bool is_vnni) -> Tensor")
    c, a = torch.zeros(2, 8), torch.ones(2, 16)
    there = {}

    def look():
        if hook is not None:
            hook.patches.look_for_foreign()

    def put(name, value, keeps=False):
        # a library of its own, as each engine or user has it; `keeps`: it calls the kernel that it found for the rest
        kept = torch.library.get_kernel("_C::onednn_mm", "CPU") if keeps else None
        library = Library("_C", "IMPL")

        def into(keys, c, a, bias, handler):
            c.fill_(value)
            if kept is not None:
                kept.call_boxed(keys, c, a, bias, handler)
                c.add_(100)

        library.impl("onednn_mm", into, "CPU", with_keyset=True, allow_override=True)
        library.impl("int8_scaled_mm_with_quant", lambda *operands: torch.full((2, 8), value), "CPU",
                     allow_override=True)
        there[name] = library

    def take(name):
        there.pop(name)._destroy()

    def call():
        gave = []
        for f in (lambda: torch.ops._C.onednn_mm(c, a, None, a), lambda: c.copy_(
            torch.ops._C.int8_scaled_mm_with_quant(a, a, a, None, torch.float, False))):
            try:
                f()
                gave.append(c.unique().tolist())
            except Exception as err:
                gave.append(type(err).__name__ + ": " + str(err).split(" registered at ")[0].split(". ")[0][:100])
        return gave
"""


@pytest.mark.parametrize("keeps", [False, True], ids=["plain", "keeping-what-was-there"])
def test_kernels_that_go_leave_calls_as_they_end_without_us(home: Home, keeps: bool) -> None:
    """The engine's, one put over it before ours and one after: gone in every order, looked at in between or not."""
    code = (
        ORDERS
        + f"""
    keeps = {keeps}
    story = []
    for gone in itertools.permutations("EBA"):
        for looks in itertools.product([False, True], repeat=3):
            put("E", 1.0), put("B", 2.0, keeps), look(), story.append(call())
            put("A", 3.0, keeps), story.append(call())
            for name, looked in zip(gone, looks):
                take(name)
                story.append(call())
                if looked:
                    look(), story.append(call())
            put("E", 4.0), story.append(call())
            look(), story.append(call()), take("E"), story.append(call())
    print(json.dumps(story))
    """
    )
    ours, without = home.run(code).said, home.run(code, GEMMTUNED="0", AITER_TUNE_GEMM="0").said

    assert ours == without
    assert [[1.0], [1.0]] in ours, "the engine's, after those over it"


def test_what_is_destroyed_in_the_middle_of_threads_ends_their_calls_as_torch_does(home: Home) -> None:
    """Counts stay exact with a kernel that takes the place of the one that went, and nothing is told."""
    done = home.run(
        ORDERS
        + """
    put("E", 1.0), put("B", 2.0), look(), call()
    seen = [gemmtuned.status()["engine_operators"]]
    take("B")
    results = []

    def calls():
        mine = torch.zeros(2, 8)
        for _ in range(200):
            torch.ops._C.onednn_mm(mine, a, None, a)
            results.append(float(mine[0, 0]))

    workers = [threading.Thread(target=calls) for _ in range(4)]
    [w.start() for w in workers]
    [w.join() for w in workers]
    first = sum(s.calls for s in hook.native.drain() if s.problem.packing == "opaque")
    look(), calls()
    again = sum(s.calls for s in hook.native.drain() if s.problem.packing == "opaque")
    take("E"), call(), look()
    seen.append(gemmtuned.status()["engine_operators"])
    print(json.dumps([sorted(set(results)), len(results), first, again, seen, gemmtuned.status()["overridden"]]))
    """,
        GEMMTUNED_FLUSH_S="1000",
    )
    values, number, first, again, seen, overridden = done.said

    assert (values, number) == ([1.0], 1000)
    assert 2 + 1 <= first <= 2 + 800, "the two before and the call that found the kernel gone"
    assert again == 200
    assert seen == [["_C::onednn_mm", "_C::int8_scaled_mm_with_quant"], []]
    assert overridden == {}
    assert done.ours == []


def test_another_put_over_an_engines_operator_is_told(home: Home) -> None:
    done = home.run(
        ORDERS
        + """
    put("E", 1.0), look(), call(), put("A", 3.0)
    counted = call()
    over = gemmtuned.status()["overridden"]
    hook.tick(), hook.tick()
    took = take("A")
    call()
    print(json.dumps([counted, sorted(over), gemmtuned.status()["overridden"]]))
    """,
        GEMMTUNED_FLUSH_S="1000",
    )
    counted, over, after = done.said

    assert counted == [[3.0], [3.0]]
    assert over == ["CPU _C::int8_scaled_mm_with_quant", "CPU _C::onednn_mm"]
    assert after == {}
    assert len([line for line in done.ours if "_C::onednn_mm" in line and "left alone" in line]) == 1


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


EXACT = [operator for operator in operators() if operator.is_exact]


def test_the_table_names_arguments_that_its_schemas_have() -> None:
    for operator in EXACT:
        y, x, *_ = operator.arguments
        assert x >= 0
        named = {"weights": (2, 4), "kn": (2, 3, 4), "shuffled": (2, 3, 4), "nk": (2, 3, 4)}.get(
            operator.form, ()
        )  # w, scale_x, scale_w
        assert all(operator.arguments[i] >= 0 for i in named)
        assert y >= 0 or operator.schema.endswith("-> (Tensor)")
        assert not operator.routed or operator.name.startswith("gemmtuned::") or operator.name in ENGINES
    assert len({operator.name for operator in operators()}) == len(operators())
    numbered = {operator.engine: operator.name for operator in operators() if operator.engine}
    assert numbered == dict(enumerate(ENGINES, 1))


@pytest.mark.parametrize("operator", EXACT, ids=lambda operator: operator.name)
def test_schemas_are_spelled_as_torch_spells_them(operator: object) -> None:
    import torch

    schema = torch._C.parse_schema(operator.schema)  # type: ignore[attr-defined]
    assert [a.name for a in schema.arguments]


STAND_INS = """
    import json, re, threading
    import torch
    from torch.library import Library
    from gemmtuned.hooks import activate
    from gemmtuned.hooks.engine_operators import operators

    hook = activate.current()
    m, n, k, fp8, bf16 = 4, 128, 256, torch.float8_e4m3fn, torch.bfloat16
    kept = {}

    def fragment(space):
        return kept.setdefault(space, Library(space, "FRAGMENT"))

    def operands(one, names):
        # as the operator takes them, by name; what only it knows is a number of the right type
        x = torch.ones(m, k).to(bf16 if one.form.startswith("opaque") else fp8)
        w = torch.ones(n, k).to(fp8)
        known = {one.x: x, one.y: torch.zeros(m, n, dtype=bf16), one.w: w.t() if one.form in ("kn", "shuffled") else w,
                 one.scale_x: torch.ones(m, 2), one.scale_w: torch.ones(1, 2), one.out: 15}
        if one.form in ("kn", "shuffled"):
            known[one.scale_w] = torch.ones(2, 1)
        if one.sums_w:
            known |= {one.x: torch.ones(m, k).char(), one.w: torch.ones(n, k).char().t(), one.scale_x: torch.ones(m, 1),
                      one.scale_w: torch.ones(1, n), one.sums_w: torch.ones(n).int(), one.zero_x: torch.ones(m).int()}
        if one.form == "pairs":
            x, w, sx, sw = (torch.ones(rows, k // step).byte() for step in (2, 32) for rows in (m, n))
            known |= {one.x: x, one.w: w, one.scale_x: sx, one.scale_w: sw}
        if one.form == "opaque batched":
            known |= {one.x: torch.ones(3, m, k).to(bf16), one.y: torch.zeros(3, m, n, dtype=bf16)}
        return [known.get(name, default(kind)) for kind, name in names]

    def default(kind):
        return None if kind.endswith("?") else {
            "Tensor": torch.ones(1), "int": 0, "int[]": [128, 128], "bool": False, "str": ""}[kind]

    def stand_in(one, names):
        at = [name for _, name in names].index(one.y) if one.y else None

        def kernel(*given):
            if at is None:
                return torch.full((m, n), 2.0, dtype=bf16)
            given[at].fill_(2.0)

        return kernel
"""


def test_every_operator_of_the_table_is_counted_under_its_own_problem(home: Home) -> None:
    """Stand-ins that Python registered, with the table's schemas: counts, values and keys."""
    done = home.run(
        STAND_INS
        + """
    story = []
    for one in operators():
        text = one.schema if one.is_exact else one.name + "(Tensor a, Tensor sfa, Tensor d, int[3]? recipe=None) -> ()"
        space, _, rest = text.partition("::")
        names = [tuple(part.split()[:2]) for part in rest[rest.index("(") + 1:rest.index(") ->")].split(", ")]
        names = [(kind.replace("int[3]", "int[]"), name.partition("=")[0]) for kind, name in names]
        fragment(space).define(rest.replace(f"Tensor {one.y},", f"Tensor! {one.y},") if one.y else rest)
        short = rest.partition("(")[0]
        fragment(space).impl(short, stand_in(one, names), "CPU")
        hook.patches.look_for_foreign()
        list(hook.native.drain())
        given = operands(one, names)
        made = [getattr(getattr(torch.ops, space), short)(*given) for _ in range(3)]
        y = given[[name for _, name in names].index(one.y)] if one.y else made[0]
        counted = [[str(s.problem), s.calls] for s in hook.native.drain()]
        story.append([one.name, "zero points" if one.sums_w else one.form, y.unique().tolist(), counted])
    print(json.dumps([story, hook.patches.foreign.changed]))
    """,
        GEMMTUNED_FLUSH_S="1000",
    )
    story, changed = done.said

    assert changed == {}
    assert len(story) == len(operators())
    for name, form, values, counted in story:
        assert values == [2.0], name
        [[problem, calls]] = counted
        assert calls == 3, name
        shape = "3x4x128x256" if form == "opaque batched" else "4x128x256"
        family = {"opaque batched": "batched", "opaque": "dense", "weights": "weight_only"}.get(form, "scaled")
        assert problem.startswith(f"{family}:" if family != "dense" else "bf16:"), (name, problem)
        assert f":{shape}," in problem, (name, problem)
        said = {"scaled": "scale=1x32" if form == "pairs" else "scale=1x128", "weight_only": "wscale=128x128"}.get(
            family, "packing=opaque"
        )
        assert ("scale=row+zero" if form == "zero points" else said) in problem, (name, problem)


def test_what_is_no_scaled_product_of_ours_is_counted_as_opaque(home: Home) -> None:
    """Scales in another type or form than we have a name for: never the key of another product."""
    done = home.run(
        STAND_INS
        + """
    one = next(one for one in operators() if one.name == "vllm::fp8_gemm_nt_op")
    fragment("vllm").define(one.schema.partition("::")[2].replace("Tensor output", "Tensor! output"))
    fragment("vllm").impl("fp8_gemm_nt_op", lambda q, qs, w, ws, y, e8m0: None, "CPU")
    hook.patches.look_for_foreign()
    list(hook.native.drain())
    x, w, y = torch.ones(m, k).to(fp8), torch.ones(n, k).to(fp8), torch.zeros(m, n, dtype=bf16)
    scales = [(torch.ones(m, 2), torch.ones(1, 2)), (torch.ones(m, 1, dtype=torch.int32), torch.ones(n, 1).int()),
              (torch.ones(2, m).t(), torch.ones(1, 2)), (torch.ones(2, m), torch.ones(1, 2)),
              (torch.ones(m * 2), torch.ones(1, 2)), (torch.ones(m, 4), torch.ones(1, 4))]
    found = []
    for sx, sw in scales:
        torch.ops.vllm.fp8_gemm_nt_op(x, sx, w, sw, y, False)
        found += [str(s.problem) for s in hook.native.drain()]
    print(json.dumps(found))
    """,
        GEMMTUNED_FLUSH_S="1000",
    )
    kinds = ["opaque" if "packing=opaque" in problem else problem.partition("scale=")[2] for problem in done.said]

    assert [kind.startswith("1x128") for kind in kinds] == [True, False, True, False, False, False], done.said
    assert kinds[0] != kinds[2], "one by row, one by column"
    assert [kind for kind in kinds if not kind.startswith("1x128")] == ["opaque"] * 4


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
