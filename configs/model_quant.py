"""How the weights of a quantised checkpoint are kept, layer by layer, by the rules of who published it.

`config.json` (quantization_config, compression_config) and `hf_quant_config.json` say a method, what it is left out of
and sometimes what each layer has.  Each method has its own way to say it: fp8 and MXFP4 lists name modules, wholly or
by their end; compressed-tensors names them, or as `re:` expressions; ModelOpt's are shell patterns, with a list of
layers where they differ.  An entry that nothing in the model answers to, and a method we do not know, are told: what is
not understood is never taken for a plain weight.

Sources: transformers' quantizers and should_convert_module, vLLM's is_layer_skipped and ModelOpt's is_layer_excluded,
and the published configurations in the tests.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import translate
from typing import Any, Final

from gemmtuned.configs.model_parts import Weight

UNKNOWN: Final = ("?", "")
Kept = tuple[str, str]  # dtype and scale, ("", "") for the model's own dtype
PLAIN: Final[Kept] = ("", "")
# What no method quantises, whether its list says so or not
_NEVER: Final = re.compile(
    r"(^|\.)(lm_head|lm_head\.\w+|score|proj_out|output_projection|mlp\.(gate|router)|feed_forward\.(gate|router)|"
    r"block_sparse_moe\.router|router\.gate|gate\.wg|mixer\.gate|router\.proj|shared_expert_gate|"
    r"eh_proj|indexer\.weights_proj|scorer\.weights_proj|hc_head\.hc_fn|(attn|ffn)_hc\.fn)$"
)
# Entries that name no linear layer: norms, embeddings, tables, convolutions, parts of a module
_NO_LINEAR: Final = re.compile(
    r"norm|embed|rotary|conv1d|bias|sinks|A_log|dt_|\.D$|pos_emb|scale|input_quantizer|lambda|patch_embed"
)
# The publisher's word for a part, and transformers'
_SPELLINGS: Final = (
    ("block_sparse_moe", "mlp"), ("feed_forward", "mlp"), ("ffn", "mlp"), ("attn", "self_attn"), ("mixer", "mlp"),
    ("indexers_proj", "indexer.weights_proj"), ("indexer_proj", "indexer.weights_proj"),
)  # fmt: skip
_TOWER: Final = re.compile(r"vis(ion|ual)|mm_projector|multi_modal|audio")
_PREFIXES: Final = (
    "model.", "model.language_model.", "language_model.model.", "language_model.", "backbone.", "transformer.", "",
)  # fmt: skip
_VISION: Final = ("visual.", "vision_tower.", "vision_model.", "model.visual.", "model.vision_tower.", "embed_vision.",
                  "model.embed_vision.", "model.vision_model.", "mm_projector.", "multi_modal_projector.")  # fmt: skip


@dataclass(slots=True)
class Rules:
    """What a checkpoint says of its weights.

    kept: of all linear layers that nothing else is said of.  plain: patterns of those that stay as they are, in the
    method's own way.  some: patterns of layers kept in another way.  experts_only: the method is for mixtures alone.
    """

    method: str
    kept: Kept = UNKNOWN
    plain: tuple[str, ...] = ()
    some: tuple[tuple[str, Kept], ...] = ()
    experts: Kept | None = None
    experts_only: bool = False
    notes: list[str] = field(default_factory=list)


# What a folder's name says where its files do not
_NAMED: Final = re.compile(
    r"(?i)(?<![a-z0-9])(nvfp4|mxfp[468]|fp[48]|int[48]|awq|gptq|[wa]\d{1,2}a\d{1,2}|bnb)(?![a-z0-9])"
)


def rules_of(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None, *, name: str = "") -> Rules | None:
    """The rules of a config.json, and of the hf_quant_config.json beside it; None for a model that is not quantised.

    name: of its folder.  Where that speaks of a quantisation and the files do not, the file that tells is missing.
    """
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else {}
    names = ("quantization_config", "compression_config")
    told = next((part[name] for part in (config, inner) for name in names if isinstance(part.get(name), Mapping)), None)
    odd = next((part[name] for part in (config, inner) for name in names if part.get(name)), None)
    if told is None and odd is not None:
        return Rules(
            "", notes=[f"quantization_config is {odd!r:.60} and no object, so how weights are kept is not known"]
        )
    more = (beside or {}).get("quantization", beside)
    if told is None and not isinstance(more, Mapping):
        said = _NAMED.search(name)
        if said is None:
            return None
        why = (
            f"the model's name says {said[0]}, and neither config.json nor hf_quant_config.json tells which layers are"
        )
        return Rules("", notes=[f"{why}: none is planned"])
    both: dict[str, Any] = {**(more if isinstance(more, Mapping) else {}), **(told or {})}
    if isinstance(more, Mapping) and told is not None and more.get("quant_algo") != both.get("quant_algo"):
        both["hf"] = more
    try:
        rules = _read(both)
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        return Rules("", notes=[f"quantization_config is not understood ({err}): no weight is planned"])
    expert = str(config.get("expert_dtype") or inner.get("expert_dtype") or "")
    if expert:  # DeepSeek-V4: the experts are of another dtype than quantization_config says
        known = {"fp4": ("fp4_e2m1", "1x32"), "fp8": rules.kept}.get(expert)
        rules.experts = known or UNKNOWN
        if known is None:
            rules.notes.append(f"expert_dtype {expert!r} is not known")
    return rules


def _read(told: Mapping[str, Any]) -> Rules:
    method = str(told.get("quant_method") or ("modelopt" if "quant_algo" in told else ""))
    listed = [told.get(name) for name in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules",
                                          "llm_int8_skip_modules", "exclude", "modules_to_not_quantize")]  # fmt: skip
    rules = Rules(method, plain=tuple(str(one) for some in listed if isinstance(some, list) for one in some))
    algo = str(told.get("quant_algo") or "")
    if isinstance(told.get("quantized_layers"), Mapping):  # ModelOpt: each layer by itself
        layers = {str(name): one for name, one in told["quantized_layers"].items()}
        rules.some = tuple((name, _algo(str(one.get("quant_algo", "")))) for name, one in layers.items())
        rules.kept = PLAIN if algo == "MIXED_PRECISION" and method == "modelopt" else _fp8(told)
        if method == "fp8":  # beside it the method of the whole: what ModelOpt leaves alone is fp8 still
            rules.plain = tuple(one for one in rules.plain if one in ("head", "lm_head"))
    elif method == "modelopt" or method.startswith("modelopt"):
        rules.kept = _algo(algo)
    elif method in ("fp8", "fbgemm_fp8", "finegrained_fp8"):
        rules.kept = _fp8(told)
    elif method == "compressed-tensors":
        rules.kept, rules.some = _groups(told)
    elif method == "mxfp4":
        rules.kept, rules.experts_only = ("fp4_e2m1", "1x32"), True
    elif method in ("gptq", "awq", "auto-round", "gptq_marlin"):
        bits = told.get("bits", told.get("w_bit"))
        rules.kept = {4: ("i4", "group"), 8: ("i8", "group")}.get(bits, UNKNOWN)
        single = told.get("dynamic")  # GPTQModel's: `-:expression` leaves modules alone, `+:` has bits of their own
        for pattern, own in single.items() if isinstance(single, Mapping) else ():
            if str(pattern).startswith("-:"):
                rules.plain += (f"re:{pattern[2:]}",)
            else:
                kept = {4: ("i4", "group"), 8: ("i8", "group")}.get(dict(own).get("bits", bits), UNKNOWN)
                rules.some += ((f"re:{str(pattern).removeprefix('+:')}", kept),)
    elif method == "bitsandbytes":
        rules.kept = (
            ("i8", "row") if told.get("load_in_8bit") else ("nf4", "group") if told.get("load_in_4bit") else UNKNOWN
        )
    if rules.kept == UNKNOWN:
        rules.notes.append(
            f"how quant_method {method or '(none)'!r} {algo} keeps weights is not known: they are not planned"
        )
    return rules


def _fp8(told: Mapping[str, Any]) -> Kept:
    block = told.get("weight_block_size")
    if block is None:
        return ("fp8_e4m3", "row" if told.get("quant_method") == "fbgemm_fp8" else "tensor")
    if not isinstance(block, list):
        return UNKNOWN
    return "fp8_e4m3", "1x128" if block == [128, 128] else "block"


def _algo(name: str) -> Kept:
    """ModelOpt's names."""
    known = {
        "FP8": ("fp8_e4m3", "tensor"), "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_e4m3", "row"),
        "FP8_PB_WO": ("fp8_e4m3", "1x128"),
        "FP8_BLOCK_SCALES": ("fp8_e4m3", "1x128"), "NVFP4": ("fp4_e2m1", "1x16"), "W4A16_NVFP4": ("fp4_e2m1", "1x16"),
        "NVFP4_AWQ": ("fp4_e2m1", "1x16"), "MXFP4": ("fp4_e2m1", "1x32"), "MXFP8": ("fp8_e4m3", "1x32"),
        "W8A16": ("i8", "row"), "W4A16": ("i4", "group"), "W4A16_AWQ": ("i4", "group"), "W4A8_AWQ": ("i4", "group"),
        "W8A8_SQ_PER_CHANNEL": ("i8", "row"), "INT8": ("i8", "row"), "NONE": PLAIN, "": UNKNOWN,
    }  # fmt: skip
    return known.get(name.upper(), UNKNOWN)


