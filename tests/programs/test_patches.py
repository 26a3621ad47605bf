"""gemmtuned.patch: experts of transformers' mixtures run as one op, with its results but for rounding."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hooked import Home, publish, published
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import gemmtuned
from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.problem import Problem
from gemmtuned.ops import transformers_moe

pytest.importorskip("transformers", reason="its mixtures are what is patched")

MODELS = """
    import json, sys, time, torch, gemmtuned
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    SMALL = dict(
        hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_experts=6, num_local_experts=6, num_experts_per_tok=2, vocab_size=64,
        max_position_embeddings=32,
    )

    def model(kind):
        config = CONFIG_MAPPING[kind]()
        for name, value in SMALL.items():
            if hasattr(config, name):
                setattr(config, name, value)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:2]
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()

    IDS = torch.arange(7).reshape(1, 7) * 5 % 64

    def logits(m):
        with torch.inference_mode():
            return m(IDS).logits
"""
KINDS = ("qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "gpt_oss")


@pytest.mark.long
def test_mixtures_of_transformers_run_as_one_op_and_back(home: Home) -> None:
    """One process for all, for importing transformers is most of it."""
    done = home.run(
        MODELS
        + f"""
    kinds = {KINDS!r}
    models = {{kind: model(kind) for kind in kinds}}
    before = {{kind: logits(m) for kind, m in models.items()}}
    undo = gemmtuned.patch("transformers.moe")
    again = gemmtuned.patch("transformers.moe")  # a second one changes nothing
    apart = {{}}
    for kind, m in models.items():
        apart[kind] = (logits(m) - before[kind]).abs().max().item()
    m = models["mixtral"].train()
    loss = m(IDS, labels=IDS).loss
    loss.backward()
    trained = all(p.grad is not None and bool(p.grad.isfinite().all()) for p in m.parameters())
    undo()
    same = all(torch.equal(logits(m.eval()), before[kind]) for kind, m in models.items())
    chosen = models["qwen3_moe"]
    chosen.set_experts_implementation("gemmtuned")  # by its own name, as transformers has it
    by_name = (logits(chosen) - before["qwen3_moe"]).abs().max().item()
    looped = models["mixtral"]
    looped.set_experts_implementation("eager")  # its class's own loop
    own = logits(looped)
    undo = gemmtuned.patch("transformers.moe")
    by_loop = (logits(looped) - own).abs().max().item()
    undo()
    same = same and torch.equal(logits(looped), own)
    print(json.dumps([apart, trained, same, by_name, by_loop]))
    """,
    )
    apart, trained, same, by_name, by_loop = done.said
    assert trained and same
    assert set(apart) == set(KINDS) and all(0 <= far < 1e-5 for far in (*apart.values(), by_name, by_loop)), apart
    counted = {str(problem): calls for (problem, _), calls in home.counts().items() if "moe:" in str(problem)}
    assert {key.partition(",")[0] for key in counted} == {"moe:fp32:7x32x32"}, "seven tokens of 32 values"
    assert sum(counted.values()) == 4 * 2 + 2 + 2, "two layers each but for gpt_oss, and two of them once more"


@pytest.mark.long
def test_a_layer_runs_in_its_own_form_unless_a_kernel_is_known_to_be_faster(home: Home) -> None:
    """Without a verdict counted as one call; where torch's own is best its products are counted as any program's."""
    layer = Problem.parse("moe:fp32:7x32x32,threads=2,experts=6,topk=2,inter=16,act=silu_gated")
    program = (
        MODELS
        + """
    from hooked import wait_for
    torch.set_num_threads(2)
    m = model("qwen3_moe")
    wait_for(lambda: gemmtuned.generation() == int(sys.argv[1]))
    gemmtuned.disable()
    before = logits(m)
    gemmtuned.enable()
    wait_for(lambda: gemmtuned.generation() == int(sys.argv[1]))
    gemmtuned.patch("transformers.moe")
    print(json.dumps((logits(m) - before).abs().max().item()))
    """
    )

    def counted() -> tuple[dict[str, int], int]:
        """(calls of the experts as one op by outcome, products of experts alone)."""
        found = home.counts().items()
        return (
            {outcome: calls for (text, outcome), calls in found if "experts" in text},
            sum(calls for (text, _), calls in found if "x32x16," in text),
        )

    assert home.run(program, "0").said == 0
    assert counted() == ({"miss": 2}, 0)
    publish(home.path / "configs", [replace(published(layer, "torch"), state="default_best")], 1)
    assert home.run(program, "1").said == 0
    one_by_one = counted()[1]
    assert counted() == ({"miss": 2}, one_by_one) and one_by_one >= 2 * 2
    publish(home.path / "configs", [published(layer, "moe_grouped")], 2)
    assert 0 <= home.run(program, "2").said < 1e-5
    assert counted() == ({"miss": 2, "exact": 2}, one_by_one)


@pytest.mark.long
def test_a_variable_patches_what_a_program_imports_later(home: Home) -> None:
    done = home.run(
        MODELS
        + """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    until = time.monotonic() + 20
    while not hasattr(ALL_EXPERTS_FUNCTIONS["grouped_mm"], "is_gemmtuned") and time.monotonic() < until:
        logits(model("qwen3_moe"))
        time.sleep(0.1)
    print(json.dumps(hasattr(ALL_EXPERTS_FUNCTIONS["grouped_mm"], "is_gemmtuned")))
    """,
        fresh=True,
        GEMMTUNED_PATCH="transformers.moe,transformers.attention",
        GEMMTUNED_FLUSH_S="0.1",
    )
    assert done.said is True
    assert "there is no patch 'transformers.attention', there are: deep_gemm, flashinfer, transformers.moe" in done.err


def test_a_name_or_a_version_that_is_not_known_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        GemmtunedError, match="there is no patch 'vllm', there are: deep_gemm, flashinfer, transformers"
    ):
        gemmtuned.patch("vllm")
    for wrong in (None, 3, ["deep_gemm"]):
        with pytest.raises(GemmtunedError, match=r"there is no patch .*, there are: deep_gemm"):
            gemmtuned.patch(wrong)  # type: ignore[arg-type]
    old = types.ModuleType("transformers.integrations.moe")
    with pytest.raises(GemmtunedError, match="no registry of experts with grouped_mm: transformers 5 brings it"):
        transformers_moe.apply(old)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "6.0.1")
    with pytest.raises(
        GemmtunedError, match=r"transformers 6.0.1 is not known to .*, which was written for 5.x: leave"
    ):
        gemmtuned.patch("transformers.moe")
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(GemmtunedError, match="does not import"):
        gemmtuned.patch("transformers.moe")


def a_hook(*_: Any) -> None:
    """Sees what passes, and changes nothing."""


class Wrapped(torch.Tensor):
    """A subclass, which may do anything at any call."""


class Watching(TorchFunctionMode):
    """Sees each of torch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
