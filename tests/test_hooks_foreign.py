"""Operators of engines: stand-ins of the same schemas are counted under the right problems, and left as they are."""

from __future__ import annotations

import pytest
from hooked import Home

from gemmtuned.hooks.foreign import OPERATORS

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
    until = time.monotonic() + 20
    while len(gemmtuned.status()["engine_operators"]) < 3 and time.monotonic() < until:
        time.sleep(0.05)

    fp8 = torch.float8_e4m3fn
    a, w = torch.ones(6, 256).to(fp8), torch.ones(64, 256).to(fp8)
    out = torch.zeros(6, 64, dtype=torch.bfloat16)
    one, rows, columns = torch.tensor([2.0]), torch.full((6, 1), 2.0), torch.full((1, 64), 0.5)
"""


def seen_in(home: Home, code: str) -> dict[str, int]:
    done = home.run(ENGINE + code + "\n    print(json.dumps(sys.exit_value))\n")
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


def test_packed_weights_are_counted_and_not_tuned(home: Home) -> None:
    counts = seen_in(
        home,
        """
    x, handler, c = torch.ones(2, 3, 32), torch.ones(32, 8), torch.zeros(2, 3, 8)
    workers = [threading.Thread(target=lambda: [torch.ops._C.onednn_mm(c, x, None, handler) for _ in range(50)])
               for _ in range(4)]
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
    done = home.run(ENGINE + code + "\n    print(json.dumps(sys.exit_value))\n")

    assert done.said is True
    assert any("weight_packed_linear" in line and "int is_vnni" in line for line in done.ours), done.ours


def test_switched_off_they_are_as_without_us(home: Home) -> None:
    code = """
    gemmtuned.disable()
    torch.ops._C.cutlass_scaled_mm(out, a, w.t(), one, one, None)
    sys.exit_value = bool((out == 1024).all())
    """
    assert not [p for p in seen_in(home, code) if p.startswith("scaled")]


def test_the_table_names_arguments_that_its_schemas_have() -> None:
    for operator in OPERATORS:
        y, x, *_ = operator.arguments
        assert x >= 0
        assert operator.form == "opaque" or min(operator.arguments[2:5]) >= 0
        assert y >= 0 or operator.schema.endswith("-> (Tensor)")
    assert len({operator.name for operator in OPERATORS}) == len(OPERATORS)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_schemas_are_spelled_as_torch_spells_them(operator: object) -> None:
    import torch

    schema = torch._C.parse_schema(operator.schema)  # type: ignore[attr-defined]
    assert [a.name for a in schema.arguments]
