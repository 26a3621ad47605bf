"""The parts that models are made of: what a weight is, and attention, feed-forward parts, mixtures by their sizes.

A part takes the reader of a config.json and gives its weights in the layers it is asked for.  model_layers.py puts
models together from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from gemmtuned.configs.model_reader import Layers, Reader

# Products with two operands of 8 bits; how X is scaled and added up is the program's to say
_TUNED: Final = (
    ("fp8_e4m3", "tensor"), ("fp8_e4m3", "row"), ("fp8_e4m3", "1x128"), ("i8", "tensor"), ("i8", "row"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Weight:
    """One linear layer's weight [n, k] and how often it occurs in the model.

    name: as transformers calls it inside a decoder layer.  split: how tensor parallelism cuts it: by heads, by kv_heads
    (repeated where there are fewer than ranks), by output columns, by input rows, by groups of a batch, by vocab, or
    not at all (whole).  units: heads in it.  repeated: of its n, the columns that are cut by units, or repeated where
    there are fewer units than ranks, beside others that are always cut (keys and values beside queries in one weight).
    batch: 1, or heads of a batched product.  experts: 0, or how many such weights form a mixture.  part: `vision` or
    `audio` of what sees no tokens, `mtp` of the heads that guess ahead, else "".  dtype: of the weight, where it is
    quantised or kept in another dtype than the model's, as `fp8_e4m3`; "?" where the rules of its publisher are not
    understood.  scale: of a quantised weight.  at: the decoder layers it is in.  why: how n and k came about.
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
    part: str = ""
    dtype: str = ""
    scale: str = ""
    at: Layers = ()
    repeated: int = 0

    @property
    def sees(self) -> str:
        """What its M is a number of, where that is not tokens; else ""."""
        return {"vision": "patches of images", "audio": "frames of sound"}.get(self.part, "")

    @property
    def left_out(self) -> str:
        """Why `problems` leaves it out, or ""."""
        if self.experts:
            return "a mixture's experts run grouped: tuned as programs call them, not planned"
        if self.dtype == "?":
            return "how its weights are quantised is not understood, so nothing is planned for it"
        if self.dtype == "fp32":
            return "kept in fp32 beside the model's dtype: counted in programs, not planned"
        if (self.dtype, self.scale) in _TUNED:
            return "its weights are quantised: tuned as programs call them (on GPUs), not planned"
        return "its weights are quantised: counted in programs, not tuned by this version" if self.dtype else ""


Make = Callable[[Reader], list[Weight]]


def linear(
    name: str, n: int, k: int, at: Layers, why: str, *, split: str = "whole", units: int = 1, bias: bool = False
) -> list[Weight]:
    """One weight in these layers; none where there are none."""
    return [Weight(name, n, k, len(at), why, bias, split, units, at=at)] if at else []


def of_heads(heads: int) -> dict[str, Any]:
    """How a weight with this many heads is cut."""
    return {"split": "heads", "units": heads}


def minus(all_: Sequence[int], some: Sequence[int]) -> Layers:
    """The layers that are not among some."""
    return tuple(i for i in all_ if i not in set(some))


