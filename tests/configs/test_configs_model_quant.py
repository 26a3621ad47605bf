"""Quantised checkpoints as publishers describe them: each method in its own words, and nothing guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmtuned.configs.model_shapes import plan, read_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 96, "num_hidden_layers": 12, "vocab_size": 320,
}  # fmt: skip
MOE = {
    **LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 3,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
VISION = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": LLAMA,
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 28, "patch_size": 14,
    },
}  # fmt: skip
Kept = dict[str, dict[str, list[int]]]


def kept(told: Any, base: dict[str, Any] = LLAMA, **more: Any) -> Kept:
    """dtype ("plain" for the model's own) -> last part of a name -> its layers, [] for what stands outside them."""
    config = {**base, **({} if told is None else {"quantization_config": told}), **more}
    found: Kept = {}
    for w in plan(config, fused=False).weights:
        dtype = f"{w.dtype} {w.scale}".strip() or "plain"
        name = w.name.rpartition(".")[2]
        found.setdefault(dtype, {}).setdefault(f"{w.part} {name}".strip(), []).extend(w.at)
    return found


def dtypes(found: Kept, name: str) -> list[str]:
    return sorted(dtype for dtype, names in found.items() if name in names)


W8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def tensors(*groups: tuple[list[str], Any], ignore: tuple[str, ...] = ("lm_head",), **more: Any) -> dict[str, Any]:
    named = {f"group_{i}": {"targets": t, "weights": weights} for i, (t, weights) in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, "ignore": list(ignore), **more}


def quark(**weight: Any) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": None}, "exclude": []}


def quark_steps(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": list(steps)}, "exclude": []}


def typed(kind: str, of: Any = None, **data: Any) -> dict[str, Any]:
    """As torchao's config_to_dict writes an object."""
    return {"_type": kind, "_version": 1, "_data": data if of is None else of}


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": typed(kind, **data)}, "modules_to_not_convert": None}


def test_compressed_tensors_groups_targets_and_expressions_decide_layer_by_layer() -> None:
    found = kept(tensors((["re:.*self_attn.*"], W8), (["re:.*mlp.*"], W4), ignore=("lm_head", "re:.*\\.3\\.mlp\\..*")))

    assert dtypes(found, "q_proj") == ["fp8_e4m3 row"]
    assert found["plain"] == {"up_proj": [3], "gate_proj": [3], "down_proj": [3], "lm_head": []}
    assert found["i4 group"]["up_proj"] == [0, 1, 2, *range(4, 12)]


def test_compressed_tensors_means_all_linears_the_heads_too_where_it_ignores_none() -> None:
    """llm-compressor writes lm_head into `ignore` for that very reason, and routers."""
    found = kept(tensors((["Linear"], W8), ignore=()), MOE)

    assert dtypes(found, "lm_head") == ["fp8_e4m3 row"]
    assert dtypes(found, "gate") == ["?"]  # whether it was a Linear is the publisher's transformers' affair
    assert dtypes(kept(tensors((["Linear"], W8), ignore=("lm_head", "re:.*mlp.gate$")), MOE), "gate") == ["plain"]
    deepseeks = {**MOE, "routed_scaling_factor": 2.5}  # a gate of its own class
    assert dtypes(kept(tensors((["Linear"], W8)), deepseeks), "gate") == ["plain"]


def test_one_word_is_a_list_and_two_groups_of_all_linears_contradict() -> None:
    one = kept({"quant_method": "compressed-tensors", "ignore": "lm_head",
                "config_groups": {"a": {"targets": "Linear", "weights": W8}}})  # fmt: skip
    two = kept(tensors((["Linear"], W8), (["Linear"], W4)))
    tied = kept(tensors((["Linear"], W8), ignore=()), tie_word_embeddings=True)

    assert (dtypes(one, "q_proj"), dtypes(one, "lm_head")) == (["fp8_e4m3 row"], ["plain"])
    assert (dtypes(two, "q_proj"), dtypes(two, "lm_head")) == (["?"], ["plain"])
    assert (dtypes(tied, "q_proj"), dtypes(tied, "lm_head")) == (["fp8_e4m3 row"], ["?"])


@pytest.mark.parametrize("target", ["LlamaMLP", "re:.*blocks.*", "decoder.block.3.mlp.up_proj"])
def test_a_quantised_target_that_nothing_answers_to_leaves_no_weight_plain_that_it_may_mean(target: str) -> None:
    found = kept(tensors(([target], W8)))

    assert dtypes(found, "up_proj") == ["?"]
    assert dtypes(found, "q_proj") == (["plain"] if target.startswith("decoder") else ["?"])
    assert dtypes(found, "lm_head") == ["plain"]  # which `ignore` names
    assert any(
        target.replace("3", "#") in note
        for note in plan({**LLAMA, "quantization_config": tensors(([target], W8))}).notes
    )


def test_an_entry_that_says_nothing_known_of_its_layers_is_named_with_how_many_are_like_it() -> None:
    told = {f"model.layers.{i}.mlp.down_proj": {"weight": {"dtype": "fp6_e2m3"}} for i in (1, 2)}
    entry = "model.layers.#.mlp.down_proj"
    found = plan(
        {**LLAMA, "quantization_config": {**quark(dtype="int8", qscheme="per_channel"), "layer_quant_config": told}}
    )

    assert [w.at for w in found.weights if w.name == "mlp.down_proj" and w.dtype == "?"] == [(1, 2)]
    assert found.notes == [
        f"what the quantisation's entry {entry!r} says of weights is not known (2 of them): not planned"
    ]


def test_keys_and_values_alone_are_no_quantised_weights() -> None:
    alone = tensors(kv_cache_scheme={"num_bits": 8, "type": "float"})
    assert list(kept(alone)) == ["plain"]
    assert list(kept({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"})) == ["plain"]
    alone["ignore"] = []
    assert list(kept({**alone, "kv_cache_scheme": None})) == ["?"]
    assert list(kept({**alone, "sparsity_config": {"sparsity_structure": "2:4", "targets": ["Linear"]}})) == ["?"]


@pytest.mark.parametrize(
    ("told", "dtype"),
    [
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "fp8_e4m3 1x128"),
        ({"quant_method": "fp8", "fmt": "float8_e4m3fn"}, "fp8_e4m3 tensor"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8_e5m2 tensor"),
        ({"quant_method": "fp8", "fmt": "e3m4"}, "?"),
        ({"quant_method": "fp8", "weight_block_size": [1, 32]}, "fp8_e4m3 1x32"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4 group"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb_fp4 group"),  # transformers' default
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "af4"}, "?"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "int"}, "i4 group"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "fp4_e2m1 1x32"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "nv_fp"}, "fp4_e2m1 1x16"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "fp8_to_int_sym"}, "?"),
        ({"quant_method": "gptq", "bits": 3}, "?"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128}, "i4 group"),
        ({"quant_method": "torchao", "quant_type": {"default": {}}}, "?"),
        (quark(dtype="fp8_e4m3", qscheme="per_tensor"), "fp8_e4m3 tensor"),
        (quark(dtype="fp8_e4m3", qscheme="per_channel"), "fp8_e4m3 row"),
        (quark(dtype="fp4", qscheme="per_group", group_size=32, scale_format="e8m0"), "fp4_e2m1 1x32"),
        (quark(dtype="uint4", qscheme="per_group", group_size=128), "i4 group"),
        (quark(dtype="int8", qscheme="per_channel"), "i8 row"),
        (quark(dtype="fp6_e2m3", qscheme="per_group", group_size=32), "?"),
        (quark(dtype="fp8_e4m3", qscheme="per_group", group_size=128), "?"),
        ({"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]}}, "?"),
        (
            quark_steps({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, {"dtype": "int4", "qscheme": "per_channel"}),
            "i4 row",
        ),
        (
            quark_steps(
                {"dtype": "fp4", "qscheme": "per_group", "group_size": 16},
                {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_scale_quant": True},
            ),
            "fp4_e2m1 1x16",
        ),
        (quark_steps({"dtype": "fp8_e4m3", "is_scale_quant": True}), "?"),
        ({"quant_method": "quark", "global_quant_config": {"weight": None}}, "plain"),
        ({"quant_method": "quark", "quant_scheme": "int4_wo_128"}, "?"),
        (torchao("Int4WeightOnlyConfig", group_size=128), "i4 group"),
        (torchao("Int8WeightOnlyConfig", group_size=None, granularity=typed("PerRow", dim=-1)), "i8 row"),
        (torchao("Int8WeightOnlyConfig", group_size=64), "i8 group"),
        (torchao("Int8DynamicActivationInt8WeightConfig", granularity=typed("PerTensor")), "i8 tensor"),
        (torchao("Float8WeightOnlyConfig", weight_dtype=typed("torch.dtype", "float8_e4m3fn")), "fp8_e4m3 row"),
        (torchao("Float8DynamicActivationFloat8WeightConfig"), "fp8_e4m3 tensor"),
        (torchao("Float8DynamicActivationFloat8WeightConfig", granularity=[typed("PerRow")] * 2), "fp8_e4m3 row"),
        (
            torchao(
                "Float8DynamicActivationFloat8WeightConfig",
                granularity=[typed("PerBlock", block_size=[1, 128]), typed("PerBlock", block_size=[128, 128])],
            ),
            "fp8_e4m3 1x128",
        ),
        (
            torchao(
                "IntxWeightOnlyConfig",
                weight_dtype=typed("torch.dtype", "int4"),
                granularity=typed("PerGroup", group_size=32),
            ),
            "i4 group",
        ),
        (
            torchao(
                "IntxWeightOnlyConfig",
                weight_dtype=typed("torch.dtype", "int3"),
                granularity=typed("PerGroup", group_size=32),
            ),
            "?",
        ),
        (torchao("NVFP4WeightOnlyConfig"), "fp4_e2m1 1x16"),
        (torchao("SomeNewConfig"), "?"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "i8 row"),
        ({"quant_method": "torchao", "quant_type": "autoquant"}, "?"),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}}, "i4 group"),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 3, "group_size": 64}}}, "?"),
        ({"bits": 4, "group_size": 64}, "?"),
    ],
)
def test_a_method_names_the_dtype_of_its_linears_or_is_not_planned(told: dict[str, Any], dtype: str) -> None:
    assert dtypes(kept(told), "q_proj") == dtypes(kept(told), "down_proj") == [dtype]


