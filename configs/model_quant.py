"""How the weights of a quantised checkpoint are kept, layer by layer, by the rules of who published it.

`config.json` (quantization_config, compression_config) and `hf_quant_config.json` say a method, what it is left out of
and sometimes what each layer has.  Each method has its own way to say it: fp8 and MXFP4 lists name modules, wholly or
by their end; compressed-tensors names them, or as `re:` expressions; ModelOpt's are shell patterns, with a list of
layers where they differ.  An entry that nothing in the model answers to, or a method we do not know, is named: what is
not understood is never taken for a plain weight.

Sources: transformers' quantizers and should_convert_module, vLLM's is_layer_skipped and ModelOpt's is_layer_excluded,
and the published configurations in the tests.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import translate
from typing import Any, Final

from gemmtuned.configs.model_methods import read
from gemmtuned.configs.model_parts import Weight
from gemmtuned.configs.model_reader import TEXTS
from gemmtuned.configs.model_rules import PLAIN, UNKNOWN, Kept, Rules

# What hardly a method quantises, whether its list says so or not
_HEAD: Final = re.compile(r"(^|\.)(lm_head|lm_head\.\w+|score|proj_out|output_projection)$")
_ROUTER: Final = re.compile(
    r"(^|\.)(mlp\.(gate|router)|feed_forward\.(gate|router)|"
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


# What a folder's name says where its files do not
_NAMED: Final = re.compile(
    r"(?i)(?<![a-z0-9])(nvfp4|mxfp[468]|fp[48]|int[48]|awq|gptq|[wa]\d{1,2}a\d{1,2}|bnb|[2-8]-?bit|exl[23]|hqq|aqlm|"
    r"quantized|autoround)(?![a-z0-9])"
)


# Where a config says it: transformers' name, an older one, MLX's and AutoAWQ's
_KEYS: Final = ("quantization_config", "compression_config", "quantization", "quant_config")


# DeepSeek's routers and those after them, which these values are for, are no linear layer but a module of their own
_OWN_GATE: Final = ("topk_method", "routed_scaling_factor", "n_group")


def rules_of(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None, *, name: str = "") -> Rules | None:
    """The rules of a config.json, and of the file beside it that speaks of them; None for a model not quantised.

    beside: hf_quant_config.json, or the quantiser's own (BESIDE).  name: of its folder.  Where that speaks of a
    quantisation and the files do not, the file that tells is missing.
    """
    inner = next((part for one in TEXTS if isinstance(part := config.get(one), Mapping)), {})
    said = [(part, part[key]) for part in (config, inner) for key in _KEYS if part.get(key)]
    where, embedded = next(((part, one) for part, one in said if isinstance(one, Mapping)), (config, None))
    if embedded is None and said:
        odd = said[0][1]
        return Rules(
            "", notes=[f"quantization_config is {odd!r:.60} and no object, so how weights are kept is not known"]
        )
    more = (beside or {}).get("quantization", beside)
    more = more if isinstance(more, Mapping) else None
    if embedded is None and more is None:
        named = _NAMED.search(name)
        if named is None:
            return None
        why = (
            f"the model's name says {named[0]}, and neither config.json nor hf_quant_config.json tells which layers are"
        )
        return Rules("", notes=[f"{why}: none is planned"])
    if embedded is not None and more is not None and (against := _against(embedded, more)):
        return Rules("", notes=[f"{against}: which of the two holds is not known, so no weight is planned"])
    try:
        rules = read({**(more or {}), **(embedded or {})})
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        return Rules("", notes=[f"quantization_config is not understood ({err}): no weight is planned"])
    rules.text_only = where is not config
    if any(key in part for part in (config, inner) for key in _OWN_GATE):
        rules.routers = PLAIN
    if rules.head != PLAIN and any(part.get("tie_word_embeddings") for part in (config, inner)):
        rules.head = UNKNOWN  # the embeddings' weight, which is no linear layer's
    expert = str(config.get("expert_dtype") or inner.get("expert_dtype") or "")
    if expert:  # DeepSeek-V4: the experts are of another dtype than quantization_config says
        known = {"fp4": ("fp4_e2m1", "1x32"), "fp8": rules.kept}.get(expert)
        rules.experts = known or UNKNOWN
        if known is None:
            rules.notes.append(f"expert_dtype {expert!r} is not known")
    return rules


def _against(embedded: Mapping[str, Any], more: Mapping[str, Any]) -> str:
    """What config.json and the file beside it say that cannot both be; "" where they agree."""
    theirs = str(more.get("quant_algo") or "").upper()
    ours = str(embedded.get("quant_algo") or ("FP8" if "fp8" in str(embedded.get("quant_method")) else "")).upper()
    if not theirs or not ours or "MIXED_PRECISION" in (ours, theirs) or more.get("quantized_layers"):
        return ""
    same = theirs == ours or (theirs.startswith("FP8") and ours == "FP8")
    return "" if same else f"config.json says {ours} and hf_quant_config.json {theirs}"


def applied(weights: Sequence[Weight], rules: Rules | None) -> list[Weight]:
    """The weights with the dtype they are kept in: one whose layers differ becomes several."""
    if rules is None:
        return [*weights]
    match = _Matcher(rules)
    ways = [[(match.kept(w, layer), layer) for layer in w.at or (-1,)] if not w.dtype else [] for w in weights]
    odd = match.unanswered(weights)
    found: list[Weight] = []
    for weight, layers in zip(weights, ways, strict=True):
        by_kept: dict[Kept, list[int]] = {}
        for (kept, listed), layer in layers:
            unsure = kept == PLAIN and not listed and match.may_be_meant(weight)
            by_kept.setdefault(UNKNOWN if unsure else kept, []).append(layer)
        for (dtype, scale), at in by_kept.items():
            one = replace(weight, dtype=dtype, scale=scale)
            found.append(replace(one, count=len(at), at=tuple(at)) if weight.at else one)
        if not layers:
            found.append(weight)
    rules.notes += odd
    return found


class _Matcher:
    """Patterns of one checkpoint against the names that a weight may have there."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._plain = _Patterns(rules.plain, rules.way)
        self._some = _Patterns([pattern for pattern, _ in rules.some], "")
        self._kept = dict(rules.some)
        self._lost: list[str] = []  # patterns of quantised layers that no weight answered to

    def kept(self, weight: Weight, layer: int) -> tuple[Kept, bool]:
        """How this weight is kept in this layer, and whether something names it."""
        rules = self._rules
        names = _names(weight, layer)
        if rules.plain_first and self._plain.answering(names, layer):
            return PLAIN, True
        for pattern in self._some.answering(names, layer):
            return self._kept[pattern], True
        if rules.text_only and weight.sees:
            return PLAIN, True
        if rules.kept == UNKNOWN and not rules.plain:
            return UNKNOWN, False
        if self._plain.answering(names, layer) or (rules.experts_only and not weight.experts):
            return PLAIN, True
        if rules.way == "part" and any(part in name for part in rules.plain for name in names):
            return UNKNOWN, True  # AutoAWQ leaves out what has it anywhere in its name, engines what is named so
        if _HEAD.search(weight.name) and not weight.sees:
            return rules.head, rules.kept != PLAIN
        if _ROUTER.search(weight.name):
            return rules.routers, rules.kept != PLAIN
        if rules.within and not any(part in name for part in rules.within for name in names):
            return PLAIN, True
        return (rules.experts if weight.experts and rules.experts is not None else rules.kept), False

    def may_be_meant(self, weight: Weight) -> bool:
        """Whether a quantised layer that nothing answered to may be this one, which would then be no plain weight."""
        last = weight.name.rpartition(".")[2]
        exact = re.compile(r"[\w.]+\.\w+")
        return any(not exact.fullmatch(one) or one.rpartition(".")[2] == last for one in self._lost)

    def unanswered(self, weights: Sequence[Weight]) -> list[str]:
        """A line for each kind of entry that names nothing in this model."""
        last = max((layer for w in weights for layer in w.at), default=-1)
        tower = any(w.part == "vision" for w in weights)
        odd: Counter[str] = Counter()
        for pattern in (*self._rules.plain, *self._kept):
            number = re.search(r"layers\.(\d+)", pattern)
            ahead = (number is not None and int(number[1]) > last) or re.match(r"(model\.)?mtp", pattern)
            unseen = not tower and _TOWER.search(pattern)  # the tower as a whole is named as not described
            hit = pattern in self._plain.hit or pattern in self._some.hit
            if not hit and not _NO_LINEAR.search(pattern) and not ahead and not unseen:
                odd[re.sub(r"\d+", "#", pattern)] += 1
                if pattern in self._kept and self._kept[pattern] != PLAIN:
                    self._lost.append(pattern)
        some = "the quantisation's entry {!r} names nothing in this model ({} of them)"
        return [some.format(pattern, number) for pattern, number in odd.items()]