def _groups(told: Mapping[str, Any]) -> tuple[Kept, tuple[tuple[str, Kept], ...]]:
    """compressed-tensors: groups of targets, by class (all linears) or by name."""
    groups = told.get("config_groups")
    every, some = PLAIN, []
    if not isinstance(groups, Mapping) or not groups:
        return UNKNOWN, ()
    for group in groups.values():
        kept = _weights(
            group.get("weights") if isinstance(group, Mapping) else None, group.get("format", told.get("format"))
        )
        for target in group.get("targets") or ["Linear"]:
            if target == "Linear":
                every = kept
            else:
                some.append((str(target), kept))
    return every, tuple(some)


def _weights(told: object, form: object) -> Kept:
    if told is None:
        return PLAIN
    if not isinstance(told, Mapping):
        return UNKNOWN
    bits, kind, size = told.get("num_bits"), told.get("type"), told.get("group_size")
    strategy = str(told.get("strategy") or ("group" if size else "tensor"))
    scale = {"tensor": "tensor", "channel": "row", "token": "row", "group": "group", "tensor_group": "group"}.get(
        strategy, ""
    )
    if strategy == "block":
        scale = "1x128" if told.get("block_structure") in ([128, 128], "128x128") else "block"
    if not scale:
        return UNKNOWN
    if (bits, kind) == (8, "float"):
        return "fp8_e4m3", "1x32" if size == 32 else scale
    if (bits, kind) == (4, "float"):
        return "fp4_e2m1", "1x32" if size == 32 or str(form).startswith("mxfp4") else "1x16"
    return {(8, "int"): ("i8", scale), (4, "int"): ("i4", scale)}.get((bits, kind), UNKNOWN)  # type: ignore[arg-type]


