"""The weights of a model from its Hugging Face `config.json`, and with them the GEMMs it will run.

`modules` lists the linear layers as transformers builds them.  `shapes` turns them into what one rank of a serving
engine runs (vLLM and SGLang agree here): split over tensor parallel ranks, q, k and v in one product, gate and up in
one, MLA's down projections in one and its up projections absorbed as batched products.  Every shape says why.

Sources: transformers' modelling files (tests build them on the meta device and compare), Megatron's column and row
split, and AITER's shape lists of served models (tests).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.model_layers import ALIASES, MODELS, TOWERS
from gemmtuned.configs.model_parts import Reader, Weight, ahead
from gemmtuned.configs.model_quant import applied, rules_of
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.read_file import read_regular

NSETS: Final = (1, 512, 1024, 2048, 3072, 4096, 8192, 16384)  # gradlib's --nsets
BESIDE: Final = "hf_quant_config.json"  # ModelOpt's own file
_BESIDE_KEY: Final = "hf_quant_config"  # where read_config puts what stands in it
_NAME_KEY: Final = "folder_name"
MOST_BYTES: Final = 64 << 20
_VOCAB_PAD: Final = 64  # engines that split the vocabulary pad it to this first


@dataclass(slots=True)
class Plan:
    """What a model runs. kind: its architecture; dtype: torch's name of the model's own, "" where it does not say."""

    kind: str
    dtype: str
    weights: list[Weight]
    notes: list[str] = field(default_factory=list)


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json, with what hf_quant_config.json beside it says; `folder` may be the file itself.

    Raises ProblemError that names the file.
    """
    path = folder / "config.json" if folder.is_dir() else folder
    config = _json(path)
    if path.name == "config.json" and (beside := path.with_name(BESIDE)).exists():
        config[_BESIDE_KEY] = _json(beside)
    return {**config, _NAME_KEY: path.absolute().parent.name}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(path, MOST_BYTES).decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as err:
        raise ProblemError(f"{path}: not a model's {path.name} ({err})") from err
    if not isinstance(found, dict):
        raise ProblemError(f"{path}: not a model's {path.name}: it holds no object")
    return found


def dtype_of(config: Mapping[str, Any]) -> str:
    """torch's name of the dtype the model was saved in, or "" when its config does not say, or says "auto"."""
    for part in (config, _text(config)):
        for told in (part.get("dtype"), part.get("torch_dtype")):
            if told and told != "auto":
                return str(told).removeprefix("torch.")
    return ""


def architecture(config: Mapping[str, Any]) -> str:
    """The entry of MODELS that this model is of.

    Raises ProblemError for one that we do not know, with what its config says of itself.
    """
    text = _text(config)
    for part in (text, config):
        kind = str(part.get("model_type") or "")
        kind = ALIASES.get(kind, kind)
        if kind in MODELS:
            return kind
    said = [str(part.get("model_type")) for part in (config, text) if part.get("model_type")]
    classes = config.get("architectures") or text.get("architectures")
    what = f"model_type is {' and inside '.join(map(repr, dict.fromkeys(said)))}" if said else "it says no model_type"
    more = f" (architectures {', '.join(map(str, classes))})" if isinstance(classes, list) and classes else ""
    raise ProblemError(
        f"{what}{more}, known are {', '.join(sorted(MODELS))}. Use --from-transformers to read its layers from "
        "transformers, or name its shapes in a CSV"
    )


def modules(config: Mapping[str, Any]) -> list[Weight]:
    """Every linear layer of the model, as transformers builds it. Raises ProblemError for a model we do not know."""
    return plan(config, fused=False).weights


def shapes(config: Mapping[str, Any], *, tp: int = 1, fused: bool = True, ep: int = 1) -> list[Weight]:
    """What one of `tp` ranks runs; fused=False leaves the products as transformers has them (and tp must be 1).

    ep: over how many ranks a mixture's experts are spread, whole; the others of the tp ranks share an expert.  Raises
    ProblemError when the model is not known or cannot be split over so many ranks.
    """
    return plan(config, tp=tp, fused=fused, ep=ep).weights