class _Patterns:
    """Entries of one list.  hit: those that some module answered to.  way: as in Rules."""

    def __init__(self, patterns: Iterable[str], way: str) -> None:
        self.hit: set[str] = set()
        self._ends: list[str] = []  # transformers takes a word for the end of a name, from a dot on or not
        self._exact: set[str] = set()
        self._first: set[str] = set()  # words with which an exact entry begins, and with which it ends
        self._last: set[str] = set()
        self._shaped: dict[int, list[tuple[str, re.Pattern[str]]]] = {}  # by layer, -1 those of any
        for pattern in patterns:
            if way == "expression" and "." not in pattern and pattern.replace("_", "").isalnum():
                self._ends.append(pattern)
            if not pattern.startswith("re:") and not any(letter in pattern for letter in "*?[(|\\"):
                self._exact.add(pattern)
                self._first.add(pattern.partition(".")[0])
                self._last.add(pattern.rpartition(".")[2])
                continue
            number = re.search(r"layers\.(\d+)\.", pattern)  # not of `layers.1*`, which is of 10 as well
            layer = int(number[1]) if number and not pattern.startswith("re:") else -1
            with suppress(re.error):
                inside = pattern[3:] if pattern.startswith("re:") else f"{translate(pattern)[:-2]}(\\..*)?\\Z"
                if way == "expression" and not pattern.startswith("re:"):  # both readings, in transformers' bounds
                    with suppress(re.error):
                        re.compile(pattern)
                        inside = f"{inside}|(?:{pattern})(?:(?<=\\.)|(?=\\.|$))"
                self._shaped.setdefault(layer, []).append((pattern, re.compile(inside)))

    def answering(self, names: Sequence[str], layer: int) -> list[str]:
        """The entries that mean a module with one of these names: wholly, from a dot on, up to a dot, or by a shape."""
        found = []
        if self._exact:
            near = (n for n in names if n.partition(".")[0] in self._first or n.rpartition(".")[2] in self._last)
            found += [part for name in near for part in _parts(name) if part in self._exact]
        found += [word for word in self._ends if any(name.endswith(word) for name in names)]
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
        if weight.name == "lm_head":  # it stands beside the model
            return [f"{prefix}{name}" for prefix in ("", "language_model.") for name in ("lm_head", "head")]
        return [f"{prefix}{name}" for prefix in _PREFIXES for name in inside]
    return [f"{prefix}layers.{layer}.{name}" for prefix in _PREFIXES for name in inside]


def _respelled(name: str) -> Iterable[str]:
    for theirs, ours in _SPELLINGS:
        parts = f".{name}."
        if f".{ours}." in parts:
            yield parts.replace(f".{ours}.", f".{theirs}.")[1:-1]
