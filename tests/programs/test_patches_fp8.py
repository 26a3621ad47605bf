"""gemmtuned.patch("transformers.fp8_moe"): experts in FP8, whose own form takes kernels from the hub, run as one op."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hooked import Home, publish, published, wait_for

import gemmtuned
from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.mixture import How, Operands, by_expert
from gemmtuned.ops import transformers_moe

pytest.importorskip("transformers", reason="its mixtures are what is patched")

EXPERTS = """
    import json, sys, torch
    from transformers.integrations import finegrained_fp8 as theirs
    from transformers.integrations.moe import use_experts_implementation
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

    def experts(implementation, marked=1):
        "As replace_with_fp8_linear makes them; marked: how often, once for each layer of a model."
        config = Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=128, num_experts=6, num_experts_per_tok=2)
        config._experts_implementation = implementation
        made = theirs.FP8Experts
        if not hasattr(theirs, "init_and_forward"):
            theirs.init_and_forward = made.__init__, made.forward
        made.__init__, made.forward = theirs.init_and_forward
        for _ in range(marked):
            made = use_experts_implementation(made, experts_interface=theirs.ALL_FP8_EXPERTS_FUNCTIONS)
        torch.manual_seed(0)
        e = made(config, block_size=[128, 128])
        for name, p in e.named_parameters():
            p.requires_grad_(False)
            p.copy_(torch.rand(p.shape) * 0.02 if "scale" in name else torch.randn(p.shape).to(p.dtype))
        return e

    GIVEN = torch.randn(7, 256).bfloat16(), torch.arange(14).reshape(7, 2) % 6, torch.rand(7, 2)
"""


def made(implementation: str = "grouped_mm", marked: int = 1) -> tuple[Any, Any]:
    """(experts, what they are called with)."""
    import textwrap

    found: dict[str, Any] = {}
    exec(textwrap.dedent(EXPERTS), found)
    return found["experts"](implementation, marked), found["GIVEN"]


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What ran: `ours` for each call that fused_moe was asked for, and `theirs`."""
    from transformers.integrations import finegrained_fp8 as theirs

    ran: list[str] = []

    def stock(experts: Any, x: torch.Tensor, *_: Any) -> torch.Tensor:
        ran.append("theirs")
        return x

    usual = transformers_moe.fused_moe_or
    monkeypatch.setattr(transformers_moe, "fused_moe_or", lambda *a: ran.append("ours") or usual(*a))
    functions = theirs.ALL_FP8_EXPERTS_FUNCTIONS
    before = functions["grouped_mm"]
    functions["grouped_mm"] = stock
    undo = gemmtuned.patch("transformers.fp8_moe")
    with torch.no_grad():
        yield ran
    undo()
    assert functions["grouped_mm"] is stock
    functions["grouped_mm"] = before


def test_experts_in_fp8_are_served_by_what_is_published(home: Home) -> None:
    """Without a verdict transformers' own form runs, and the call is counted with its scales; then ours does."""
    layer = Problem.parse(
        "moe:bf16/fp8_e4m3:7x256x256,wscale=128x128,threads=2,experts=6,topk=2,inter=128,act=silu_gated"
    )
    program = (
        EXPERTS
        + """
    import gemmtuned
    from hooked import wait_for
    torch.set_num_threads(2)
    theirs.ALL_FP8_EXPERTS_FUNCTIONS["grouped_mm"] = lambda self, x, *_: x  # the hub's kernels are not here
    gemmtuned.patch("transformers.fp8_moe")
    e = experts("grouped_mm")
    for generation in range(2):
        wait_for(lambda: gemmtuned.generation() == generation, limit_s=60)
        with torch.no_grad():
            y = e(*GIVEN)
        print(json.dumps([torch.equal(y, GIVEN[0]), y.float().abs().sum().item()]), flush=True)
    """
    )

    def counted() -> dict[tuple[str, str], int]:
        return {key: calls for key, calls in home.counts().items() if "experts" in key[0]}

    with home.start(program) as running:
        assert running.stdout is not None
        assert json.loads(running.stdout.readline())[0], "theirs"
        wait_for(lambda: (home.path / "tune.db").exists() and counted() == {(str(layer), "miss"): 1}, limit_s=60)
        publish(home.path / "configs", [published(layer, "moe_grouped")], 1)
        out, err = running.communicate(timeout=90)
    assert running.wait() == 0, err
    are_theirs, total = json.loads(out)
    assert not are_theirs and total > 0
    assert counted() == {(str(layer), "miss"): 1, (str(layer), "exact"): 1}


