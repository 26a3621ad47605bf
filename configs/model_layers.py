"""The linear layers of the models we know, as transformers builds them from a `config.json`.

One function a model, made of the parts that models share; a new model is a function and its entry in MODELS.  Tests
build each on torch's meta device and compare every weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gemmtuned.configs.errors import ProblemError


@dataclass(frozen=True, slots=True)
class Weight:
    """One linear layer's weight [n, k] and how often it occurs in the model.

    name: as transformers calls it inside a decoder layer.  split: how tensor parallelism cuts it: by heads, by kv_heads
    (repeated where there are fewer than ranks), by output columns, by input rows, by vocab, or not at all (whole).
    units: heads in it.  batch: 1, or heads of a batched product.  experts: 0, or how many such weights form a mixture.
    quantised: its weights are not of the model's dtype.  why: how n and k came about.
    """

    name: str
    n: int
    k: int
    count: int
    why: str
    bias: bool = False
    split: str = "whole"
    units: int = 1
    batch: int = 1
    experts: int = 0
    quantised: bool = False

    @property
    def left_out(self) -> str:
        """Why `problems` leaves it out, or ""."""
        if self.experts:
            return "a mixture's experts run grouped: counted in programs, not tuned by this version"
        return "its weights are quantised: counted in programs, not tuned by this version" if self.quantised else ""


class Reader:
    """Values of a config by name, checked."""

    def __init__(self, values: Mapping[str, Any], kind: str) -> None:
        self.values, self.kind = values, kind

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of these that is there, a whole number above 0."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise ProblemError(f"config.json: {name} is {value!r}, expected a whole number of at least 1")
                return value
        if default is None:
            raise ProblemError(f"config.json: {' or '.join(names)} is missing, a {self.kind} model needs it")
        return default

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A switch."""
        value = self.values.get(name)
        return default if value is None else bool(value)

    @property
    def hidden(self) -> int:
        """The model's width."""
        return self.size("hidden_size")

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return self.size("num_hidden_layers")


# --- the parts that models are made of


