"""gemmtuned.patch: experts of transformers' mixtures run as one op, with its results but for rounding."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from hooked import Home

import gemmtuned
from gemmtuned.configs.errors import GemmtunedError
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
    print(json.dumps([apart, trained, same, by_name]))
    """,
    )
    apart, trained, same, by_name = done.said
    assert trained and same
    assert set(apart) == set(KINDS) and all(0 <= far < 1e-5 for far in (*apart.values(), by_name)), apart
    counted = {str(problem): calls for (problem, _), calls in home.counts().items() if "moe:" in str(problem)}
    assert {key.partition(",")[0] for key in counted} == {"moe:fp32:7x32x32"}, "seven tokens of 32 values"
    assert sum(counted.values()) == 4 * 2 + 2, "two layers each but for gpt_oss, and qwen3_moe once more by name"


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
    assert "there is no patch 'transformers.attention', there are: transformers.moe" in done.err


def test_a_name_or_a_version_that_is_not_known_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GemmtunedError, match="there is no patch 'vllm', there are: transformers"):
        gemmtuned.patch("vllm")
    old = types.ModuleType("transformers.integrations.moe")
    with pytest.raises(GemmtunedError, match="no registry of experts with grouped_mm: transformers 5 brings it"):
        transformers_moe.apply(old)
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(GemmtunedError, match="does not import"):
        gemmtuned.patch("transformers.moe")


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