WATCHED: dict[str, Callable[[Any, Given], Any]] = {
    "a hook of the experts": lambda e, given: e.register_forward_hook(a_hook) and e(*given),
    "a hook before the experts": lambda e, given: e.register_forward_pre_hook(a_hook) and e(*given),
    "a hook of the activation": lambda e, given: e.act_fn.register_forward_hook(a_hook) and e(*given),
    "a hook before the activation": lambda e, given: e.act_fn.register_forward_pre_hook(a_hook) and e(*given),
    "a forward of the activation's own": lambda e, given: setattr(e.act_fn, "forward", F.silu) or e(*given),
    "a subclass": lambda e, given: e(given[0].as_subclass(Wrapped), *given[1:]),
    "derivatives": lambda e, given: torch.enable_grad()(e)(given[0].clone().requires_grad_(), *given[1:]),
    "a transform": lambda e, given: torch.func.functionalize(e)(*given),
    "a trace": lambda e, given: torch.jit.trace(lambda *g: e(*g), given, check_trace=False)(*given),
    "an fx trace": lambda e, given: make_fx(lambda *g: e(*g))(*given)(*given),
}
MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a mode of dispatch": lambda: FlopCounterMode(display=False),
    "a mode of functions": Watching,
}  # fmt: skip


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Given, list[int]]]:
    """(experts of Qwen3-MoE, operands, a list that grows with each call that we serve)."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as theirs

    config = theirs.Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_experts=6, num_experts_per_tok=2)
    config._experts_implementation = "grouped_mm"
    experts = theirs.Qwen3MoeExperts(config)
    served: list[int] = []
    usual = transformers_moe.fused_moe_or
    monkeypatch.setattr(transformers_moe, "fused_moe_or", lambda *a: served.append(1) or usual(*a))
    torch.manual_seed(0)
    for p in experts.requires_grad_(False).parameters():
        torch.nn.init.normal_(p, std=0.1)
    undo = gemmtuned.patch("transformers.moe")
    with torch.no_grad():
        yield experts, (torch.randn(5, 32), torch.randint(0, 6, (5, 2)), torch.rand(5, 2)), served
    undo()


@pytest.mark.parametrize("name", [*WATCHED, *MODES])
def test_where_somebody_looks_on_transformers_own_form_runs(name: str, patched: tuple[Any, Given, list[int]]) -> None:
    experts, given, served = patched
    right = experts(*given)
    assert len(served) == 1
    if name in MODES:
        with MODES[name]():
            y = experts(*given)
    else:
        y = WATCHED[name](experts, given)
    assert len(served) == 1
    assert torch.allclose(y, right, rtol=0.1 if name == "autocast" else 1e-4, atol=1e-2 if name == "autocast" else 1e-5)


def test_flags_of_later_versions_may_be_missing_and_are_heeded_where_they_are(
    patched: tuple[Any, Given, list[int]],
) -> None:
    """transformers 5.17 has neither."""
    experts, given, _served = patched
    for flag in ("has_post_expert_norm", "_is_expert_parallel"):
        setattr(experts, flag, True)
        assert transformers_moe._taken(experts, type(experts)._apply_gate, given[0]) is None
        delattr(experts, flag)
        assert transformers_moe._taken(experts, type(experts)._apply_gate, given[0]) is not None


def test_a_loop_of_transformers_is_taken_and_a_programs_own_is_not(patched: tuple[Any, Given, list[int]]) -> None:
    """A program's own may compute another thing, and have names of its own for what it is given."""
    from transformers.integrations import moe
    from transformers.models.gpt_oss import modeling_gpt_oss

    experts, given, served = patched
    x, ids, gates = given
    experts.config._experts_implementation = "eager"

    @moe.use_experts_implementation
    class Doubled(type(experts)):
        def forward(self, x: Any, ids: Any, gates: Any, times: float = 2) -> Any:
            return times * x

    own = Doubled(experts.config)
    assert torch.equal(own(*given), 2 * x) and torch.equal(own(x, ids, gates=gates, times=3), 3 * x) and not served
    config = modeling_gpt_oss.GptOssConfig(hidden_size=32, intermediate_size=16, num_local_experts=6)
    config._experts_implementation = "eager"
    with_names = modeling_gpt_oss.GptOssExperts(config)
    for p in with_names.parameters():
        torch.nn.init.normal_(p, std=0.1)
    y = with_names(x, router_indices=ids, routing_weights=gates)
    assert torch.equal(y, with_names(*given)) and not served
    experts(*given)
    assert len(served) == 1


def test_a_place_for_new_tensors_and_a_compiler_are_nobody(patched: tuple[Any, Given, list[int]]) -> None:
    experts, given, served = patched
    with torch.device("cpu"):
        right = experts(*given)
    assert len(served) == 1
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    y = torch.compile(experts, backend=backend, fullgraph=True)(*given)
    assert torch.equal(y, right) and "gemmtuned.fused_moe" in graphs[0]


def test_no_patch_is_loaded_unless_it_is_asked_for(home: Home, tmp_path: Path) -> None:
    done = home.run(
        """
    import json, sys, time, torch
    time.sleep(0.3)
    print(json.dumps([name for name in sys.modules if name.startswith(("gemmtuned.patches", "transformers"))]))
    """,
        GEMMTUNED_FLUSH_S="0.1",
    )
    assert done.said == []