def applied(weights: Sequence[Weight], rules: Rules | None) -> list[Weight]:
    """The weights with the dtype they are kept in: one whose layers differ becomes several."""
    if rules is None:
        return [*weights]
    match = _Matcher(rules)
    found: list[Weight] = []
    for weight in weights:
        if weight.dtype:
            found.append(weight)
            continue
        by_kept: dict[Kept, list[int]] = {}
        for layer in weight.at or (-1,):
            by_kept.setdefault(match.kept(weight, layer), []).append(layer)
        for (dtype, scale), at in by_kept.items():
            one = replace(weight, dtype=dtype, scale=scale)
            found.append(replace(one, count=len(at), at=tuple(at)) if weight.at else one)
    rules.notes += match.unanswered(weights)
    return found


class _Matcher:
    """Patterns of one checkpoint against the names that a weight may have there."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._plain = _Patterns(rules.plain)
        self._some = _Patterns([pattern for pattern, _ in rules.some])
        self._kept = dict(rules.some)

    def kept(self, weight: Weight, layer: int) -> Kept:
        """How this weight is kept in this layer."""
        rules = self._rules
        names = _names(weight, layer)
        for pattern in self._some.answering(names, layer):
            return self._kept[pattern]
        if rules.kept == UNKNOWN and not rules.plain:
            return UNKNOWN
        never = _NEVER.search(weight.name) or (rules.experts_only and not weight.experts)
        if self._plain.answering(names, layer) or never:
            return PLAIN
        return rules.experts if weight.experts and rules.experts is not None else rules.kept

    def unanswered(self, weights: Sequence[Weight]) -> list[str]:
        """A line for each kind of entry that names nothing in this model."""
        last = max((layer for w in weights for layer in w.at), default=-1)
        tower = any(w.part == "vision" for w in weights)
        odd: Counter[str] = Counter()
        for pattern in (*self._rules.plain, *self._kept):
            number = re.search(r"layers\.(\d+)", pattern)
            ahead = (number is not None and int(number[1]) > last) or re.match(r"(model\.)?mtp", pattern)
            unseen = not tower and _TOWER.search(pattern)  # the tower as a whole is told not to be described
            hit = pattern in self._plain.hit or pattern in self._some.hit
            if not hit and not _NO_LINEAR.search(pattern) and not ahead and not unseen:
                odd[re.sub(r"\d+", "#", pattern)] += 1
        some = "the quantisation's entry {!r} names nothing in this model ({} of them)"
        return [some.format(pattern, number) for pattern, number in odd.items()]


class _Patterns:
    """Entries of one list.  hit: those that some module answered to."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.hit: set[str] = set()
        self._exact: set[str] = set()
        self._shaped: dict[int, list[tuple[str, re.Pattern[str]]]] = {}  # by layer, -1 those of any
        for pattern in patterns:
            if not pattern.startswith("re:") and not any(letter in pattern for letter in "*?["):
                self._exact.add(pattern)
                continue
            number = re.search(r"layers\.(\d+)\.", pattern)  # not of `layers.1*`, which is of 10 as well
            layer = int(number[1]) if number and not pattern.startswith("re:") else -1
            with suppress(re.error):
                inside = pattern[3:] if pattern.startswith("re:") else f"{translate(pattern)[:-2]}(\\..*)?\\Z"
                self._shaped.setdefault(layer, []).append((pattern, re.compile(inside)))

    def answering(self, names: Sequence[str], layer: int) -> list[str]:
        """The entries that mean a module with one of these names: wholly, from a dot on, up to a dot, or by a shape."""
        found = []
        if self._exact:
            found += [part for name in names for part in _parts(name) if part in self._exact]
        for pattern, shape in (*self._shaped.get(-1, ()), *(self._shaped.get(layer, ()) if layer >= 0 else ())):
            if any(shape.match(name) for name in names):
                found.append(pattern)
        self.hit.update(found)
        return found