def test_layers_that_quark_torchao_and_hqq_keep_in_a_way_of_their_own() -> None:
    eight = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}
    four = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}
    told = {**quark(**four), "exclude": ["lm_head", "*layers.1.*"], "layer_quant_config": {"*self_attn*": eight}}
    found = kept(told)
    assert dtypes(found, "lm_head") == ["plain"] and found["plain"]["q_proj"] == [1]
    assert found["fp8_e4m3 row"]["q_proj"] == [0, *range(2, 12)] == found["fp4_e2m1 1x32"]["up_proj"]
    assert dtypes(kept(quark(**four)), "lm_head") == ["fp4_e2m1 1x32"]  # it is a linear layer as any other
    all_linears = {**quark(**four), "layer_type_quant_config": {"Linear": eight}}
    assert dtypes(kept(all_linears), "up_proj") == ["fp8_e4m3 row"]

    rows = typed("Int8WeightOnlyConfig", granularity=typed("PerRow"))
    by_name = {"_default": typed("Int4WeightOnlyConfig", group_size=32), "re:.*mlp\\.up_proj": rows,
               "model.layers.0.self_attn.q_proj": None}  # fmt: skip
    for name, key in (("FqnToConfig", "fqn_to_config"), ("ModuleFqnToConfig", "module_fqn_to_config")):
        found = kept(torchao(name, **{key: by_name}))
        assert dtypes(found, "up_proj") == ["i8 row"] and dtypes(found, "down_proj") == ["i4 group"]
        assert found["plain"]["q_proj"] == [0] and found["i4 group"]["q_proj"] == [*range(1, 12)]
    alone = kept(torchao("FqnToConfig", fqn_to_config={"re:.*mlp\\.up_proj": rows}))
    assert dtypes(alone, "up_proj") == ["i8 row"] and dtypes(alone, "q_proj") == ["plain"]
    assert dtypes(kept(torchao("Int4WeightOnlyConfig")), "lm_head") == ["plain"]
    with_head = {**torchao("Int4WeightOnlyConfig"), "include_input_output_embeddings": True}
    assert dtypes(kept({**with_head}, {**LLAMA, "tie_word_embeddings": False}), "lm_head") == ["i4 group"]

    mixture = kept(
        torchao("Int4WeightOnlyConfig"), MOE
    )  # whether its experts are linears hangs on transformers' version
    assert dtypes(mixture, "gate_up_proj") == ["?"] and dtypes(mixture, "q_proj") == ["i4 group"]

    tags = {"self_attn.q_proj": {"weight_quant_params": {"nbits": 8, "group_size": None}}, "mlp.up_proj": None}
    found = kept({"quant_method": "hqq", "quant_config": tags})
    assert dtypes(found, "q_proj") == ["i8 row"] and dtypes(found, "up_proj") == dtypes(found, "v_proj") == ["plain"]


