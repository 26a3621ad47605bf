"""The weights of a model from its Hugging Face `config.json`, and with them the GEMMs it will run.

`plan` lists the linear layers as transformers builds them (fused=False), or as one rank of a serving engine runs them
(vLLM and SGLang agree here): split over tensor parallel ranks, q, k and v in one product, gate and up in one, MLA's
down projections in one and its up projections absorbed as batched products.  Every shape says why.

Sources: transformers' modelling files (tests build them on the meta device and compare), Megatron's column and row
split, and AITER's shape lists of served models (tests).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.model_files import with_files
from gemmtuned.configs.model_layers import ALIASES, MODELS
from gemmtuned.configs.model_lines import described, make, sections
from gemmtuned.configs.model_parts import Weight, ahead
from gemmtuned.configs.model_quant import applied, rules_of
from gemmtuned.configs.model_reader import TEXTS, Reader
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.read_file import read_regular

NSETS: Final = (1, 512, 1024, 2048, 3072, 4096, 8192, 16384)  # gradlib's --nsets
# Files of quantisers beside config.json, and what they leave out: ModelOpt's, GPTQ's, AutoAWQ's, auto-round's
BESIDE: Final[dict[str, dict[str, str]]] = {
    "hf_quant_config.json": {}, "quantize_config.json": {"quant_method": "gptq"},
    "quant_config.json": {"quant_method": "awq"}, "quantization_config.json": {"quant_method": "auto-round"},
}  # fmt: skip
_BESIDE_KEY: Final = "hf_quant_config"  # under this key read_config adds the content of such a file
_NAME_KEY: Final = "folder_name"
FOLDER_KEY: Final = "folder_path"
MOST_BYTES: Final = 64 << 20
_VOCAB_PAD: Final = 64  # engines that split the vocabulary pad it to this first


@dataclass(slots=True)
class Plan:
    """The products of a model. kind: its architecture; dtype: torch's name of its dtype, "" where it does not say."""

    kind: str
    dtype: str
    weights: list[Weight]
    notes: list[str] = field(default_factory=list)


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json, with what a quantiser's file beside it says (BESIDE); `folder` may be the file itself.

    Raises ProblemError that names the file.
    """
    path = folder / "config.json" if folder.is_dir() else folder
    if folder.is_dir() and not path.is_file():
        raise ProblemError(f"{folder}: no config.json in it. {_instead(folder)}")
    config = _json(path)
    is_quantised = bool(config.get("quantization_config"))
    for name, usual in BESIDE.items() if path.name == "config.json" else ():
        # a config.json that has the quantisation's config has all of it
        if (beside := path.with_name(name)).exists() and not (is_quantised and usual):
            config[_BESIDE_KEY] = {**usual, **_json(beside)}
            break
    return {**config, _NAME_KEY: path.absolute().parent.name, FOLDER_KEY: str(path.absolute().parent)}


def _instead(folder: Path) -> str:
    """The error for a folder without a config.json: what it seems to be, and the way out."""
    try:
        inside = sorted(folder.iterdir())
    except OSError as err:
        return f"It cannot be read ({err.strerror or err})"
    names = {path.name for path in inside}
    below = next((path for path in inside if path.is_dir() and (path / "config.json").is_file()), None)
    csv = "or name its shapes in a CSV"
    if below is not None:
        return f"There is one in {below}: give that folder"
    if "params.json" in names:
        return f"Its params.json is Mistral's own form, which is not read: give the folder with the config.json, {csv}"
    if any(name.endswith(".gguf") for name in names):
        return f"It holds GGUF files, which are not read: give the folder of the model they were made from, {csv}"
    if "adapter_config.json" in names:
        return f"It holds an adapter: give the folder of the model that the adapter is for, {csv}"
    if "model_index.json" in names:
        return f"It is a pipeline of several models: give the folder of one of them, {csv}"
    return f"Give the folder of a Hugging Face model, {csv}"


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
        for dtype in (part.get("dtype"), part.get("torch_dtype")):
            if dtype and dtype != "auto":
                return str(dtype).removeprefix("torch.")
    return ""


def architecture(config: Mapping[str, Any]) -> str:
    """The known type that this model has.

    Raises ProblemError for a model of no known type, with what its config says about itself.
    """
    text = _text(config)
    whole = str(config.get("model_type") or text.get("model_type") or "")
    if described(whole):
        return whole
    # an unknown whole may have other parts beside its text, even if the text's type is known
    kinds = [str(part.get("model_type") or "") for part in (text, config)] if _known(whole) else []
    for kind in filter(_known, kinds):
        return ALIASES.get(kind, kind)
    said = [str(part.get("model_type")) for part in (config, text) if part.get("model_type")]
    classes = config.get("architectures") or text.get("architectures")
    what = f"model_type is {' and inside '.join(map(repr, dict.fromkeys(said)))}" if said else "it says no model_type"
    more = f" (architectures {', '.join(map(str, classes))})" if isinstance(classes, list) and classes else ""
    raise unknown(f"{what}{more}", said[0] if said else "")


def _known(kind: str) -> bool:
    return described(kind) or ALIASES.get(kind, kind) in MODELS


def known() -> list[str]:
    """The model types that are described here."""
    return sorted({*MODELS, *sections()})


def unknown(what: str, kind: str = "") -> ProblemError:
    """The error for a model, or a part of one, of an unknown type. kind: its model_type."""
    close = get_close_matches(kind, known(), 3)
    near = f" (close are {', '.join(close)})" if close else ""
    return ProblemError(
        f"{what}: not among the {len(known())} that are described here{near}. Use "
        "--from-transformers to read its layers from transformers, or name its shapes in a CSV"
    )


def plan(config: Mapping[str, Any], *, tp: int = 1, fused: bool = True, ep: int = 1) -> Plan:
    """The products that one of `tp` ranks runs, and what else is to be known of the model.

    fused=False: every linear layer by itself, as transformers builds it; tp must be 1.  ep: over how many ranks a
    mixture's experts are spread, whole; the others of the tp ranks share an expert.  Raises ProblemError when the
    model is not known or cannot be split over that many ranks.
    """
    try:
        return _plan(config, tp=tp, fused=fused, ep=ep)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as err:
        what = f"{type(err).__name__}: {err}"
        raise ProblemError(f"config.json: a value is of a kind that no such model has ({what})") from err


def _plan(config: Mapping[str, Any], *, tp: int, fused: bool, ep: int) -> Plan:
    kind = architecture(config)
    if not fused and (tp != 1 or ep != 1):
        raise ProblemError("unfused products are those of transformers on one device: --tp must be 1")
    if config.get("add_cross_attention"):
        raise unknown(f"a {kind} with attention to an encoder (add_cross_attention)")
    task, notes = task_of(config)
    if task == "lm" and not config.get("architectures") and Reader({}, str(config.get("model_type"))).headless:
        task = "base"
    if described(kind):
        inner = config.get("model_type") != kind and _text(config) is not config
        text = Reader(_text(config) if inner else config, kind)
        weights = _of_lines(text, task, notes)
        r = next((inner for name in TEXTS if (inner := text.inner(name)) is not None), text)
    else:
        r = Reader(_text(config), kind, nested=_text(config) is not config)
        weights = _headed(MODELS[kind](r), task, r, config)
        notes += _left_out(r)
        tower = config.get("vision_config") or config.get("vision_encoder") or _text(config).get("vision_config")
        if tower:
            notes.append("its vision tower is not described here: --from-transformers reads it")
    if fused:  # transformers builds no heads that guess ahead
        weights += ahead(r, weights)
    rules = rules_of(config, config.get(_BESIDE_KEY), name=str(config.get(_NAME_KEY, "")))
    rules, beside = with_files(rules, str(config.get(FOLDER_KEY, "")), dtype_of(config))
    weights = applied(weights, rules)
    found = Plan(kind, dtype_of(config), weights, [*notes, *(rules.notes if rules else []), *beside])
    if fused:
        found.weights = served(weights, r, tp=tp, ep=ep)
    if r.values.get("attn_res_block_size"):
        found.notes.append("the projections of its attention residuals (attn_res_block_size) are not described here")
    return found


def served(weights: Sequence[Weight], r: Reader, *, tp: int, ep: int) -> list[Weight]:
    """The products that one rank runs: its share of each weight, with products of one input joined."""
    return fuse(split(weights, tp=tp, ep=ep), r, tp)


def split(weights: Sequence[Weight], *, tp: int, ep: int = 1) -> list[Weight]:
    """One rank's share of each weight. Raises ProblemError where it cannot be split over that many ranks."""
    inside = max(tp // ep, 1)  # ranks that share an expert
    return [_spread(_cut(w, inside if w.experts else tp), ep) for w in weights]


def _of_lines(r: Reader, task: str, notes: list[str], part: str = "") -> list[Weight]:
    """The weights of a type that architectures/ describes, and of the configs inside it."""
    if not described(r.kind):
        if r.kind not in MODELS:
            raise unknown(f"its {part or 'text'} part's model_type is {r.kind!r}", r.kind)
        found = _headed(MODELS[r.kind](r), task, r, r.values)
        return [replace(w, part=part) for w in found] if part else found
    inside = sections()[r.kind].inside
    seen = next((inner_part for _, inner_part in inside if inner_part), "")
    found = [replace(w, part=part or seen) for w in _headed(make(r, task=task), task, r, r.values)]
    notes += _left_out(r)
    for name, inner_part in inside:
        inner = r.inner(name)
        if inner is not None:
            found += _of_lines(inner, "base" if inner_part else task, notes, inner_part or part)
    return [replace(w, part=w.part or part) for w in found]


def _left_out(r: Reader) -> list[str]:
    """A line about the sizes that a model's config.json does not have, and that transformers fills in."""
    if r.nested:
        return []
    missing = [f"{name} {value}" if isinstance(value, int) else name for name, value in r.taken.items()
            if not isinstance(value, bool | list) and value != 1]  # fmt: skip
    return [f"config.json leaves out {', '.join(missing)}: as transformers takes a {r.kind}'s"] if missing else []


def task_of(config: Mapping[str, Any]) -> tuple[str, list[str]]:
    """What the model is for, by the class in its config: lm, base (no head) or classify; and a line about it."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if re.search(r"For(SequenceClassification|SequenceClassificationWithoutHead)$", name):
        return "classify", []
    if name.endswith("Model") and not name.endswith(("LMHeadModel", "LMModel", "ForCausalLMModel")):
        return "base", []
    if "For" not in name or re.search(r"For(CausalLM|ConditionalGeneration|MaskedLM|PreTraining|Vision2Seq)", name):
        return "lm", []
    return "base", [f"the head of a {name} is not described here: --from-transformers reads it"]


def _headed(weights: list[Weight], task: str, r: Reader, config: Mapping[str, Any]) -> list[Weight]:
    """The weights with the head of the model's class: the vocabulary's, a classifier's or none."""
    if task == "lm":
        return weights
    found = [w for w in weights if w.name != "lm_head"]
    if task == "classify" and len(found) < len(weights):
        labels = config.get("id2label")
        n = len(labels) if isinstance(labels, Mapping) and labels else r.size("num_labels", default=2)
        found.append(Weight("score", n, r.hidden, 1, f"{n} classes"))
    return found


def problems(
    weights: Iterable[Weight], ms: Sequence[int], *, dtype: str, threads: int, vision_ms: Sequence[int] = ()
) -> list[Problem]:
    """One problem for each of these M and each weight that is not left out; repeated shapes once.

    vision_ms: the M of towers, whose rows are patches of images or frames of sound instead of tokens.
    """
    found: dict[Problem, None] = {}
    for weight in weights:
        if weight.left_out:
            continue
        family = "dense" if weight.batch == 1 else "batched"
        for m in vision_ms if weight.sees else ms:
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
    if w.repeated:
        few = tp > w.units and tp % w.units == 0
        if (not few and w.units % tp) or (w.n - w.repeated) % tp:
            raise ProblemError(f"--tp {tp} does not divide the {w.units} heads of {w.name}")
        own = w.repeated // (w.units if few else tp)
        return replace(w, n=(w.n - w.repeated) // tp + own, units=max(w.units // tp, 1), repeated=own, why=over)
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


def fuse(weights: list[Weight], r: Reader, tp: int) -> list[Weight]:
    """Join products of one input, and give MLA's kv_b also as decode runs it: absorbed, one product per head.

    Only weights of the same layers and the same quantisation are joined.
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
    """A weight whose groups each see their own part of the input runs as one product per group."""
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
