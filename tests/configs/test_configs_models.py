"""The models that people serve, by their published config.json: against transformers' own modules, and by hand."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from published import FOLDERS, MODELS

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.model_parts import Weight
from gemmtuned.configs.model_shapes import architecture, plan, read_config
from gemmtuned.configs.model_shapes import known as known_types
from gemmtuned.kernels.from_transformers import built

pytestmark = pytest.mark.skipif(not FOLDERS, reason="the published configurations are not beside this checkout")
# one folder for each kind of config: the others differ in numbers that these have, too
NO_LINEAR = re.compile(
    r"bias$|embed_tokens|conv1d|position|pos_emb|A_log|patch_embed\.proj|class_embedding|embeddings\."
)
Sizes = tuple[int, ...]


def transformers_type(raw: dict[str, Any]) -> bool:
    transformers = pytest.importorskip("transformers")
    return raw["model_type"] in transformers.models.auto.configuration_auto.CONFIG_MAPPING


def built_by_transformers(raw: dict[str, Any]) -> Counter[Sizes]:
    """(experts,) n, k of every weight of a linear layer, counted."""
    transformers = pytest.importorskip("transformers")
    for part in (raw, raw.get("text_config", {})):
        part.pop("quantization_config", None)
        part.pop("auto_map", None)
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    with torch.device("meta"):
        try:
            model = transformers.AutoModelForImageTextToText.from_config(config)
        except ValueError:
            model = transformers.AutoModelForCausalLM.from_config(config)
    found: Counter[Sizes] = Counter()
    for name, parameter in model.named_parameters():
        sizes = tuple(parameter.shape)
        if len(sizes) not in (2, 3) or (len(sizes) == 3 and "experts" not in name) or NO_LINEAR.search(name):
            continue
        if len(sizes) == 3 and raw["model_type"] in ("gpt_oss", "llama4"):  # their experts lie transposed
            sizes = (sizes[0], sizes[2], sizes[1])
        found[sizes] += 1
    if not any(
        "lm_head" in name for name, _ in model.named_parameters()
    ):  # the embedding's weight: a product all the same
        text = config.get_text_config()
        found[text.vocab_size, text.hidden_size] += 1
    return found


def sizes_of(weight: Weight) -> Sizes:
    return (weight.experts, weight.n, weight.k) if weight.experts else (weight.n, weight.k)


@pytest.mark.part(4)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_published_model_has_the_linear_layers_that_transformers_builds(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    if not transformers_type(raw):
        pytest.skip(f"transformers has no {raw['model_type']}")
    expected = built_by_transformers(raw)

    ours: Counter[Sizes] = Counter()
    towers = False
    for weight in plan(read_config(folder), fused=False).weights:
        ours[sizes_of(weight)] += weight.count
        towers |= weight.part == "vision"

    if raw["model_type"] == "step3p7":  # written flat, where transformers looks for text_config: it takes its defaults
        assert not towers
        return
    assert ours == expected


@pytest.mark.parametrize("twice", [False, pytest.param(True, marks=pytest.mark.long)])
def test_every_published_model_is_known_and_every_weight_says_why(twice: bool) -> None:
    """Each on one rank or on eight, in turns; twice: each on both."""
    configs = {folder: read_config(folder) for folder in FOLDERS}
    known = Counter(map(architecture, configs.values()))

    assert sum(known.values()) == len(FOLDERS)
    for i, (folder, config) in enumerate(configs.items()):
        for tp in (1, 8) if twice else (1 + 7 * (i % 2),):
            for weight in plan(config, tp=tp).weights:
                assert weight.why, folder
                assert weight.n > 0, folder
    assert len(known_types()) >= 150


def one(name: str, **how: Any) -> dict[str, tuple[int, int, int]]:
    found: dict[str, tuple[int, int, int]] = {}
    for w in plan(read_config(MODELS / name), **(how if how.get("tp") else {"fused": False})).weights:
        if not w.part:
            found.setdefault(w.name, (w.n, w.k, w.count))
    return found


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("MiniMaxAI--MiniMax-M2.5", {
            "self_attn.q_proj": (6144, 3072, 62), "self_attn.k_proj": (1024, 3072, 62),
            "self_attn.o_proj": (3072, 6144, 62), "mlp.gate": (256, 3072, 62),
            "mlp.experts.gate_up_proj": (3072, 3072, 62), "mlp.experts.down_proj": (3072, 1536, 62),
            "lm_head": (200064, 3072, 1),
        }),
        ("Qwen--Qwen3.5-27B", {
            "linear_attn.in_proj_qkv": (10240, 5120, 48), "linear_attn.in_proj_z": (6144, 5120, 48),
            "linear_attn.in_proj_a": (48, 5120, 48), "linear_attn.out_proj": (5120, 6144, 48),
            "self_attn.q_proj": (12288, 5120, 16), "self_attn.v_proj": (1024, 5120, 16),
            "mlp.gate_proj": (17408, 5120, 64), "lm_head": (248320, 5120, 1),
        }),
        ("XiaomiMiMo--MiMo-7B-Base", {
            "self_attn.q_proj": (4096, 4096, 36), "self_attn.k_proj": (1024, 4096, 36),
            "mlp.up_proj": (11008, 4096, 36),
        }),
        ("nvidia--Llama-3_3-Nemotron-Super-49B-v1", {
            "self_attn.q_proj": (8192, 8192, 49), "self_attn.k_proj": (1024, 8192, 49), "lm_head": (128256, 8192, 1),
        }),
        ("stepfun-ai--Step-3.7-Flash", {
            "self_attn.q_proj": (8192, 4096, 45), "self_attn.g_proj": (64, 4096, 45), "mlp.gate": (288, 4096, 42),
            "mlp.shared_experts.down_proj": (4096, 1280, 42), "mlp.up_proj": (11264, 4096, 3),
        }),
        ("moonshotai--Kimi-K3", {
            "self_attn.q_a_proj": (1536, 7168, 24), "self_attn.kv_b_proj": (24576, 512, 24),
            "mlp.experts.gate_up_proj": (6144, 3584, 92), "mlp.gate": (896, 7168, 92),
        }),
    ],
)  # fmt: skip
def test_shapes_derived_by_hand(name: str, wanted: dict[str, tuple[int, int, int]]) -> None:
    found = one(name)

    assert {part: found.get(part) for part in wanted} == wanted


def test_a_searched_models_layers_differ_in_their_feed_forward_width() -> None:
    found = plan(read_config(MODELS / "nvidia--Llama-3_3-Nemotron-Super-49B-v1"), fused=False).weights

    assert {(w.n, w.count) for w in found if w.name == "mlp.up_proj"} == {
        (28672, 49), (14336, 6), (7168, 10), (5632, 8), (2816, 6), (17920, 1),
    }  # fmt: skip


def test_selector_products_of_one_input_run_as_one_and_groups_run_as_a_batch() -> None:
    glm = {w.name: w for w in plan(read_config(MODELS / "zai-org--GLM-5"), tp=8).weights}
    v32 = {w.name: w for w in plan(read_config(MODELS / "nvidia--DeepSeek-V3.2-NVFP4"), tp=8).weights}
    v4 = {w.name: w for w in plan(read_config(MODELS / "deepseek-ai--DeepSeek-V4-Flash"), tp=4).weights}

    assert (glm["self_attn.indexer.wk_weights_proj"].n, glm["self_attn.indexer.wk_weights_proj"].k) == (160, 6144)
    assert v32["self_attn.indexer.wk_weights_proj"].n == 192
    assert (v4["self_attn.o_a_proj"].batch, v4["self_attn.o_a_proj"].n, v4["self_attn.o_a_proj"].k) == (2, 1024, 4096)


def test_heads_that_guess_ahead_and_towers_are_listed_apart() -> None:
    served = {w.name: w for w in plan(read_config(MODELS / "XiaomiMiMo--MiMo-7B-Base")).weights}
    tower = [
        w for w in plan(read_config(MODELS / "Qwen--Qwen3-VL-4B-Instruct"), fused=False).weights if w.part == "vision"
    ]

    assert (served["mtp.eh_proj"].n, served["mtp.eh_proj"].k, served["mtp.eh_proj"].count) == (4096, 8192, 1)
    assert "mtp.self_attn.qkv_proj" in served
    assert {(w.n, w.k) for w in tower} >= {(3072, 1024), (4096, 4096), (2560, 4096)}
    assert not any(w.part == "mtp" for w in plan(read_config(MODELS / "XiaomiMiMo--MiMo-7B-Base"), fused=False).weights)


def test_heads_that_guess_ahead_are_not_always_the_last_layer_again() -> None:
    def heads(name: str) -> dict[str, tuple[int, int, str]]:
        found = plan(read_config(MODELS / name), tp=1).weights
        return {w.name.removeprefix("mtp."): (w.n, w.k, w.dtype) for w in found if w.part == "mtp"}

    flash = heads("deepseek-ai--DeepSeek-V4-Flash")
    nemotron = heads("nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8")

    assert flash["e_proj"] == flash["h_proj"] == (4096, 4096, "fp8_e4m3")  # two weights, whose products are added
    assert "eh_proj" not in flash
    assert (flash["attn_hc.fn"], flash["hc_head.hc_fn"]) == ((24, 16384, "fp32"), (4, 16384, "fp32"))
    assert not any("compressor" in name for name in flash)
    assert (nemotron["mixer.qkv_proj"][:2], nemotron["mixer.gate"][:2]) == ((4608, 4096), (512, 4096))  # its `*E`


def test_experts_are_spread_whole_over_ranks() -> None:
    spread = {w.name: w for w in plan(read_config(MODELS / "Qwen--Qwen3-235B-A22B"), tp=8, ep=8).weights}
    shared = {w.name: w for w in plan(read_config(MODELS / "Qwen--Qwen3-235B-A22B"), tp=8).weights}

    assert (spread["mlp.experts.gate_up_proj"].experts, spread["mlp.experts.gate_up_proj"].n) == (16, 3072)
    assert (shared["mlp.experts.gate_up_proj"].experts, shared["mlp.experts.gate_up_proj"].n) == (128, 384)
    assert spread["self_attn.qkv_proj"].n == 1280
    with pytest.raises(ProblemError, match="--ep 5 does not divide the 128 experts"):
        plan(read_config(MODELS / "Qwen--Qwen3-235B-A22B"), tp=8, ep=5)


# --- quantised checkpoints, by the rules of who published them


def kept(name: str) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for w in plan(read_config(MODELS / name), fused=False).weights:
        found.setdefault(w.name, Counter())[f"{w.dtype} {w.scale}".strip() or "plain"] += w.count
    return found


def test_fp8_lists_name_modules_by_their_end_or_wholly() -> None:
    minimax, qwen = kept("MiniMaxAI--MiniMax-M2.5"), kept("Qwen--Qwen3-30B-A3B-FP8")

    for found in (minimax, qwen):
        assert set(found["mlp.gate"]) == set(found["lm_head"]) == {"plain"}
        assert set(found["self_attn.q_proj"]) == set(found["mlp.experts.down_proj"]) == {"fp8_e4m3 1x128"}


def test_modelopts_patterns_decide_layer_by_layer() -> None:
    glm, gemma, mini = (kept(f"nvidia--{name}-NVFP4") for name in ("GLM-5.1", "Gemma-4-26B-A4B", "MiniMax-M2.5"))

    assert glm["mlp.gate_proj"] == {"plain": 3}  # whole layers are left out
    assert set(glm["self_attn.o_proj"]) == set(glm["mlp.shared_experts.up_proj"]) == {"plain"}
    assert set(glm["mlp.experts.gate_up_proj"]) == {"fp4_e2m1 1x16"}
    assert set(gemma["experts.down_proj"]) == {"fp4_e2m1 1x16"}
    assert set(gemma["mlp.up_proj"]) == set(gemma["router.proj"]) == {"plain"}
    assert set(mini["mlp.gate"]) == set(mini["self_attn.k_proj"]) == {"plain"}  # its own word is block_sparse_moe.gate


def test_compressed_tensors_expressions_and_a_list_for_each_layer() -> None:
    kimi, flash = kept("moonshotai--Kimi-K3"), kept("nvidia--DeepSeek-V4-Flash-NVFP4")

    assert set(kimi["mlp.experts.down_proj"]) == {"fp4_e2m1 1x32"}
    assert (
        set(kimi["self_attn.kv_b_proj"]) == set(kimi["mlp.shared_experts.up_proj"]) == set(kimi["lm_head"]) == {"plain"}
    )
    assert set(flash["mlp.experts.gate_up_proj"]) == {"fp4_e2m1 1x16"}
    assert set(flash["self_attn.q_b_proj"]) == {"fp8_e4m3 1x128"}


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ({"quant_algo": "FP8", "exclude_modules": ["lm_head"]}, {"fp8_e4m3 tensor": 4}),
        ({"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "model.layers.1.*"]}, {"fp4_e2m1 1x16": 4, "plain": 4}),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {
            "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}}, {"fp8_e4m3 tensor": 1, "plain": 7}),
        ({"quant_algo": "SOMETHING_NEW"}, {"?": 4}),
    ],
)  # fmt: skip
def test_hf_quant_config_beside_the_config_is_read(
    told: dict[str, Any], wanted: dict[str, int], tmp_path: Path
) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
        "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": told}))

    found = plan(read_config(tmp_path), fused=False)

    each = Counter()
    for w in found.weights:
        if w.name.startswith("self_attn"):
            each[f"{w.dtype} {w.scale}".strip() or "plain"] += w.count
    total = sum(each.values())
    assert total == 8
    assert {kind: number * (8 // sum(wanted.values())) for kind, number in wanted.items()} == dict(each)
    assert bool(found.notes) == ("NEW" in told["quant_algo"])


def test_what_nothing_answers_to_and_what_the_files_do_not_tell_is_said(tmp_path: Path) -> None:
    config = json.loads((MODELS / "Qwen--Qwen3-8B" / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mamba.in_proj", "model.layers.1.mamba.in_proj"],
    }  # fmt: skip
    assert "'model.layers.#.mamba.in_proj' names nothing in this model (2 of them)" in plan(config).notes[0]

    silent = plan(read_config(MODELS / "nvidia--DeepSeek-V3.1-NVFP4"))
    assert {w.dtype for w in silent.weights} == {"?"}
    assert "the model's name says NVFP4" in silent.notes[0]


# --- models that nobody described


def test_transformers_own_modules_serve_where_there_is_no_description() -> None:
    pytest.importorskip("transformers")
    folder = MODELS / "Qwen--Qwen3-30B-A3B-FP8"
    config = read_config(folder)

    found = built(config)

    assert Counter((sizes_of(w), w.dtype) for w in found.weights for _ in range(w.count)) == Counter(
        (sizes_of(w), w.dtype) for w in plan(config, fused=False).weights for _ in range(w.count)
    )
    with pytest.raises(ProblemError, match="has no model_type 'nobody' either"):
        built({"model_type": "nobody"})


def test_a_model_nobody_knows_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        ProblemError, match=r"model_type is 'phi9' \(architectures Phi9ForCausalLM\).*--from-transformers"
    ):
        plan({"model_type": "phi9", "architectures": ["Phi9ForCausalLM"]})
    with pytest.raises(ProblemError, match="it says no model_type"):
        plan({})