def plan(config: Mapping[str, Any], *, tp: int = 1, fused: bool = True, ep: int = 1) -> Plan:
    """As shapes, with what to know of the model beside. Raises ProblemError."""
    kind = architecture(config)
    if not fused and (tp != 1 or ep != 1):
        raise ProblemError("unfused products are those of transformers on one device: --tp must be 1")
    r = Reader(_text(config), kind)
    weights = MODELS[kind](r)
    weights += [replace(w, part="vision") for w in _tower(config, r)]
    if fused:  # transformers builds no heads that guess ahead
        weights += ahead(r, weights)
    rules = rules_of(config, config.get(_BESIDE_KEY), name=str(config.get(_NAME_KEY, "")))
    weights = applied(weights, rules)
    found = Plan(kind, dtype_of(config), weights, [*rules.notes] if rules else [])
    if fused:
        inside = max(tp // ep, 1)  # ranks that share an expert
        cut = [_spread(_cut(w, inside if w.experts else tp), ep) for w in weights]
        found.weights = _fuse(cut, r, tp)
    tower = config.get("vision_config") or config.get("vision_encoder") or _text(config).get("vision_config")
    if tower and not any(w.part == "vision" for w in weights):
        found.notes.append("its vision tower is not described here: --from-transformers reads it")
    if r.values.get("attn_res_block_size"):
        found.notes.append("the projections of its attention residuals (attn_res_block_size) are not described here")
    return found


def _tower(config: Mapping[str, Any], r: Reader) -> list[Weight]:
    make = TOWERS.get(str(config.get("model_type")))
    inside = Reader(config, str(config.get("model_type"))).part("vision_config")
    return make(inside, r.hidden) if make is not None and inside is not None else []


def problems(
    weights: Iterable[Weight], ms: Sequence[int], *, dtype: str, threads: int, vision_ms: Sequence[int] = ()
) -> list[Problem]:
    """One problem for each of these M and each weight that is not left out; repeated shapes once.

    vision_ms: of towers, which see patches of images and no tokens.
    """
    found: dict[Problem, None] = {}
    for weight in weights:
        if weight.left_out:
            continue
        family = "dense" if weight.batch == 1 else "batched"
        for m in vision_ms if weight.part == "vision" else ms:
            problem = Problem(
                family=family, batch=weight.batch, m=m, n=weight.n, k=weight.k, bias=weight.bias, dtype=dtype,
                threads=threads,
            )  # fmt: skip
            found[problem] = None
    return list(found)


def _spread(w: Weight, ep: int) -> Weight:
    """One rank's share of a mixture's experts, where they are spread over ranks."""
    if ep == 1 or not w.experts:
        return w
    if w.experts % ep:
        raise ProblemError(f"--ep {ep} does not divide the {w.experts} experts of {w.name}")
    return replace(w, experts=w.experts // ep, why=f"{w.why}, {w.experts // ep} on each of {ep} ranks")


def _cut(w: Weight, tp: int) -> Weight:
    """One rank's share of a weight."""
    if tp == 1 or w.split == "whole":
        return w
    over = f"{w.why}, over {tp} ranks"
    if w.split == "vocab":
        padded = -(-w.n // _VOCAB_PAD) * _VOCAB_PAD
        return replace(w, n=-(-padded // tp), why=over)
    if w.split == "kv_heads" and tp % w.units == 0 and tp > w.units:
        return replace(w, n=w.n // w.units, units=1, why=f"{w.why}, one on each of {tp} ranks")
    if w.split == "groups":
        if w.units % tp:
            raise ProblemError(f"--tp {tp} does not divide the {w.units} groups of {w.name}")
        return replace(w, n=w.n // tp, units=w.units // tp, why=over)
    whole = w.units if w.split in ("heads", "kv_heads") else w.k if w.split == "rows" else w.n
    if whole % tp:
        what = "heads" if w.split in ("heads", "kv_heads") else "columns" if w.split == "columns" else "rows"
        raise ProblemError(f"--tp {tp} does not divide the {whole} {what} of {w.name}")
    if w.split == "rows":
        return replace(w, k=w.k // tp, why=over)
    return replace(w, n=w.n // tp, units=max(w.units // tp, 1), why=over)


# (parts, name of the one product they become)
_FUSED: Final = (
    (("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    (("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
    (("q_a_proj", "kv_proj"), "fused_qkv_a_proj"),
    (("gate_proj", "up_proj"), "gate_up_proj"),
    (("wk", "weights_proj"), "wk_weights_proj"),
    (("kv_proj", "gate_proj"), "kv_gate_proj"),
    (("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),
    (("in_proj_b", "in_proj_a"), "in_proj_ba"),
)


def _fuse(weights: list[Weight], r: Reader, tp: int) -> list[Weight]:
    """Products of one input in one, and MLA's kv_b also as decode runs it: absorbed, one product a head.

    Only weights of the same layers that are kept alike: a plain one is not joined to a quantised one.
    """
    alike: dict[tuple[object, ...], dict[str, Weight]] = {}
    for w in weights:
        group, _, last = w.name.rpartition(".")
        alike.setdefault((group, w.at, w.dtype, w.experts, w.k, w.part), {})[last] = w
    found = []
    for w in weights:
        group, _, last = w.name.rpartition(".")
        beside = alike[group, w.at, w.dtype, w.experts, w.k, w.part]
        names, joint = next((f for f in _FUSED if last in f[0] and set(f[0]) <= set(beside)), ((), ""))
        parts = [beside[name] for name in names] if not w.experts and w.part != "vision" else []
        if not parts:
            found.append(_grouped(w))
        elif w is parts[0]:
            shown = " + ".join(f"{p.n} {p.name.rpartition('.')[2]}" for p in parts)
            why = f"{shown}: {parts[0].why}" + (f"; {parts[1].why}" if parts[1].why != parts[0].why else "")
            found.append(replace(w, name=f"{group}.{joint}", n=sum(p.n for p in parts), why=why))
        if last == "kv_b_proj":
            found += _absorbed(w, r, tp)
    return found


def _grouped(w: Weight) -> Weight:
    """A weight whose groups each see their own part of the input runs as one product a group."""
    if w.split != "groups":
        return w
    return replace(w, n=w.n // w.units, batch=w.units)


def _absorbed(kv_b: Weight, r: Reader, tp: int) -> list[Weight]:
    """kv_b_proj folded into the query and the output: what MLA runs in decode, batched over the heads."""
    nope, v, latent = r.size("qk_nope_head_dim"), r.size("v_head_dim"), r.size("kv_lora_rank")
    heads = r.size("num_attention_heads") // tp
    why = f"kv_b_proj absorbed in decode, {heads} heads"
    return [
        replace(kv_b, name="self_attn.w_kc", n=latent, k=nope, batch=heads, why=f"{why}: query to latent"),
        replace(kv_b, name="self_attn.w_vc", n=v, k=latent, batch=heads, why=f"{why}: latent to value"),
    ]


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multi-modal config."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config
