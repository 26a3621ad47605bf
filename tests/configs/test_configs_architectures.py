"""Every type of model that transformers has: exactly the linear layers it builds, or a refusal with the way out."""

from __future__ import annotations

import copy
import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from architectures import changes, difference, mapping, shrunk
from published import FOLDERS

from gemmtuned.configs import model_lines
from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.model_layers import MODELS
from gemmtuned.configs.model_lines import FOLDER, read, sections
from gemmtuned.configs.model_parts import Weight
from gemmtuned.configs.model_reader import DEFAULTS
from gemmtuned.configs.model_shapes import architecture, known, plan, read_config, split

pytestmark = pytest.mark.usefixtures("transformers")
PARTS = 60  # of all types: `make soak` takes the types of each part together
# one of each kind of description: dense, latent, mixtures, hybrids, GPT's, encoders, towers, wholes
SAMPLE = ("olmo2", "minicpm3", "ernie4_5_moe", "lfm2", "jamba", "gemma4_text", "gpt_bigcode", "t5", "gemma3", "llava")


@pytest.fixture(scope="module")
def transformers() -> None:
    """Is here, and imported no sooner: it takes more than a second, and who collects tests reads this file."""
    pytest.importorskip("transformers")


def wrong(kind: str, *, every: int = 1) -> list[str]:
    """What differs for a type's config, whole and with each field changed."""
    base = shrunk(kind)
    cases = [("as it is", base), *list(changes(base, kind))[::every]]
    found = ((word, difference(copy.deepcopy(config))) for word, config in cases)
    return [f"{kind} {word}: {said}" for word, said in found if said not in (None, "-")]


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_model_has_the_layers_that_transformers_builds_with_any_field_changed(kind: str) -> None:
    assert wrong(kind, every=29) == []


@pytest.mark.soak
@pytest.mark.parametrize("kind", known())
def test_every_known_type_has_the_layers_that_transformers_builds(kind: str) -> None:
    theirs(kind)
    assert wrong(kind) == []


def theirs(kind: str) -> None:
    """Go on where transformers has this type: some come with code of their own."""
    if kind not in mapping():
        pytest.skip(f"transformers has no {kind}")


def default(kind: str) -> dict[str, Any] | None:
    """The config.json that transformers saves for a type's defaults; None where it refuses them itself."""
    try:
        found: dict[str, Any] = json.loads(mapping()[kind]().to_json_string())
    except Exception:  # transformers' own checks
        return None
    return found


@pytest.mark.soak
@pytest.mark.parametrize("part", range(PARTS))
def test_a_type_gives_what_transformers_builds_or_a_refusal_with_the_way_out(part: int) -> None:
    configs = {kind: default(kind) for kind in sorted(mapping())[part::PARTS]}
    found = {kind: difference(config) for kind, config in configs.items() if config is not None}
    assert found, "transformers refuses its own defaults of a few types, not of all in a part"
    assert {kind: said for kind, said in found.items() if said not in (None, "-")} == {}


def test_what_is_not_described_is_refused_with_the_way_out() -> None:
    for kind in sorted(mapping())[::40]:
        config = default(kind)
        if config is None or kind in known():
            continue
        with pytest.raises(ProblemError, match="--from-transformers"):
            plan(config, fused=False)


@pytest.mark.long
def test_the_defaults_are_those_of_the_installed_transformers() -> None:
    everything = runpy.run_path(str(Path(__file__).parents[2] / "lab" / "model_defaults.py"))["everything"]
    kept = json.loads(DEFAULTS.read_text())
    assert kept == json.loads(json.dumps(everything())), "python -m lab model_defaults writes them anew"


def test_a_description_speaks_of_fields_that_its_config_has() -> None:
    """A name that no config has would be None for ever, and so a layer less without a word."""
    legacy = {
        "i", "task", "per_layer_config", "block_ffn_dim_multiplier", "full_attn_idxs", "global_head_dim", "vocab_size",
        "num_global_key_value_heads", "first_k_dense_replace", "attention_other_setting", "moe_layers_enum",
        "attn_layer_indices", "decoder_vocab_size", "word_embed_proj_dim", "pooler_output_size", "num_experts",
        "num_labels", "vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size",
        "shared_intermediate_size", "add_cross_attention",
    }  # fmt: skip
    usual = set(model_lines._USUAL)
    for kind in sections():
        if kind not in mapping():
            continue
        config = mapping()[kind]
        has = {one.name for one in dataclasses.fields(config)} | set(config.attribute_map) | set(dir(config))
        section = sections()[kind]
        parts = [(line.n, line.k, line.bias, line.experts, line.when, line.per) for line in section.lines]
        asked = {name for each in parts for one in each if one is not None for name in one.names}
        asked |= {name for text, one in section.values.items() if text not in usual for name in one.names}
        assert asked - has - legacy - usual - set(section.values) - {"layers"} == set(), kind


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a  b  c", "'a  b  c' stands in no section"),
        ("[x]\nw  n", "is not understood"),
        ("[x]\nw  n  k  sideways", "'sideways' of w is not understood"),
        ("[x]\nw  __import__('os').getcwd()  k", "Attribute"),
        ("[x]\nw  [i for i in k]  k", "ListComp"),
    ],
)
def test_a_description_that_is_more_than_arithmetic_or_misspelled_is_refused(text: str, said: str) -> None:
    if said == "Attribute":  # only what is read may be named: no call of it, nothing private
        with pytest.raises((ValueError, NameError, SyntaxError)):
            read(text.replace("__import__('os').getcwd()", "hidden.__class__"))
        return
    with pytest.raises(ValueError, match=said):
        read(text)


