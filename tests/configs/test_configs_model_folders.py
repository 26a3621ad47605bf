"""Folders that are no model, configs that are broken, models that only transformers knows: sentences alone."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.model_shapes import plan, read_config
from gemmtuned.kernels.from_transformers import built


def test_an_unknown_model_is_split_over_ranks_by_transformers_own_plan() -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 16, "num_key_value_heads": 4,
              "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 1000}  # fmt: skip

    found = {w.name: (w.n, w.k) for w in built(config, tp=8).weights}

    assert found == {
        "self_attn.q_proj": (64, 512), "self_attn.k_proj": (32, 512), "self_attn.v_proj": (32, 512),
        "self_attn.o_proj": (512, 64), "mlp.gate_proj": (128, 512), "mlp.up_proj": (128, 512),
        "mlp.down_proj": (512, 128), "lm_head": (128, 512),
    }  # fmt: skip


# --- folders that are no model, and configs that are broken


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "no config.json in it. Give the folder of a Hugging Face model"),
        (("params.json", "consolidated.safetensors"), "Mistral's own form"),
        (("model-Q4_K_M.gguf",), "GGUF files, which are not read"),
        (("adapter_config.json",), "an adapter"),
        (("model_index.json",), "a pipeline of several models"),
        (("text_encoder/config.json",), "There is one in .*text_encoder: give that folder"),
    ],
)
def test_a_folder_without_a_config_says_what_it_is(names: tuple[str, ...], said: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")

    with pytest.raises(ProblemError, match=said):
        read_config(tmp_path)


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
         "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320}  # fmt: skip


@pytest.mark.parametrize("name", sorted(LLAMA))
@pytest.mark.parametrize("value", [None, "x", -3, 0, 1.5, True, [], [1], {}, {"a": 1}, 10**12])
def test_a_broken_field_is_a_sentence(name: str, value: Any) -> None:
    for kind in (LLAMA, {**LLAMA, "model_type": "olmo2"}, {"model_type": "qwen2_vl", "text_config": dict(LLAMA)}):
        config = {**kind, "text_config": {**kind["text_config"], name: value}} if "text_config" in kind else dict(kind)
        if "text_config" not in kind:
            config[name] = value
        with suppress(ProblemError):  # no other error
            plan(config, tp=2)


@pytest.mark.parametrize("told", ["fp8", ["fp8"], {"quant_method": "compressed-tensors", "config_groups": {"a": 3}},
                                  {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "FP8"}}])  # fmt: skip
def test_a_quantisation_that_is_no_object_is_said_and_nothing_is_planned_for_it(told: Any) -> None:
    found = plan({**LLAMA, "quantization_config": told})

    assert {w.dtype for w in found.weights} == {"?"}
    assert "quantization_config" in found.notes[0] or "not known" in found.notes[0]


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["k_proj"]}, {"k_proj": "", "q_proj": "i4"}),
        ({"quant_method": "gptq", "bits": 8, "modules_to_not_convert": None}, {"k_proj": "i8", "down_proj": "i8"}),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*down_proj": {}, "+:.*q_proj": {"bits": 8}}},
         {"down_proj": "", "q_proj": "i8", "k_proj": "i4"}),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, {"q_proj": "fp8_e4m3"}),
        ({"quant_method": "quark"}, {"q_proj": "?"}),
    ],
)  # fmt: skip
def test_each_method_has_its_own_way_to_name_layers(told: dict[str, Any], wanted: dict[str, str]) -> None:
    found = {
        w.name.rpartition(".")[2]: w.dtype for w in plan({**LLAMA, "quantization_config": told}, fused=False).weights
    }

    assert found["lm_head"] == ("?" if "?" in wanted.values() else "")
    assert {name: found[name] for name in wanted} == wanted


# --- what the files beside a config.json say that it does not


def safetensors(path: Path, **dtypes: str) -> None:
    """A file whose header tells these tensors, and that has no weights at all."""
    header = {name: {"dtype": dtype, "shape": [64, 64], "data_offsets": [0, 0]} for name, dtype in dtypes.items()}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


@pytest.mark.parametrize(
    ("files", "config", "said"),
    [
        ({"a.safetensors": {"q_proj.weight": "BF16"}, "b.safetensors": {"k_proj.weight": "F8_E4M3"}}, {},
         "b.safetensors has k_proj.weight as F8_E4M3"),
        ({"a.safetensors": {"q_proj.qweight": "I32"}}, {}, "q_proj.qweight as I32"),
        ({"a.safetensors": {"experts.down_proj_blocks": "U8"}}, {}, "experts.down_proj_blocks as U8"),
        ({"a.safetensors": {"q_proj.weight": "BF16", "attn.bias": "BOOL", "position_ids": "I64"}}, {}, ""),
        ({"a.safetensors": "version https://git-lfs.github.com/spec/v1\n"}, {}, ""),
        ({"a.safetensors": ""}, {}, ""),
        ({"model-Q4_K_M.gguf": "GGUF"}, {}, "GGUF files (model-Q4_K_M.gguf)"),
        ({"model-Q4_K_M.gguf": "GGUF", "a.safetensors": {"q_proj.weight": "BF16"}}, {}, ""),
        ({}, {"torch_dtype": "float8_e4m3fn"}, "tells dtype float8_e4m3fn"),
        ({}, {"dtype": "torch.int8"}, "tells dtype int8"),
    ],
)  # fmt: skip
def test_weights_of_other_types_than_the_configs_say_are_not_planned(
    files: dict[str, Any], config: dict[str, str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": "bfloat16", **config}))
    for name, told in files.items():
        if isinstance(told, str):
            (tmp_path / name).write_text(told)
        else:
            safetensors(tmp_path / name, **told)

    found = plan(read_config(tmp_path))

    assert {weight.dtype for weight in found.weights} == {"?" if said else ""}
    assert any(said in note for note in found.notes) if said else not found.notes


def test_an_adapter_beside_its_model_is_noted_and_the_model_is_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')

    found = plan(read_config(tmp_path))

    assert {weight.dtype for weight in found.weights} == {""} and "adapter" in found.notes[0]
