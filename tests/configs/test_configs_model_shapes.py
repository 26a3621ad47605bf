"""Shapes from a config.json: against transformers' own modules, AITER's lists of served models, and sums by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.model_layers import MODELS
from gemmtuned.configs.model_reader import Reader
from gemmtuned.configs.model_shapes import dtype_of, plan, problems, read_config

# Small, and no two sizes alike, so that a mix-up shows
BASE = {
    "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96,
    "num_hidden_layers": 3, "vocab_size": 320, "pad_token_id": 0,
}  # fmt: skip
MLA = {
    "num_key_value_heads": 8, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10, "n_group": 2,
}  # fmt: skip
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
INDEXER = {"index_n_heads": 6, "index_head_dim": 32}
SMALL: dict[str, list[dict[str, Any]]] = {
    "llama": [{}, {"head_dim": 24, "attention_bias": True, "mlp_bias": True}],
    "mistral": [{}, {"head_dim": 24}],
    "qwen2": [{}],
    "qwen3": [{}, {"head_dim": 24, "attention_bias": True}],
    "glm": [{}, {"head_dim": 24, "attention_bias": False}],
    "glm4": [{}, {"head_dim": 24}],
    "mixtral": [{"num_local_experts": 4}],
    "qwen2_moe": [
        {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
        {
            "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2, "mlp_only_layers": [0], "qkv_bias": False,
        },
    ],
    "qwen3_moe": [
        {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 24},
        {"num_experts": 4, "moe_intermediate_size": 24, "mlp_only_layers": [1], "attention_bias": True},
    ],
    "gpt_oss": [{"num_local_experts": 4}, {"num_local_experts": 4, "head_dim": 24}],
    "glm4_moe": [{**EXPERTS, "head_dim": 24}, {**EXPERTS, "attention_bias": True, "first_k_dense_replace": 0}],
    "deepseek_v2": [{**MLA, **EXPERTS}, {**MLA, **EXPERTS, "q_lora_rank": None}],
    "deepseek_v3": [{**MLA, **EXPERTS}, {**MLA, **EXPERTS, "attention_bias": True}],
    "deepseek_v32": [{**MLA, **EXPERTS, **INDEXER}],
    "glm_moe_dsa": [
        {**MLA, **EXPERTS, **INDEXER}, {**MLA, **EXPERTS, **INDEXER, "index_topk_freq": 2},
        {**MLA, **EXPERTS, **INDEXER, "index_topk_pattern": "FSF"},
    ],
    "glm4_moe_lite": [{**MLA, **EXPERTS}],
    "ministral3": [{"head_dim": 24}],
    "phi3": [{}],
    "seed_oss": [{"head_dim": 24}, {"attention_bias": False, "attention_out_bias": True}],
    "qwen3_next": [{
        "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "head_dim": 24,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
        "num_hidden_layers": 5,
    }],
    "mimo_v2_flash": [{
        "n_routed_experts": 4, "moe_intermediate_size": 24, "head_dim": 24, "v_head_dim": 16,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "swa_num_key_value_heads": 4,
    }],
    "minimax_m3_vl_text": [{
        "num_local_experts": 4, "head_dim": 24, "dense_intermediate_size": 112, "shared_intermediate_size": 40,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    }],
    "kimi_linear": [{
        **MLA, "num_experts": 4, "moe_intermediate_size": 24, "num_shared_experts": 2, "linear_num_heads": 4,
        "linear_head_dim": 12, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    }],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "more"), [(kind, more) for kind, all_ in SMALL.items() for more in all_])
def test_every_weight_is_one_that_transformers_builds(kind: str, more: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES:
        pytest.skip(f"this transformers has no {kind}")
    config = transformers.AutoConfig.for_model(kind, **{**BASE, **more})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    built: Counter[tuple[str, tuple[int, ...], bool]] = Counter()
    biases = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or name.endswith(("bias", "embed_tokens.weight", "conv1d.weight", "A_log")):
            continue
        sizes = tuple(parameter.shape)
        if kind == "gpt_oss" and parameter.dim() == 3:  # its experts lie transposed
            sizes = (sizes[0], sizes[2], sizes[1])
        short = name.removeprefix("model.").removesuffix(".weight")
        short = short.split(".", 2)[2] if short.startswith("layers.") else short
        bias = {f"{name.removesuffix('.weight')}.bias", f"{name}_bias"} & biases
        built[short, sizes, bool(bias)] += 1

    ours: Counter[tuple[str, tuple[int, ...], bool]] = Counter()
    for w in plan({"model_type": kind, **BASE, **more}, fused=False).weights:
        ours[w.name, (w.experts, w.n, w.k) if w.experts else (w.n, w.k), w.bias] += w.count

    assert ours == built


def test_every_model_we_know_is_compared_with_transformers() -> None:
    """Here by small configs, in test_configs_models.py by published ones; transformers has no type for the others."""
    published = {
        "deepseek_v4", "llama4_text", "minimax_m2", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text",
        "qwen3_vl_moe_text", "qwen3_vl_text",
    }  # fmt: skip
    by_hand = {"kimi_k2", "mimo", "nemotron-nas"}
    assert set(MODELS) - set(SMALL) == published | by_hand


def test_head_dim_left_out_is_what_transformers_takes() -> None:
    transformers = pytest.importorskip("transformers")
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING

    kinds = (
        "qwen3", "glm", "glm4", "gpt_oss", "qwen3_vl_text", "llama4_text", "seed_oss", "qwen3_5_text",
        "qwen3_5_moe_text", "qwen3_next",
    )  # fmt: skip
    assert [Reader({}, kind).value("head_dim") for kind in kinds] == [mapping[kind]().head_dim for kind in kinds]


# --- as served: the figures are those of the model cards, the shapes those of AITER's lists for the same models

LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
    "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_235B = {
    "model_type": "qwen3_moe", "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128,
    "num_hidden_layers": 94, "vocab_size": 151936, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "num_hidden_layers": 61, "vocab_size": 129280,
}  # fmt: skip
GPT_OSS_120B = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 2880, "num_local_experts": 128, "num_hidden_layers": 36, "vocab_size": 201088,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    },
}  # fmt: skip


def sizes(config: dict[str, Any], **how: Any) -> dict[str, tuple[int, int]]:
    return {w.name: (w.n, w.k) for w in plan(config, **how).weights if not w.experts}


def test_llama_70b_as_served() -> None:
    assert sizes(LLAMA_70B) == {
        "self_attn.qkv_proj": (10240, 8192),  # (64 + 2 * 8) * 128
        "self_attn.o_proj": (8192, 8192),
        "mlp.gate_up_proj": (57344, 8192),  # 2 * 28672
        "mlp.down_proj": (8192, 28672),
        "lm_head": (128256, 8192),
    }
    assert sizes(LLAMA_70B, tp=8) == {
        "self_attn.qkv_proj": (1280, 8192), "self_attn.o_proj": (8192, 1024), "mlp.gate_up_proj": (7168, 8192),
        "mlp.down_proj": (8192, 3584), "lm_head": (16032, 8192),
    }  # fmt: skip


def test_deepseek_v3_on_eight_ranks_as_served() -> None:
    assert sizes(DEEPSEEK_V3, tp=8) == {
        "self_attn.fused_qkv_a_proj": (2112, 7168),  # 1536 + 512 + 64
        "self_attn.q_b_proj": (3072, 1536),  # 128 heads / 8 * (128 + 64)
        "self_attn.kv_b_proj": (4096, 512),  # 16 * (128 + 128)
        "self_attn.w_kc": (512, 128),
        "self_attn.w_vc": (128, 512),
        "self_attn.o_proj": (7168, 2048),
        "mlp.gate_up_proj": (4608, 7168),
        "mlp.down_proj": (7168, 2304),
        "mlp.gate": (256, 7168),
        "mlp.shared_experts.gate_up_proj": (512, 7168),
        "mlp.shared_experts.down_proj": (7168, 256),
        "lm_head": (16160, 7168),
    }
    absorbed = [w for w in plan(DEEPSEEK_V3, tp=8).weights if w.batch > 1]
    assert {w.batch for w in absorbed} == {16}
    assert {p.family for p in problems(absorbed, [1], dtype="bf16", threads=0)} == {"batched"}


@pytest.mark.parametrize(("tp", "qkv", "o"), [(1, 9216, 8192), (2, 4608, 4096), (4, 2304, 2048), (8, 1280, 1024)])
def test_key_and_value_heads_are_repeated_where_ranks_are_more(tp: int, qkv: int, o: int) -> None:
    found = sizes(QWEN3_235B, tp=tp)  # 4 of them: at 8 ranks each has one, (8 + 2) * 128

    assert found["self_attn.qkv_proj"] == (qkv, 4096)
    assert found["self_attn.o_proj"] == (4096, o)


def test_what_is_quantised_is_named_and_left_out() -> None:
    found = {w.name: w for w in plan(GPT_OSS_120B).weights}

    assert (found["self_attn.qkv_proj"].n, found["self_attn.qkv_proj"].bias) == (5120, True)
    assert (found["mlp.router"].n, found["mlp.router"].k) == (128, 2880)
    assert {name for name, w in found.items() if w.left_out} == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    fp8 = {**DEEPSEEK_V3, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert {w.name for w in plan(fp8).weights if not w.left_out} == {"mlp.gate", "lm_head"}


def test_each_shape_says_why() -> None:
    qkv = next(w for w in plan(LLAMA_70B, tp=8).weights if w.name == "self_attn.qkv_proj")

    assert qkv.why == (
        "1024 q_proj + 128 k_proj + 128 v_proj: 64 heads of 128, over 8 ranks; 8 key/value heads of 128, over 8 ranks"
    )
    assert qkv.count == 80
    assert all(w.why for kind in (QWEN3_235B, DEEPSEEK_V3, GPT_OSS_120B) for w in plan(kind).weights)


def test_problems_take_each_m_and_repeat_no_shape() -> None:
    found = problems(plan(LLAMA_70B, tp=8).weights, [1, 512], dtype="bf16", threads=0)

    assert len(found) == len(set(found)) == 10
    assert {p.m for p in found} == {1, 512}


@pytest.mark.parametrize(
    ("config", "how", "said"),
    [
        ({"model_type": "mamba3"}, {}, "model_type is 'mamba3': not among the .*close are mamba.*--from-transformers"),
        ({"model_type": "llama", "hidden_size": 64}, {}, "intermediate_size is missing, a llama model needs it"),
        ({**LLAMA_70B, "hidden_size": "8192"}, {}, "hidden_size is '8192'"),
        (LLAMA_70B, {"tp": 3}, "--tp 3 does not divide the 64 heads of self_attn.q_proj"),
        (LLAMA_70B, {"tp": 2, "fused": False}, "--tp must be 1"),
    ],
)
def test_what_cannot_be_derived_is_named(config: dict[str, Any], how: dict[str, Any], said: str) -> None:
    with pytest.raises(ProblemError, match=said):
        plan(config, **how)


def test_a_config_may_begin_with_a_byte_order_mark_and_leave_the_dtype_to_the_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "auto"}), encoding="utf-8-sig")

    assert dtype_of(read_config(tmp_path)) == ""
    assert dtype_of({"torch_dtype": "auto", "text_config": {"torch_dtype": "torch.float16"}}) == "float16"


def test_a_config_is_read_from_the_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {**LLAMA_70B}, "vision_config": {}}))

    assert sizes(read_config(tmp_path)) == sizes(LLAMA_70B)
    assert dtype_of(LLAMA_70B) == "bfloat16"
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ProblemError, match=r"config\.json"):
        read_config(tmp_path)
    with pytest.raises(ProblemError, match="No such file"):
        read_config(tmp_path / "nowhere")