def test_layers_with_bits_of_their_own() -> None:
    extra = {"model.layers.0.mlp.up_proj": {"bits": 16}, "model.layers.1.mlp.up_proj": {"bits": 8},
             ".*layers\\.2\\..*": {"bits": 16, "data_type": "float"}, "lm_head": {"bits": 8}}  # fmt: skip
    found = kept({"quant_method": "auto-round", "bits": 4, "extra_config": extra})
    assert (found["plain"]["up_proj"], found["i8 group"]["up_proj"]) == ([0, 2], [1])
    assert (found["plain"]["q_proj"], dtypes(found, "lm_head")) == ([2], ["i8 group"])

    dynamic = {"-:.*down_proj": {}, "+:.*\\.2\\.mlp\\.up_proj": {"bits": 8}, ".*\\.3\\..*q_proj": {"bits": 8}}
    found = kept({"quant_method": "gptq", "bits": 4, "dynamic": dynamic})
    assert dtypes(found, "down_proj") == ["plain"]
    assert found["i8 group"] == {"up_proj": [2], "q_proj": [3]}

    inside = {"modules_in_block_to_quantize": [["self_attn.k_proj", "self_attn.q_proj"], ["self_attn.o_proj"]]}
    found = kept({"quant_method": "gptq", "bits": 4, **inside})
    assert set(found["plain"]) == {"v_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    assert dtypes(kept({"quant_method": "gptq", "bits": 4, "lm_head": True}), "lm_head") == ["i4 group"]


def test_what_awq_leaves_out_by_a_part_of_a_name_is_not_understood() -> None:
    """AutoAWQ looks for the word anywhere, engines for a module: `gate` is in gate_proj."""
    found = kept({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["gate", "model.layers.1"]})

    assert found["?"]["gate_proj"] == [*range(0, 1), *range(2, 12)]
    assert (found["plain"]["q_proj"], found["?"]["q_proj"]) == ([1], [10, 11])


def test_rules_inside_the_text_config_are_the_language_models() -> None:
    told = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    inside = kept(None, {**VISION, "text_config": {**LLAMA, "quantization_config": told}})
    whole = kept(told, VISION)

    assert dtypes(inside, "vision fc1") == ["plain"]
    assert dtypes(whole, "vision fc1") == dtypes(whole, "up_proj") == dtypes(inside, "up_proj") == ["fp8_e4m3 1x128"]


def test_a_quantisation_under_another_key_is_not_taken_for_none() -> None:
    for key in ("quantization", "quant_config", "compression_config"):
        found = plan({**LLAMA, key: {"group_size": 64, "bits": 4}}, fused=False)
        assert {w.dtype for w in found.weights} == {"?"}, key
        assert "is not known" in found.notes[0]
    named = plan({**LLAMA, "folder_name": "Llama-3.2-1B-4bit"})
    assert {w.dtype for w in named.weights} == {"?"}
    assert "the model's name says 4bit" in named.notes[0]


@pytest.mark.parametrize(
    ("name", "text", "dtype"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}, "fp8_e4m3"),
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": True}, "i4"),
        ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}, "i4"),
        ("quantization_config.json", {"bits": 8, "group_size": 128, "quant_method": "auto-round"}, "i8"),
    ],
)
def test_the_quantisers_own_file_beside_the_config_is_read(
    name: str, text: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).write_text(json.dumps(text))
    found = {w.name.rpartition(".")[2]: w.dtype for w in plan(read_config(tmp_path), fused=False).weights}

    assert (found["q_proj"], found["lm_head"]) == (dtype, "")


