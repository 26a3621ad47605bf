"""The linear layers of the models we know, as transformers builds them from a `config.json`.

A few lines a model, made of the parts that models share (model_parts.py); a new model is such lines and its entry in
MODELS.  Tests build each on torch's meta device and compare every weight; what transformers has no type for is derived
from the publisher's own modelling file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.model_parts import (
    Make,
    Weight,
    attention,
    gated_delta,
    head,
    indexer,
    latent_attention,
    linear,
    mamba,
    minus,
    mixture,
    mlp,
    of_heads,
    sparse_layers,
)
from gemmtuned.configs.model_reader import Layers, Reader

# --- models of one kind of layer


def _llama(r: Reader) -> list[Weight]:
    bias = r.flag("attention_bias")
    feed = mlp(r, r.size("intermediate_size"), r.all, bias=r.flag("mlp_bias"))
    return [*attention(r, bias=bias, o_bias=bias), *feed, *head(r)]


def _plain(bias: bool | str, *, o_bias: bool = False, joint: bool = False) -> Make:
    """Attention and one feed-forward part. bias: of q, k and v, or the config's switch that says it (o has it too)."""

    def make(r: Reader) -> list[Weight]:
        on = r.flag(bias) if isinstance(bias, str) else bias
        back = o_bias and on
        feed = mlp(r, r.size("intermediate_size"), r.all, joint=joint)
        return [*attention(r, bias=on, o_bias=back), *feed, *head(r)]

    return make


