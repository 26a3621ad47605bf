"""The weights of a model from its Hugging Face `config.json`, and with them the GEMMs it will run.

`modules` lists the linear layers as transformers builds them.  `shapes` turns them into what one rank of a serving
engine runs (vLLM and SGLang agree here): split over tensor parallel ranks, q, k and v in one product, gate and up in
one, MLA's down projections in one and its up projections absorbed as batched products.  Every shape says why.

Sources: transformers' modelling files (tests build them on the meta device and compare), Megatron's column and row
split, and AITER's shape lists of served models (tests).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.model_layers import MODELS, Reader, Weight
from gemmtuned.configs.problem import Problem

NSETS: Final = (1, 512, 1024, 2048, 3072, 4096, 8192, 16384)  # gradlib's --nsets
_VOCAB_PAD: Final = 64  # engines that split the vocabulary pad it to this first


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json; `folder` may be the file itself. Raises ProblemError that names the file."""
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as err:
        raise ProblemError(f"{path}: not a model's config.json ({err})") from err
    if not isinstance(config, dict):
        raise ProblemError(f"{path}: not a model's config.json: it holds no object")
    return config


def dtype_of(config: Mapping[str, Any]) -> str:
    """torch's name of the dtype the model was saved in, or "" when its config does not say, or says "auto"."""
    for part in (config, _text(config)):
        for told in (part.get("dtype"), part.get("torch_dtype")):
            if told and told != "auto":
                return str(told).removeprefix("torch.")
    return ""


def modules(config: Mapping[str, Any]) -> list[Weight]:
    """Every linear layer of the model, as transformers builds it. Raises ProblemError for a model we do not know."""
    text = _text(config)
    kind = str(text.get("model_type", ""))
    make = MODELS.get(kind)
    if make is None:
        raise ProblemError(f"model_type is {kind!r}, known are {', '.join(sorted(MODELS))}. Name its shapes in a CSV")
    found = make(Reader(text, kind))
    kept_plain = _plain_modules(config)
    if kept_plain is None:
        return found
    return [replace(w, quantised=not any(f".{part}." in f".{w.name}." for part in kept_plain)) for w in found]


def shapes(config: Mapping[str, Any], *, tp: int = 1, fused: bool = True) -> list[Weight]:
    """What one of `tp` ranks runs; fused=False leaves the products as transformers has them (and tp must be 1).

    Raises ProblemError when the model is not known or cannot be split over so many ranks.
    """
    found = modules(config)
    if not fused:
        if tp != 1:
            raise ProblemError("unfused products are those of transformers on one device: --tp must be 1")
        return found
    return _fuse([_cut(weight, tp) for weight in found], Reader(_text(config), ""), tp)


def problems(weights: Iterable[Weight], ms: Sequence[int], *, dtype: str, threads: int) -> list[Problem]:
    """One problem for each of these M and each weight that is not left out; repeated shapes once."""
    found: dict[Problem, None] = {}
    for weight in weights:
        if weight.left_out:
            continue
        family = "dense" if weight.batch == 1 else "batched"
        for m in ms:
            problem = Problem(
                family=family, batch=weight.batch, m=m, n=weight.n, k=weight.k, bias=weight.bias, dtype=dtype,
                threads=threads,
            )  # fmt: skip
            found[problem] = None
    return list(found)


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
    (("gate_proj", "up_proj"), "gate_up_proj"),
)


def _fuse(weights: list[Weight], r: Reader, tp: int) -> list[Weight]:
    """Products of one input in one, and MLA's kv_b also as decode runs it: absorbed, one product a head."""
    by_name = {w.name: w for w in weights}
    found = []
    for w in weights:
        group, _, last = w.name.rpartition(".")
        names, joint = next((f for f in _FUSED if last in f[0]), ((), ""))
        parts = [by_name[name] for name in (f"{group}.{part}" for part in names) if name in by_name]
        if len(parts) < 2 or len(parts) < len(names):  # MLA without a query latent has a q_proj alone
            found.append(w)
        elif w is parts[0]:
            shown = " + ".join(f"{p.n} {p.name.rpartition('.')[2]}" for p in parts)
            why = f"{shown}: {parts[0].why}" + (f"; {parts[1].why}" if parts[1].why != parts[0].why else "")
            found.append(replace(w, name=f"{group}.{joint}", n=sum(p.n for p in parts), why=why))
        if last == "kv_b_proj":
            found += _absorbed(w, r, tp)
    return found


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


def _plain_modules(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Names, or parts of names, whose weights a quantised model leaves as they are; None when it is not quantised."""
    quantisation = config.get("quantization_config") or _text(config).get("quantization_config")
    if not isinstance(quantisation, Mapping):
        return None
    told = quantisation.get("modules_to_not_convert") or quantisation.get("ignore") or []
    parts = (_INSIDE.sub("", str(one)).rstrip("*.") for one in told)
    return ("lm_head", "mlp.gate", "mlp.router", *filter(None, parts))


_INSIDE: Final = re.compile(
    r"^(re:)?(model\.)?(language_model\.)?(layers\.[^.]+\.)?"
)  # what stands before a layer's own