def test_two_files_that_contradict_each_other_are_not_chosen_from() -> None:
    beside = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    for told in ({"quant_method": "modelopt", "quant_algo": "FP8"}, {"quant_method": "fp8"}):
        found = plan({**LLAMA, "quantization_config": told, "hf_quant_config": beside})
        assert {w.dtype for w in found.weights} == {"?"}
        assert "config.json says FP8 and hf_quant_config.json NVFP4" in found.notes[0]
    same = kept({"quant_method": "modelopt", "quant_algo": "NVFP4"}, hf_quant_config=beside)
    assert dtypes(same, "q_proj") == ["fp4_e2m1 1x16"]


SKIPS = st.lists(
    st.sampled_from([
        "lm_head", "model.layers.1", "model.layers.1.mlp", "model.layers.10.self_attn.q_proj", "q_proj", "proj", "mlp",
        "self_attn.k_proj", "model.layers.*.mlp", r"model\.layers\.[34]\.mlp.*", "gate", "o_proj", "model",
        "model.layers.0.mlp.gate", "mlp.gate", ".*down_proj", "up_proj|q_proj", "head", "experts",
    ]),
    min_size=1, max_size=5,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(skips=SKIPS, method=st.sampled_from(["fp8", "bitsandbytes"]))
def test_a_list_of_modules_leaves_plain_what_transformers_does_not_convert(skips: list[str], method: str) -> None:
    """By its own should_convert_module, for every linear layer of twelve; what we call ? is never planned."""
    convert = pytest.importorskip("transformers.quantizers.quantizers_utils").should_convert_module
    key = "modules_to_not_convert" if method == "fp8" else "llm_int8_skip_modules"
    config = {**LLAMA, "quantization_config": {"quant_method": method, "load_in_8bit": True, key: skips}}
    plain: set[str] = set()
    converted: set[str] = set()
    for w in plan(config, fused=False).weights:
        names = {f"model.layers.{i}.{w.name}" for i in w.at} or {w.name}
        plain |= names if not w.dtype else set()
        converted |= names if w.dtype not in ("", "?") else set()

    assert len(plain | converted) >= 12 * 7
    assert {name for name in plain if convert(name, skips)} == set()
    ours = {name for name in converted if not convert(name, skips)}
    assert ours == set(), sorted(ours)[:5]
