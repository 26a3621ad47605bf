"""fused_moe whose caller lets X and H be quantised: a permission, which changes the key on GPUs alone."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hooked import published

from gemmtuned import shim
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.mixture import How, Operands
from gemmtuned.ops import fused_moe
from gemmtuned.ops import moe as op
from gemmtuned.ops.moe_table import MISS, Serving


def given(dtype: torch.dtype = torch.float8_e4m3fn) -> dict[str, Any]:
    torch.manual_seed(0)
    w1, w2 = (torch.randn(4, *shape).to(dtype) for shape in ((256, 128), (128, 128)))
    return {
        "hidden_states": torch.randn(6, 128).bfloat16(), "w1": w1, "w2": w2, "topk_weight": torch.rand(6, 2),
        "topk_ids": torch.randint(0, 4, (6, 2)), "quant_type": "per_1x128", "w1_scale": torch.rand(4, 2, 1) / 16,
        "w2_scale": torch.rand(4, 1, 1) / 16,
    }  # fmt: skip


def operands(o: dict[str, Any]) -> Operands:
    return Operands(
        x=o["hidden_states"], w1=o["w1"], w2=o["w2"], weights=o["topk_weight"], ids=o["topk_ids"], scale1=o["w1_scale"],
        scale2=o["w2_scale"],
    )  # fmt: skip


def test_on_a_cpu_the_permission_changes_neither_bits_nor_key() -> None:
    o = given()
    assert torch.equal(fused_moe(**o, quantize_activations=True), fused_moe(**o))
    plain = op.problem_of(operands(o), How(quant="128x128"))
    assert plain is not None and op.problem_of(operands(o), How(quant="128x128", activations="1x128")) == plain


def test_compiled_code_keeps_the_permission() -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        seen.extend(str(node.args[-1]) for node in graph.graph.nodes if "fused_moe" in str(node.target))
        return graph.forward

    for allowed in (True, False):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(lambda **o: fused_moe(**o, quantize_activations=allowed), backend=backend)(**given())  # noqa: B023
    assert seen == ["1x128", "none"]


@pytest.mark.parametrize(
    ("dtype", "quant", "asked"),
    [(torch.float8_e4m3fn, "per_1x128", "1x128"), (torch.float8_e4m3fn, "per_128x128", "1x128"),
     (torch.int8, "per_1x128", "none"), (torch.float8_e4m3fn, "per_Tensor", "none")],
)  # fmt: skip
def test_it_is_asked_where_weights_are_of_e4m3_in_blocks(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, quant: str, asked: str
) -> None:
    """By programs of AITER, too, whose fused_moe quantises; others have to say it."""
    o = given(dtype) | {"quant_type": quant}
    if quant == "per_Tensor":
        o |= {"w1_scale": torch.ones(4), "w2_scale": torch.ones(4)}
    seen: list[str] = []

    def run(found: Operands, how: How, *_: Any) -> torch.Tensor:
        seen.append(how.activations)
        return found.x

    monkeypatch.setattr(op, "_run", run)
    fused_moe(**o)
    fused_moe(**o, quantize_activations=True)
    shim.install()
    try:
        from aiter.fused_moe import fused_moe as aiters  # type: ignore[import-not-found]

        aiters(**o)
        aiters(**o, quantize_activations=False)
    finally:
        shim.remove()
    assert seen == ["none", asked, asked, "none"]


def test_a_kernel_that_quantises_nothing_serves_until_the_permission_has_a_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is right for the strict problem is right here; the call stays one that nobody has tuned."""
    may = Problem(
        family="moe", m=6, n=128, k=128, inter=128, experts=4, topk=2, act="silu_gated", dtype="bf16",
        wdtype="fp8_e4m3", scale="1x128", wscale="128x128",
    )  # fmt: skip
    strict = replace(may, scale="none", scale_dtype="")
    ours = published(strict, "moe_grouped", device="cuda-x", stamp="x")
    table = {strict: Serving("exact", lambda o: o.x, ours)}
    monkeypatch.setattr(op, "serving", lambda hook, problem, place, captured: table.get(problem, MISS))
    o, hook = operands(given()), SimpleNamespace()
    found = op._found_or_exact(hook, may, o)
    assert found.call is table[strict].call and found.outcome == MISS.outcome
    assert op._found_or_exact(hook, strict, o) is table[strict]
    table[may] = Serving("exact", lambda o: o.x, ours)
    assert op._found_or_exact(hook, may, o) is table[may]


def test_torchs_own_for_the_strict_problem_is_no_verdict_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs before anything is tuned may be far better where X and H may be quantised."""
    may = Problem(
        family="moe", m=6, n=128, k=128, inter=128, experts=4, topk=2, act="silu_gated", dtype="bf16",
        wdtype="fp8_e4m3", scale="1x128", wscale="128x128",
    )  # fmt: skip
    strict = replace(may, scale="none", scale_dtype="")
    table = {strict: Serving("exact", lambda o: o.x, published(strict, "torch", device="cuda-x", stamp="x"))}
    monkeypatch.setattr(op, "serving", lambda hook, problem, place, captured: table.get(problem, MISS))
    assert op._found_or_exact(SimpleNamespace(), may, operands(given())) is MISS


def test_a_layer_in_fp8_keeps_its_own_form_until_its_own_problem_has_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers that quantise by kernels of others a strict verdict says nothing; nor is compiled code taken over."""
    o, counted = given(), []
    strict = published(
        Problem(
            family="moe", m=6, n=128, k=128, inter=128, experts=4, topk=2, act="silu_gated", dtype="bf16",
            wdtype="fp8_e4m3", wscale="128x128",
        ), "moe_grouped", device="cuda-x", stamp="x",
    )  # fmt: skip
    hook = SimpleNamespace(count_op=lambda problem, place, outcome, graph: counted.append((problem.scale, outcome)))
    monkeypatch.setattr(op.activate, "current", lambda: hook)
    monkeypatch.setattr(op, "own_op", lambda hook, place: nullcontext())
    monkeypatch.setattr(op, "problem_of", lambda o, how: replace(strict.problem, scale=how.activations, scale_dtype=""))
    table = {strict.problem: Serving("exact", lambda o: o.x, strict)}
    monkeypatch.setattr(op, "serving", lambda hook, problem, place, captured: table.get(problem, MISS))
    x = o["hidden_states"]
    call = (x, o["w1"], o["w2"], o["topk_weight"], o["topk_ids"], "silu", o["w1_scale"], o["w2_scale"])
    assert torch.equal(op.fused_moe_or(lambda: x + 1, *call), x + 1)
    assert counted == [("1x128", MISS.outcome)]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(op.fused_moe_or(lambda: x + 2, *call), x + 2)