def test_its_result_is_that_of_the_dequantised_experts(patched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate above up, the activation, routing weights and scales are those that transformers' own form has."""
    from gemmtuned.ops import moe

    e, (x, ids, gates) = made()

    def served(_: Any, x: Any, w1: Any, w2: Any, weights: Any, ids: Any, act: Any, *scales: Any) -> torch.Tensor:
        return moe.fused_moe(
            x, w1, w2, weights, ids, activation=act, quant_type="per_128x128", w1_scale=scales[0], w2_scale=scales[1]
        )

    monkeypatch.setattr(transformers_moe, "fused_moe_or", served)
    scale1, scale2 = e.gate_up_proj_scale_inv, e.down_proj_scale_inv
    given = Operands(
        x=x.double(), w1=e.gate_up_proj, w2=e.down_proj, weights=gates.double(), ids=ids, scale1=scale1, scale2=scale2
    )  # fmt: skip
    want = by_expert(given, How(quant="128x128"))
    assert (e(x, ids, gates).double() - want).norm() <= 1e-2 * want.norm()
    assert not patched


def test_a_class_that_was_marked_for_each_layer_is_asked_once(
    patched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers marks FP8Experts anew for each layer, so that its loop lies below as many forwards as layers."""
    e, given = made("eager", marked=3)
    monkeypatch.setattr(type(e), "linear", lambda self, x, w, *_, **__: x.new_ones(len(x), w.shape[0]))
    assert e(*given).shape == given[0].shape
    assert patched == ["ours"]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "static scales of X": lambda e: setattr(e, "activation_scheme", "static"),
    "other blocks": lambda e: setattr(e, "block_size", [64, 64]),
    "no blocks": lambda e: setattr(e, "block_size", None),
    "a clamped gate": lambda e: setattr(e, "limit", 7.0),
    "a soft cap": lambda e: setattr(e, "gate_softcap", 30.0),
    "a gate of gpt-oss": lambda e: setattr(e, "swiglu_alpha", 1.7),
    "another activation": lambda e: setattr(e, "act_fn", torch.nn.ReLU()),
    "experts elsewhere": lambda e: setattr(e, "_is_expert_parallel", True),
    "weights in 16 bits": lambda e: setattr(e, "down_proj", torch.nn.Parameter(e.down_proj.bfloat16(), False)),
    "scales in e8m0": lambda e: setattr(
        e, "down_proj_scale_inv", torch.nn.Parameter(e.down_proj_scale_inv.to(torch.float8_e8m0fnu), False)
    ),
    "scales of rows": lambda e: setattr(e, "down_proj_scale_inv", torch.nn.Parameter(torch.ones(6, 256, 1), False)),
    "a gate of its own": lambda e: setattr(type(e), "_apply_gate", lambda self, x: x),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_known_goes_on_to_transformers(
    name: str, patched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    e, given = made()
    e(*given)
    assert patched == ["ours", "theirs"]  # nothing is published
    monkeypatch.setattr(type(e), "_apply_gate", type(e)._apply_gate)  # put back after the test
    CHANGES[name](e)
    e(*given)
    assert patched == ["ours", "theirs", "theirs"]


def test_a_gate_that_asks_for_more_than_was_looked_at_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import finegrained_fp8 as theirs

    monkeypatch.setattr(theirs.FP8Experts, "_apply_gate", lambda self, x: self.act_fn(x) * self.temperature)
    with pytest.raises(GemmtunedError, match="gate of FP8Experts asks for temperature"):
        gemmtuned.patch("transformers.fp8_moe")
    monkeypatch.setitem(sys.modules, "transformers.integrations.finegrained_fp8", types.ModuleType("empty"))
    with pytest.raises(GemmtunedError, match="no registry of experts"):
        gemmtuned.patch("transformers.fp8_moe")