def _phi3(r: Reader) -> list[Weight]:
    heads = r.size("num_attention_heads")
    kv, dim = r.size("num_key_value_heads", default=heads), r.size("head_dim", default=r.hidden // heads)
    why = f"{heads} heads and twice {kv} of {dim}"
    joint = linear("self_attn.qkv_proj", (heads + 2 * kv) * dim, r.hidden, r.all, why, split="heads", units=kv)
    return [
        *(replace(w, repeated=2 * kv * dim) for w in joint),
        *linear("self_attn.o_proj", r.hidden, heads * dim, r.all, f"back from {heads} heads", split="rows"),
        *mlp(r, r.size("intermediate_size"), r.all, joint=True),
        *head(r),
    ]


def _seed_oss(r: Reader) -> list[Weight]:
    bias = r.flag("attention_bias")
    feed = mlp(r, r.size("intermediate_size"), r.all, bias=r.flag("mlp_bias"))
    return [*attention(r, bias=bias, o_bias=r.flag("attention_out_bias")), *feed, *head(r)]


# --- mixtures of experts


def _mixtral(r: Reader) -> list[Weight]:
    experts = mixture(r, r.size("num_local_experts"), r.size("intermediate_size"), r.all)
    return [*attention(r, bias=False, o_bias=False), *experts, *head(r)]


def _shared_expert(r: Reader, at: Layers) -> list[Weight]:
    """Qwen's shared expert, with a weight of its own for each token."""
    return [
        *mlp(r, r.size("shared_expert_intermediate_size"), at, name="mlp.shared_expert"),
        *linear("mlp.shared_expert_gate", 1, r.hidden, at, "weight of the shared expert"),
    ]


def _qwen2_moe(r: Reader) -> list[Weight]:
    experts = r.size("num_experts")
    sparse = sparse_layers(r, experts)
    return [
        *attention(r, bias=r.flag("qkv_bias"), o_bias=False),
        *mlp(r, r.size("intermediate_size"), minus(r.all, sparse)),
        *mixture(r, experts, r.size("moe_intermediate_size"), sparse),
        *_shared_expert(r, sparse),
        *head(r),
    ]


def _qwen3_moe(r: Reader) -> list[Weight]:
    bias, experts = r.flag("attention_bias"), r.size("num_experts", "num_local_experts")
    sparse = sparse_layers(r, experts)
    dense = minus(r.all, sparse)
    return [
        *attention(r, bias=bias, o_bias=bias),
        *(mlp(r, r.size("intermediate_size"), dense) if dense else []),
        *mixture(r, experts, r.size("moe_intermediate_size"), sparse),
        *head(r),
    ]


def _minimax_m3(r: Reader) -> list[Weight]:
    experts = r.size("num_local_experts")
    sparse = sparse_layers(r, experts)
    shared = r.none_or_size("shared_intermediate_size")
    dense = minus(r.all, sparse)
    return [
        *attention(r, bias=False, o_bias=False),
        *(mlp(r, r.size("dense_intermediate_size"), dense, joint=True) if dense else []),
        *mixture(r, experts, r.size("intermediate_size"), sparse),
        *(mlp(r, shared, sparse, name="mlp.shared_experts", joint=True) if shared else []),
        *head(r),
    ]


def _gpt_oss(r: Reader) -> list[Weight]:
    bias = r.flag("attention_bias")
    experts = r.size("num_local_experts", "num_experts")
    inside = mixture(r, experts, r.size("intermediate_size"), r.all, router="router", bias=True)
    return [*attention(r, bias=bias, o_bias=bias), *inside, *head(r)]


def _shared_experts(r: Reader, *, bias: bool = False) -> list[Weight]:
    """DeepSeek's and GLM's feed-forward part: some dense layers, then experts with shared ones beside them."""
    experts, width = r.size("n_routed_experts"), r.size("moe_intermediate_size")
    sparse = sparse_layers(r, experts)
    dense = minus(r.all, sparse)
    several = r.value("n_shared_experts") if "n_shared_experts" in r.values else r.value("num_shared_experts")
    several = 1 if several is None and "n_shared_experts" not in r.values else several
    shared = width * r.size("n_shared_experts", "num_shared_experts", default=1) if several else 0
    return [
        *(mlp(r, r.size("intermediate_size"), dense, bias=bias) if dense else []),
        *mixture(r, experts, width, sparse),
        *(mlp(r, shared, sparse, name="mlp.shared_experts", bias=bias) if shared else []),
        *head(r),
    ]


def _glm4_moe(r: Reader) -> list[Weight]:
    return [*attention(r, bias=r.flag("attention_bias"), o_bias=False), *_shared_experts(r)]


def _deepseek(r: Reader) -> list[Weight]:
    return [*latent_attention(r), *_shared_experts(r, bias=r.kind == "deepseek_v2" and r.flag("mlp_bias"))]


def _deepseek_sparse(r: Reader) -> list[Weight]:
    """The indexer is in every layer, or in those that `indexer_types` calls full."""
    listed = r.names("indexer_types")
    at = r.all if listed is None else tuple(i for i, one in enumerate(listed) if one != "shared")
    if listed is None and r.values.get("index_topk_pattern"):
        pattern = str(r.values["index_topk_pattern"])
        at = tuple(i for i in r.all if i < len(pattern) and pattern[i] == "F")
    elif listed is None and (freq := r.size("index_topk_freq", default=1)) > 1:
        offset = r.values.get("index_skip_topk_offset", 2)
        at = tuple(i for i in r.all if max(i - offset + 1, 0) % freq == 0)
    return [*latent_attention(r), *indexer(r, at), *_shared_experts(r)]


def _llama4(r: Reader) -> list[Weight]:
    """A mixture with a shared expert in every n-th layer, else a plain feed-forward part."""
    step = r.size("interleave_moe_layer_step")
    listed = r.values.get("moe_layers")
    sparse = tuple(listed) if isinstance(listed, list) else tuple(range(step - 1, r.layers, step))
    width, experts = r.size("intermediate_size"), r.size("num_local_experts")
    dense = minus(r.all, sparse)
    bias = r.flag("attention_bias")
    return [
        *attention(r, bias=bias, o_bias=bias),
        *(mlp(r, r.size("intermediate_size_mlp"), dense, name="feed_forward") if dense else []),
        *mixture(r, experts, width, sparse, name="feed_forward", router="router"),
        *mlp(r, width, sparse, name="feed_forward.shared_expert"),
        *head(r),
    ]


def _mimo_v2(r: Reader) -> list[Weight]:
    """Two kinds of attention with key/value heads of their own."""
    local = r.of_type("sliding_attention")
    if not local and isinstance(pattern := r.values.get("hybrid_layer_pattern"), list):
        local = tuple(i for i, one in enumerate(pattern[: r.layers]) if one)
    elif r.names("layer_types") is None:
        local = tuple(i for i in r.all if i and (i + 1) % 6)
    experts, dim, v_dim = r.size("n_routed_experts"), r.size("head_dim"), r.size("v_head_dim")
    sparse = sparse_layers(r, experts)
    near = r.size("swa_num_key_value_heads", default=2 * r.size("num_key_value_heads"))
    bias: dict[str, Any] = {"bias": r.flag("attention_bias"), "o_bias": False, "dim": dim, "v_dim": v_dim}
    return [
        *attention(r, at=minus(r.all, local), **bias),
        *attention(r, at=local, kv_heads=near, **bias),
        *mlp(r, r.size("intermediate_size"), minus(r.all, sparse)),
        *mixture(r, experts, r.size("moe_intermediate_size"), sparse),
        *head(r),
    ]


def _deepseek_v4(r: Reader) -> list[Weight]:
    """Queries through a latent, one key/value head, an output in groups, and compressed keys in most layers."""
    heads, dim, rank = r.size("num_attention_heads"), r.size("head_dim"), r.size("q_lora_rank")
    groups, out = r.size("o_groups"), r.size("o_lora_rank")
    at, cut = r.all, of_heads(heads)
    grouped = Weight(
        "self_attn.o_a_proj", groups * out, heads * dim // groups, len(at),
        f"{groups} groups of {heads // groups} heads", split="groups", units=groups, at=at,
    )  # fmt: skip
    streams = r.size("hc_mult")
    mixed = f"mixing of {streams} residual streams"
    return [
        *linear("self_attn.q_a_proj", rank, r.hidden, at, f"query latent of {rank}"),
        *linear("self_attn.q_b_proj", heads * dim, rank, at, f"{heads} heads of {dim}", **cut),
        *linear("self_attn.kv_proj", dim, r.hidden, at, f"one key/value head of {dim}"),
        grouped,
        *linear("self_attn.o_b_proj", r.hidden, groups * out, at, f"back from {groups} groups of {out}", split="rows"),
        *_compressors(r),
        *(replace(w, dtype="fp32") for part in ("attn", "ffn")
          for w in linear(f"{part}_hc.fn", streams * (streams + 2), streams * r.hidden, at, mixed)),
        *_shared_experts(r),
        Weight("hc_head.hc_fn", streams, streams * r.hidden, 1, mixed, dtype="fp32"),
    ]  # fmt: skip


def _compressors(r: Reader) -> list[Weight]:
    """DeepSeek-V4's compressed keys: 4 tokens in one with a selector, or 128 in one without."""
    dim, heads, index = r.size("head_dim"), r.size("index_n_heads"), r.size("index_head_dim")
    ratios = r.values.get("compress_ratios")
    kinds = r.names("layer_types")
    if not isinstance(ratios, list) and kinds is None:
        raise ProblemError("config.json: compress_ratios is missing, a deepseek_v4 model needs it")
    fine = tuple(i for i in r.all if (ratios[i] == 4 if ratios else kinds[i] == "compressed_sparse_attention"))  # type: ignore[index]
    coarse = tuple(i for i in r.all if (ratios[i] > 4 if ratios else kinds[i] == "heavily_compressed_attention"))  # type: ignore[index]
    why = "keys of some tokens in one"
    return [
        *(w for at, wide in ((fine, 2 * dim), (coarse, dim)) for part in ("kv_proj", "gate_proj")
          for w in linear(f"self_attn.compressor.{part}", wide, r.hidden, at, why)),
        *(w for part in ("kv_proj", "gate_proj")
          for w in linear(f"self_attn.compressor.indexer.{part}", 2 * index, r.hidden, fine, f"selector: {why}")),
        *linear("self_attn.compressor.indexer.q_b_proj", heads * index, r.size("q_lora_rank"), fine,
                f"selector: {heads} heads of {index}"),
        *linear("self_attn.compressor.indexer.scorer.weights_proj", heads, r.hidden, fine, f"selector: {heads} heads"),
    ]  # fmt: skip


# --- models of several kinds of layers


def _qwen_hybrid(*, joint: bool, dense: bool) -> Make:
    """Linear attention in most layers, gated attention in the others."""

    def make(r: Reader) -> list[Weight]:
        step = r.size("full_attention_interval", default=4)
        listed = r.names("layer_types") is not None
        full = r.of_type("full_attention") if listed else tuple(range(step - 1, r.layers, step))
        bias = r.flag("attention_bias")
        found = [
            *gated_delta(r, minus(r.all, full), joint=joint),
            *attention(r, bias=bias, o_bias=bias, at=full, gated=True),
        ]
        if dense:
            return [*found, *mlp(r, r.size("intermediate_size"), r.all), *head(r)]
        experts = r.size("num_experts")
        sparse = sparse_layers(r, experts)
        rest = minus(r.all, sparse)
        return [
            *found,
            *(mlp(r, r.size("intermediate_size"), rest) if rest else []),
            *mixture(r, experts, r.size("moe_intermediate_size"), sparse),
            *_shared_expert(r, sparse),
            *head(r),
        ]

    return make


def _nemotron_h(r: Reader) -> list[Weight]:
    """Each layer is one thing: Mamba, attention, a feed-forward part or a mixture."""
    listed = r.values.get("layers_block_type") or r.values.get("layer_types")
    pattern = r.values.get("hybrid_override_pattern")
    kinds = [_LETTERS.get(one, str(one)) for one in (listed if isinstance(listed, list) else str(pattern or ""))]
    if not kinds:
        raise ProblemError(f"config.json: hybrid_override_pattern names no layers, a {r.kind} model needs it")
    r = Reader({**r.values, "num_hidden_layers": len(kinds)}, r.kind, nested=r.nested)  # as transformers counts them
    of = {kind: tuple(i for i in r.all if kinds[i] == kind) for kind in set(_LETTERS.values())}
    odd = next((kind for kind in kinds if kind not in of), "")
    if odd:
        raise ProblemError(f"config.json: a layer of kind {odd!r}, known are {', '.join(sorted(of))}")
    bias = r.flag("attention_bias")
    found = [*mamba(r, of["mamba"]), *attention(r, bias=bias, o_bias=bias, at=of["attention"], name="mixer")]
    plain = {"gated": False, "bias": r.flag("mlp_bias")}
    if of["mlp"]:
        found += mlp(r, r.size("intermediate_size"), of["mlp"], name="mixer", **plain)
    if of["moe"]:
        latent = r.none_or_size("moe_latent_size")
        experts, width = r.size("n_routed_experts"), r.size("moe_intermediate_size")
        found += mixture(r, experts, width, of["moe"], name="mixer", inner=latent, gated=False)
        shared = r.size("moe_shared_expert_intermediate_size") * r.size("n_shared_experts", default=1)
        found += mlp(r, shared, of["moe"], name="mixer.shared_experts", **plain)
        if latent:
            why = f"experts see {latent} of {r.hidden}"
            found += linear("mixer.fc1_latent_proj", latent, r.hidden, of["moe"], why)
            found += linear("mixer.fc2_latent_proj", r.hidden, latent, of["moe"], why)
    return [*found, *head(r)]


_LETTERS: Final = {
    "M": "mamba", "*": "attention", "-": "mlp", "E": "moe", "linear_attention": "mamba", "full_attention": "attention",
}  # fmt: skip


def _nemotron_nas(r: Reader) -> list[Weight]:
    """Found by a search: each layer says what its attention and its feed-forward part are, or that it has none."""
    blocks = r.values.get("block_configs")
    if not isinstance(blocks, list) or len(blocks) != r.layers:
        raise ProblemError(f"config.json: block_configs describes no {r.layers} layers, a {r.kind} model needs it")
    heads, bias = r.size("num_attention_heads"), r.flag("attention_bias")
    found: dict[tuple[str, Any], list[int]] = {}
    for i, block in enumerate(blocks):
        for part, name in (("attention", "n_heads_in_group"), ("ffn", "ffn_mult")):
            listed = block[part]
            if not listed.get("no_op"):
                found.setdefault((part, 0 if listed.get("replace_with_linear") else listed[name]), []).append(i)
    weights: list[Weight] = []
    for (part, size), at in found.items():
        layers = tuple(at)
        if not size:
            name = "self_attn.linear_attn" if part == "attention" else "mlp.linear_mlp"
            weights += linear(name, r.hidden, r.hidden, layers, "one product in the place of the part")
        elif part == "attention":
            weights += attention(r, bias=bias, o_bias=bias, at=layers, kv_heads=heads // size)
        else:
            weights += mlp(r, -(-int(2 * size * r.hidden / 3) // 256) * 256, layers, bias=r.flag("mlp_bias"))
    return [*weights, *head(r)]


def _kimi_linear(r: Reader) -> list[Weight]:
    """Delta attention in most layers, MLA in the others."""
    inside = r.part("linear_attn_config")
    if inside is not None:  # its layers are counted from 1
        delta = tuple(i - 1 for i in inside.values["kda_layers"] if i <= r.layers)
        heads, dim = inside.size("num_heads"), inside.size("head_dim")
    elif r.names("layer_types") is None:
        raise ProblemError(f"config.json: layer_types is missing, a {r.kind} model needs it")
    else:
        delta, heads, dim = r.of_type("linear_attention"), r.size("linear_num_heads"), r.size("linear_head_dim")
    full = minus(r.all, delta)
    wide, cut, why = heads * dim, of_heads(heads), f"delta attention: {heads} heads of {dim}"
    experts, width = r.size("num_experts"), r.size("moe_intermediate_size")
    sparse = sparse_layers(r, experts)
    inner, v = r.none_or_size("routed_expert_hidden_size"), r.size("num_attention_heads") * r.size("v_head_dim")
    full_rank = inside is not None and inside.flag("use_full_rank_gate")
    return [
        *(w for part in "qkv" for w in linear(f"self_attn.{part}_proj", wide, r.hidden, delta, why, **cut)),
        *linear("self_attn.forget_gate.f_a_proj", dim, r.hidden, delta, why),
        *linear("self_attn.forget_gate.f_b_proj", wide, dim, delta, why, **cut),
        *linear("self_attn.b_proj", heads, r.hidden, delta, why, **cut),
        *(
            linear("self_attn.g_proj", wide, r.hidden, delta, why, **cut)
            if full_rank
            else [
                *linear("self_attn.g_a_proj", dim, r.hidden, delta, why),
                *linear("self_attn.g_b_proj", wide, dim, delta, why, **cut),
            ]
        ),
        *linear("self_attn.o_proj", r.hidden, wide, delta, why, split="rows"),
        *latent_attention(r, full),
        *(linear("self_attn.g_proj", v, r.hidden, full, "gate of the attention's output", split="heads",
                 units=r.size("num_attention_heads")) if r.flag("mla_use_output_gate") else []),
        *mlp(r, r.size("intermediate_size"), minus(r.all, sparse)),
        *mixture(r, experts, width, sparse, inner=inner),
        *(linear("mlp.routed_down_proj", inner, r.hidden, sparse, f"experts see {inner}") if inner else []),
        *(linear("mlp.routed_up_proj", r.hidden, inner, sparse, f"experts see {inner}") if inner else []),
        *mlp(r, width * r.size("num_shared_experts", default=1), sparse, name="mlp.shared_experts"),
        *head(r),
    ]  # fmt: skip


# model_type -> its weights; those with `_text` are the language model inside a multi-modal one
MODELS: Final[dict[str, Make]] = {
    "llama": _llama,
    "mistral": _plain(bias=False),
    "ministral3": _plain(bias=False),
    "qwen2": _plain(bias=True),
    "qwen3": _plain("attention_bias", o_bias=True),
    "qwen3_vl_text": _plain("attention_bias", o_bias=True),
    "mimo": _plain(bias=True),
    "glm": _plain("attention_bias", joint=True),
    "glm4": _plain("attention_bias", joint=True),
    "phi3": _phi3,
    "seed_oss": _seed_oss,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl_moe_text": _qwen3_moe,
    "qwen3_next": _qwen_hybrid(joint=True, dense=False),
    "qwen3_5_text": _qwen_hybrid(joint=False, dense=True),
    "qwen3_5_moe_text": _qwen_hybrid(joint=False, dense=False),
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _deepseek,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "deepseek_v32": _deepseek_sparse,
    "glm_moe_dsa": _deepseek_sparse,
    "deepseek_v4": _deepseek_v4,
    "kimi_linear": _kimi_linear,
    "minimax_m2": _mixtral,
    "minimax_m3_vl_text": _minimax_m3,
    "mimo_v2_flash": _mimo_v2,
    "llama4_text": _llama4,
    "nemotron_h": _nemotron_h,
    "nemotron-nas": _nemotron_nas,
}
# the same architecture under another name: of a fork, of a publisher's own file, of the whole instead of its text
ALIASES: Final = {
    "deepseek_ref": "deepseek_v4", "deepseek_v4_text": "deepseek_v4", "minimax_m3": "minimax_m3_vl_text",
    "nemotron_nas": "nemotron-nas",
    "minimax_m3_text": "minimax_m3_vl_text", "kimi_k3": "kimi_linear",
    "mimo_v2": "mimo_v2_flash",
}  # fmt: skip