def attention(
    r: Reader,
    *,
    bias: bool,
    o_bias: bool,
    at: Layers | None = None,
    name: str = "self_attn",
    kv_heads: int = 0,
    dim: int = 0,
    v_dim: int = 0,
    gated: bool = False,
) -> list[Weight]:
    """Queries, keys, values and the way back. gated: the queries bring a gate of their own width along."""
    at = r.all if at is None else at
    heads = r.size("num_attention_heads")
    kv_heads = kv_heads or r.size("num_key_value_heads", default=heads)
    dim = dim or r.size("head_dim", default=r.hidden // heads)
    v_dim = v_dim or dim
    kv = f"{kv_heads} key/value heads of {dim}"
    q = f"{heads} heads of {dim}" + (" and a gate as wide" if gated else "")
    head: dict[str, Any] = {"bias": bias, "at": at}
    return [
        *linear(f"{name}.q_proj", heads * dim * (1 + gated), r.hidden, why=q, split="heads", units=heads, **head),
        *linear(f"{name}.k_proj", kv_heads * dim, r.hidden, why=kv, split="kv_heads", units=kv_heads, **head),
        *linear(f"{name}.v_proj", kv_heads * v_dim, r.hidden, why=kv, split="kv_heads", units=kv_heads, **head),
        *linear(
            f"{name}.o_proj", r.hidden, heads * v_dim, at, f"back from {heads} heads of {v_dim}", split="rows",
            bias=o_bias,
        ),
    ]  # fmt: skip


def latent_attention(r: Reader, at: Layers | None = None) -> list[Weight]:
    """DeepSeek's MLA: queries and keys/values pass through narrow latents."""
    at = r.all if at is None else at
    heads, bias = r.size("num_attention_heads"), r.flag("attention_bias")
    nope, rope, v = r.size("qk_nope_head_dim"), r.size("qk_rope_head_dim"), r.size("v_head_dim")
    latent = r.size("kv_lora_rank")
    why_q, heads_of = f"{heads} heads of {nope} + {rope}", of_heads(heads)
    if r.value("q_lora_rank") is None:
        found = linear("self_attn.q_proj", heads * (nope + rope), r.hidden, at, why_q, **heads_of)
    else:
        rank = r.size("q_lora_rank")
        found = [
            *linear("self_attn.q_a_proj", rank, r.hidden, at, f"query latent of {rank}", bias=bias),
            *linear("self_attn.q_b_proj", heads * (nope + rope), rank, at, why_q, **heads_of),
        ]
    why_kv = f"key/value latent of {latent} and one rotary key of {rope}"
    return [
        *found,
        *linear("self_attn.kv_a_proj_with_mqa", latent + rope, r.hidden, at, why_kv, bias=bias),
        *linear("self_attn.kv_b_proj", heads * (nope + v), latent, at, f"{heads} heads of {nope} + {v}", **heads_of),
        *linear(
            "self_attn.o_proj", r.hidden, heads * v, at, f"back from {heads} heads of {v}", split="rows", bias=bias
        ),
    ]


def indexer(r: Reader, at: Layers) -> list[Weight]:
    """The selector of DeepSeek's sparse attention."""
    heads, dim, rank = r.size("index_n_heads"), r.size("index_head_dim"), r.size("q_lora_rank")
    why = f"sparse attention's selector: {heads} heads of {dim}"
    return [
        *linear("self_attn.indexer.wq_b", heads * dim, rank, at, why),
        *linear("self_attn.indexer.wk", dim, r.hidden, at, why),
        *linear("self_attn.indexer.weights_proj", heads, r.hidden, at, why),
    ]


def mlp(
    r: Reader, width: int, at: Layers, *, name: str = "mlp", bias: bool = False, joint: bool = False, gated: bool = True
) -> list[Weight]:
    """A feed-forward part: gate and up (one weight where they are joint, up alone where nothing gates), and down."""
    why = f"feed-forward width {width}"
    down = linear(f"{name}.down_proj", r.hidden, width, at, why, split="rows", bias=bias)
    if joint:
        both = f"gate and up, {why}"
        return [*linear(f"{name}.gate_up_proj", 2 * width, r.hidden, at, both, split="columns", bias=bias), *down]
    parts = ("gate_proj", "up_proj") if gated else ("up_proj",)
    cut: dict[str, Any] = {"split": "columns", "bias": bias}
    return [*(w for part in parts for w in linear(f"{name}.{part}", width, r.hidden, at, why, **cut)), *down]


def mixture(
    r: Reader,
    experts: int,
    width: int,
    at: Layers,
    *,
    name: str = "mlp",
    router: str = "gate",
    bias: bool = False,
    inner: int = 0,
    gated: bool = True,
) -> list[Weight]:
    """A router and its experts. inner: their own input width."""
    if not at:
        return []
    why = f"{experts} experts of width {width}"
    first = "gate_up_proj" if gated else "up_proj"
    return [
        *linear(f"{name}.{router}", experts, r.hidden, at, f"router over {experts} experts", bias=bias),
        Weight(f"{name}.experts.{first}", width * (1 + gated), inner or r.hidden, len(at), why, bias, "columns",
               experts=experts, at=at),
        Weight(f"{name}.experts.down_proj", inner or r.hidden, width, len(at), why, bias, "rows",
               experts=experts, at=at),
    ]  # fmt: skip


def head(r: Reader) -> list[Weight]:
    """The product with the vocabulary; runs where its weight is the embedding's, too."""
    vocab = r.size("vocab_size")
    return [Weight("lm_head", vocab, r.hidden, 1, f"vocabulary of {vocab}", False, "vocab")]


# Of these the first layer is dense where a config.json says nothing of it
_FIRST_DENSE: Final = ("glm4_moe_lite", "kimi_linear", "mimo_v2_flash")


def sparse_layers(r: Reader, experts: int) -> Layers:
    """The layers that hold a mixture: a list says which, or the first few are dense, or every n-th layer is one."""
    listed = r.names("mlp_layer_types")
    if listed is not None:
        return tuple(i for i, one in enumerate(listed) if one != "dense")
    freq = r.values.get("moe_layer_freq")
    if isinstance(freq, list):
        return tuple(i for i, one in enumerate(freq[: r.layers]) if one)
    first = r.value("first_k_dense_replace")
    if first is None and r.kind in _FIRST_DENSE:
        first = 1
    if first is not None:
        return tuple(range(int(first), r.layers))
    step, dense = r.size("decoder_sparse_step", default=1), r.value("mlp_only_layers") or []
    return tuple(i for i in r.all if i not in dense and experts > 0 and (i + 1) % step == 0)


def gated_delta(r: Reader, at: Layers, *, joint: bool) -> list[Weight]:
    """Qwen's linear attention (a gated delta net). joint: q, k, v and z in one weight, and b and a in one."""
    keys, values = r.size("linear_num_key_heads"), r.size("linear_num_value_heads")
    wide, v = 2 * keys * r.size("linear_key_head_dim"), values * r.size("linear_value_head_dim")
    why, cut = f"linear attention: {keys} key and {values} value heads", of_heads(keys)
    out = linear("linear_attn.out_proj", r.hidden, v, at, why, split="rows")
    if joint:
        return [
            *linear("linear_attn.in_proj_qkvz", wide + 2 * v, r.hidden, at, why, **cut),
            *linear("linear_attn.in_proj_ba", 2 * values, r.hidden, at, why, **cut), *out,
        ]  # fmt: skip
    return [
        *linear("linear_attn.in_proj_qkv", wide + v, r.hidden, at, why, **cut),
        *linear("linear_attn.in_proj_z", v, r.hidden, at, why, **cut),
        *linear("linear_attn.in_proj_b", values, r.hidden, at, why, **cut),
        *linear("linear_attn.in_proj_a", values, r.hidden, at, why, **cut),
        *out,
    ]


def mamba(r: Reader, at: Layers) -> list[Weight]:
    """Mamba-2's projections: gate, x, B and C of each group, and a step for each head; and the way back."""
    heads, dim = r.size("mamba_num_heads"), r.size("mamba_head_dim")
    groups, state = r.size("n_groups"), r.size("ssm_state_size")
    wide = heads * dim
    n = 2 * wide + 2 * groups * state + heads
    why = f"Mamba: 2 * {heads} heads of {dim} + 2 * {groups} groups of {state} + {heads}"
    bias = r.flag("use_bias")
    inside = linear("mixer.in_proj", n, r.hidden, at, why, split="heads", units=groups, bias=bias)
    return [
        *(replace(w, repeated=2 * groups * state) for w in inside),
        *linear("mixer.out_proj", r.hidden, wide, at, why, split="rows", bias=bias),
    ]


def ahead(r: Reader, weights: Sequence[Weight]) -> list[Weight]:
    """Heads that guess tokens ahead: a decoder layer as the last one, after a product that joins two states.

    vLLM and SGLang run them where speculative decoding is on; transformers does not build them.
    """
    said = [name for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if r.values.get(name)]
    if not said:  # only what the checkpoint itself says it has
        return []
    count = r.size(*said)
    last = tuple(range(r.layers, r.layers + count))
    why = f"{count} heads that guess ahead"
    apart = r.kind == "deepseek_v4"  # whose two states have a weight each, and whose keys are not compressed there
    joined = (("e_proj", r.hidden), ("h_proj", r.hidden)) if apart else (("eh_proj", 2 * r.hidden),)
    again = [w for w in weights if _like(r, w) and not (apart and ".compressor." in w.name)]
    return [
        *(Weight(f"mtp.{name}", r.hidden, k, count, f"{why}: two states joined", part="mtp", at=last)
          for name, k in joined),
        *(replace(w, name=f"mtp.{w.name}", count=count, why=f"{why}: {w.why}", part="mtp", at=last) for w in again),
    ]  # fmt: skip


def _like(r: Reader, w: Weight) -> bool:
    """Whether a head that guesses ahead has such a weight: as the last layer, or as the last of each kind it names."""
    kinds, heads = r.values.get("hybrid_override_pattern"), r.values.get("mtp_hybrid_override_pattern")
    listed = [kinds.rfind(one) for one in heads] if isinstance(kinds, str) and isinstance(heads, str) else []
    return not w.part and (w.name == "hc_head.hc_fn" or not set(listed or [r.layers - 1]).isdisjoint(w.at))