def _attention(r: Reader, *, bias: bool, o_bias: bool) -> list[Weight]:
    heads = r.size("num_attention_heads")
    kv_heads = r.size("num_key_value_heads", default=heads)
    dim = r.size("head_dim", default=HEAD_DIMS.get(r.kind, r.hidden // heads))
    kv = f"{kv_heads} key/value heads of {dim}"
    return [
        Weight("self_attn.q_proj", heads * dim, r.hidden, r.layers, f"{heads} heads of {dim}", bias, "heads", heads),
        Weight("self_attn.k_proj", kv_heads * dim, r.hidden, r.layers, kv, bias, "kv_heads", kv_heads),
        Weight("self_attn.v_proj", kv_heads * dim, r.hidden, r.layers, kv, bias, "kv_heads", kv_heads),
        Weight(
            "self_attn.o_proj", r.hidden, heads * dim, r.layers, f"back from {heads} heads of {dim}", o_bias, "rows"
        ),
    ]


def _latent_attention(r: Reader) -> list[Weight]:
    """DeepSeek's MLA: queries and keys/values pass through narrow latents."""
    heads, bias = r.size("num_attention_heads"), r.flag("attention_bias")
    nope, rope, v = r.size("qk_nope_head_dim"), r.size("qk_rope_head_dim"), r.size("v_head_dim")
    latent = r.size("kv_lora_rank")
    why_q = f"{heads} heads of {nope} + {rope}"
    if r.values.get("q_lora_rank") is None:
        found = [Weight("self_attn.q_proj", heads * (nope + rope), r.hidden, r.layers, why_q, False, "heads", heads)]
    else:
        rank = r.size("q_lora_rank")
        found = [
            Weight("self_attn.q_a_proj", rank, r.hidden, r.layers, f"query latent of {rank}", bias),
            Weight("self_attn.q_b_proj", heads * (nope + rope), rank, r.layers, why_q, False, "heads", heads),
        ]
    return [
        *found,
        Weight(
            "self_attn.kv_a_proj_with_mqa", latent + rope, r.hidden, r.layers,
            f"key/value latent of {latent} and one rotary key of {rope}", bias,
        ),
        Weight(
            "self_attn.kv_b_proj", heads * (nope + v), latent, r.layers, f"{heads} heads of {nope} + {v}", False,
            "heads", heads,
        ),
        Weight("self_attn.o_proj", r.hidden, heads * v, r.layers, f"back from {heads} heads of {v}", bias, "rows"),
    ]  # fmt: skip


def _indexer(r: Reader) -> list[Weight]:
    """The selector of DeepSeek's sparse attention."""
    heads, dim, rank = r.size("index_n_heads"), r.size("index_head_dim"), r.size("q_lora_rank")
    why = f"sparse attention's selector: {heads} heads of {dim}"
    return [
        Weight("self_attn.indexer.wq_b", heads * dim, rank, r.layers, why),
        Weight("self_attn.indexer.wk", dim, r.hidden, r.layers, why),
        Weight("self_attn.indexer.weights_proj", heads, r.hidden, r.layers, why),
    ]


def _mlp(
    r: Reader, width: int, layers: int, *, name: str = "mlp", bias: bool = False, joint: bool = False
) -> list[Weight]:
    if layers == 0:
        return []
    why = f"feed-forward width {width}"
    down = Weight(f"{name}.down_proj", r.hidden, width, layers, why, bias, "rows")
    if joint:
        both = f"gate and up, {why}"
        return [Weight(f"{name}.gate_up_proj", 2 * width, r.hidden, layers, both, bias, "columns"), down]
    halves = (Weight(f"{name}.{half}_proj", width, r.hidden, layers, why, bias, "columns") for half in ("gate", "up"))
    return [*halves, down]


def _mixture(
    r: Reader, experts: int, width: int, layers: int, *, router: str = "mlp.gate", bias: bool = False
) -> list[Weight]:
    if layers == 0:
        return []
    why = f"{experts} experts of width {width}"
    return [
        Weight(router, experts, r.hidden, layers, f"router over {experts} experts", bias),
        Weight("mlp.experts.gate_up_proj", 2 * width, r.hidden, layers, why, bias, "columns", experts=experts),
        Weight("mlp.experts.down_proj", r.hidden, width, layers, why, bias, "rows", experts=experts),
    ]


def _head(r: Reader) -> list[Weight]:
    vocab = r.size("vocab_size")
    return [Weight("lm_head", vocab, r.hidden, 1, f"vocabulary of {vocab}", False, "vocab")]


def _sparse_layers(r: Reader, experts: int) -> int:
    """How many layers hold a mixture: a list says so, or the first few are dense, or every so many."""
    told = r.values.get("mlp_layer_types")
    if isinstance(told, list):
        return sum(1 for one in told if one == "sparse")
    if "first_k_dense_replace" in r.values:
        return max(r.layers - int(r.values["first_k_dense_replace"]), 0)
    step, dense = r.size("decoder_sparse_step", default=1), r.values.get("mlp_only_layers") or []
    return sum(1 for i in range(r.layers) if experts and i not in dense and (i + 1) % step == 0)


# --- the models


def _llama(r: Reader) -> list[Weight]:
    bias = r.flag("attention_bias")
    mlp = _mlp(r, r.size("intermediate_size"), r.layers, bias=r.flag("mlp_bias"))
    return [*_attention(r, bias=bias, o_bias=bias), *mlp, *_head(r)]


def _mistral(r: Reader) -> list[Weight]:
    return [*_attention(r, bias=False, o_bias=False), *_mlp(r, r.size("intermediate_size"), r.layers), *_head(r)]


def _qwen2(r: Reader) -> list[Weight]:
    return [*_attention(r, bias=True, o_bias=False), *_mlp(r, r.size("intermediate_size"), r.layers), *_head(r)]


def _qwen3(r: Reader) -> list[Weight]:
    bias = r.flag("attention_bias")
    return [*_attention(r, bias=bias, o_bias=bias), *_mlp(r, r.size("intermediate_size"), r.layers), *_head(r)]


def _glm(r: Reader) -> list[Weight]:
    mlp = _mlp(r, r.size("intermediate_size"), r.layers, joint=True)
    return [*_attention(r, bias=r.flag("attention_bias", default=True), o_bias=False), *mlp, *_head(r)]


def _mixtral(r: Reader) -> list[Weight]:
    mixture = _mixture(r, r.size("num_local_experts"), r.size("intermediate_size"), r.layers)
    return [*_attention(r, bias=False, o_bias=False), *mixture, *_head(r)]


def _qwen2_moe(r: Reader) -> list[Weight]:
    experts = r.size("num_experts")
    sparse = _sparse_layers(r, experts)
    shared = r.size("shared_expert_intermediate_size")
    return [
        *_attention(r, bias=r.flag("qkv_bias", default=True), o_bias=False),
        *_mlp(r, r.size("intermediate_size"), r.layers - sparse),
        *_mixture(r, experts, r.size("moe_intermediate_size"), sparse),
        *_mlp(r, shared, sparse, name="mlp.shared_expert"),
        *([Weight("mlp.shared_expert_gate", 1, r.hidden, sparse, "weight of the shared expert")] if sparse else []),
        *_head(r),
    ]


def _qwen3_moe(r: Reader) -> list[Weight]:
    bias, experts = r.flag("attention_bias"), r.size("num_experts", "num_local_experts")
    sparse = _sparse_layers(r, experts)
    return [
        *_attention(r, bias=bias, o_bias=bias),
        *_mlp(r, r.size("intermediate_size"), r.layers - sparse),
        *_mixture(r, experts, r.size("moe_intermediate_size"), sparse),
        *_head(r),
    ]


def _gpt_oss(r: Reader) -> list[Weight]:
    bias = r.flag("attention_bias", default=True)
    experts = r.size("num_local_experts", "num_experts")
    mixture = _mixture(r, experts, r.size("intermediate_size"), r.layers, router="mlp.router", bias=True)
    return [*_attention(r, bias=bias, o_bias=bias), *mixture, *_head(r)]


def _shared_experts(r: Reader) -> list[Weight]:
    """DeepSeek's and GLM's feed-forward part: some dense layers, then experts with shared ones beside them."""
    experts, width = r.size("n_routed_experts"), r.size("moe_intermediate_size")
    sparse = _sparse_layers(r, experts)
    shared = 0 if r.values.get("n_shared_experts", 1) is None else width * r.size("n_shared_experts", default=1)
    return [
        *_mlp(r, r.size("intermediate_size"), r.layers - sparse),
        *_mixture(r, experts, width, sparse),
        *(_mlp(r, shared, sparse, name="mlp.shared_experts") if shared else []),
        *_head(r),
    ]


def _glm4_moe(r: Reader) -> list[Weight]:
    return [*_attention(r, bias=r.flag("attention_bias"), o_bias=False), *_shared_experts(r)]


def _deepseek(r: Reader) -> list[Weight]:
    return [*_latent_attention(r), *_shared_experts(r)]


def _deepseek_sparse(r: Reader) -> list[Weight]:
    return [*_latent_attention(r), *_indexer(r), *_shared_experts(r)]


MODELS: Final[dict[str, Callable[[Reader], list[Weight]]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "glm": _glm,
    "glm4": _glm,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "deepseek_v32": _deepseek_sparse,
    "glm_moe_dsa": _deepseek_sparse,
}
# transformers' own default where a config.json leaves head_dim out; all others divide the width by the heads
HEAD_DIMS: Final = {"qwen3": 128, "glm": 128, "glm4": 128, "gpt_oss": 64}