def test_no_file_goes_on_with_the_section_of_another() -> None:
    with pytest.raises(ValueError, match=r"'w  n  k' stands in no section"):
        read("[x]\na  b  c\n", "w  n  k\n")


def test_the_files_of_architectures_have_each_type_and_block_once() -> None:
    lines = [line for path in FOLDER.glob("*.txt") for line in path.read_text().splitlines()]
    headers = [name for line in lines if line.startswith("[") for name in line[1:-1].split()]
    assert len(headers) == len(set(headers))
    assert set(sections()).isdisjoint(MODELS)


# --- tensor parallelism: against transformers' own plan, and for what that leaves out the layers of vLLM and SGLang

# transformers gathers these in whole; the engines keep each rank's heads and cut the way back by rows
ENGINES_OTHERWISE = {"linear_attn.out_proj"}
# What the plans of transformers leave out, by the class that vLLM builds it of: c ColumnParallelLinear (also as one of
# QKVParallelLinear and MergedColumnParallelLinear), r RowParallelLinear, w ReplicatedLinear
BY_NAME = {
    "q_b_proj": "c", "kv_b_proj": "c", "q_a_proj": "w", "kv_a_proj_with_mqa": "w", "wq_b": "w", "wk": "w",
    "weights_proj": "w", "q_proj": "c", "k_proj": "c", "v_proj": "c", "qkv_proj": "c", "o_proj": "r", "out_proj": "r",
    "gate_proj": "c", "up_proj": "c", "gate_up_proj": "c", "down_proj": "r", "w1": "c", "w3": "c", "w2": "r",
    "in_proj": "c", "x_proj": "r", "dt_proj": "c", "input_linear": "c", "output_linear": "r", "o_b_proj": "r",
    "in_proj_qkv": "c", "in_proj_z": "c", "in_proj_a": "c", "in_proj_b": "c", "in_proj_qkvz": "c", "in_proj_ba": "c",
    "router": "w", "shared_expert_gate": "w", "g_proj": "c", "fc1_latent_proj": "w", "fc2_latent_proj": "w",
    "gate": "w",
}  # fmt: skip
# Towers that each rank holds whole, as engines run them in their data-parallel mode (docs/models.md): some of their
# widths are divided by no usual number of ranks (3,420 of Qwen2.5-VL)
WHOLE = {
    "exaone4_5_vision", "glm4v_vision", "glm4v_moe_vision", "llama4_vision_model", "mllama_vision_model",
    "qwen2_5_omni_audio_encoder", "qwen2_5_omni_vision_encoder", "qwen2_5_vl_vision", "qwen2_audio_encoder",
    "voxtral_encoder",
}  # fmt: skip
STYLES = {
    "colwise": "c", "colwise_gather_output": "c", "packed_colwise": "c", "rowwise": "r", "rowwise_split_input": "r",
    "mla_kv_a_proj": "w", "replicated_with_grad_allreduce": "w", "packed_rowwise": "c",
}  # fmt: skip


def shares(weights: list[Weight], kind: str, tp: int) -> tuple[int, list[str]]:
    """How many weights a plan or the engines' classes speak of, and the shares that are not as they say."""
    config = mapping().get(kind)
    told = (config.base_model_tp_plan or {}) if config is not None else {}
    transposed = "packed_rowwise" in told.values()  # of experts that lie the other way round
    compared, found = 0, []
    for w in weights:
        last = w.name.rpartition(".")[2]
        style = STYLES.get(told.get(f"layers.*.{w.name}", ""))
        if style is None or w.name in ENGINES_OTHERWISE or (transposed and w.experts):
            style = BY_NAME.get(last) if w.at and w.split != "groups" and "compressor" not in w.name else None
        if style is None:
            continue
        (cut,) = split([w], tp=tp)
        n = w.n // tp if w.split != "kv_heads" else w.n // min(tp, w.units)  # fewer heads than ranks: one on each
        if w.repeated:
            n = (w.n - w.repeated) // tp + w.repeated // min(tp, w.units)
        want = {"c": (n, w.k), "r": (w.n, w.k // tp), "w": (w.n, w.k)}[style]
        compared += 1
        if (cut.n, cut.k) != want:
            found.append(f"{w.name}: {cut.n} x {cut.k}, and {style} is {want}")
    return compared, found


@pytest.mark.skipif(not FOLDERS, reason="the published configurations are not beside this checkout")
def test_the_published_models_are_split_over_eight_ranks_as_their_plans_say() -> None:
    assert len(FOLDERS) >= 58
    for path in FOLDERS:
        config = {**read_config(path), "quantization_config": None, "hf_quant_config": None}
        kind, folder = architecture(config), config["folder_name"]
        weights = [w for w in plan(config, fused=False).weights if not w.part]
        compared, found = shares(weights, kind, 8)
        assert found == [], folder
        assert compared > 5, folder


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "olmo2", "gemma3_text", "glm4_moe", "llama4_text", "mixtral"])
def test_a_type_is_split_as_its_plan_says(kind: str) -> None:
    compared, found = shares(plan(default(kind) or {}, fused=False).weights, kind, 8)
    assert found == []
    assert compared > 4


@pytest.mark.soak
@pytest.mark.parametrize("kind", known())
def test_every_type_is_split_as_its_plan_says(kind: str) -> None:
    theirs(kind)
    config = default(kind)
    try:
        weights = [w for w in plan(config or {}, fused=False).weights if not w.part]
        _, found = shares(weights, kind, 4)
    except ProblemError as err:
        assert "does not divide" in str(err) or "missing" in str(err) or config is None
        return
    if kind in WHOLE:
        assert all(w.split == "whole" for w in weights)
    else:
        assert found == []