def _parts(name: str) -> Iterator[str]:
    """The name, what it begins with up to each dot, and what it ends with from each dot on."""
    yield name
    at = name.find(".")
    while at >= 0:
        yield name[:at]
        yield name[at + 1 :]
        at = name.find(".", at + 1)


def _names(weight: Weight, layer: int) -> list[str]:
    """Every name that a checkpoint may have for this weight in this layer."""
    inside = [weight.name]
    if weight.experts:
        group, _, last = weight.name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"), "up_proj": ("up_proj", "w1")}.get(
            last, (last, "w2")
        )
        inside += [group, *(f"{group}.0.{part}" for part in parts)]
    inside += [name for name in [*inside] for name in _respelled(name)]
    if weight.part in ("vision", "audio"):
        return [f"{prefix}{name}" for prefix in _VISION for name in inside]
    if weight.part == "mtp":
        inside = [name.removeprefix("mtp.") for name in inside]
        return [
            *(f"{prefix}layers.{layer}.{name}" for prefix in _PREFIXES for name in inside),
            *(f"mtp.{name}" for name in inside),
            *(f"mtp.layers.0.{name}" for name in inside),
        ]
    if layer < 0:
        extra = ["head"] if weight.name == "lm_head" else []
        return [f"{prefix}{name}" for prefix in _PREFIXES for name in [*inside, *extra]]
    return [f"{prefix}layers.{layer}.{name}" for prefix in _PREFIXES for name in inside]


def _respelled(name: str) -> Iterable[str]:
    for theirs, ours in _SPELLINGS:
        parts = f".{name}."
        if f".{ours}." in parts:
            yield parts.replace(f".{ours}.", f".{theirs}.")[1:-1]
