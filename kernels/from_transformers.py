"""The linear layers of a model that we have no description of, as transformers builds them: without weights, in memory.

The model is made on torch's meta device from its config.json; code that comes with a model is never run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.model_files import with_files
from gemmtuned.configs.model_parts import Weight
from gemmtuned.configs.model_quant import applied, rules_of
from gemmtuned.configs.model_shapes import FOLDER_KEY, Plan, dtype_of, split

# `model.layers.7.mlp.up_proj` is `mlp.up_proj` of layer 7; what stands before tells towers and decoders apart
_LAYER = re.compile(r"^(?P<before>.*?)\b(?P<list>[A-Za-z_]+)\.(?P<number>\d+)\.(?P<name>.+)$")
_PLAIN = re.compile(r"^(model\.)?(language_model\.)?(model\.)?(transformer\.|backbone\.|decoder\.)?$")
_PARTS = (("audio", re.compile(r"audio|speech|sound|whisper")), ("vision", re.compile(r"vis(ion|ual)|image|img|patch")))


def built(config: Mapping[str, Any], *, tp: int = 1, ep: int = 1) -> Plan:
    """Every linear layer, unfused; one rank's share of each where there are several.

    Raises ProblemError where transformers cannot build the model, or it cannot be split over that many ranks.
    """
    try:
        import torch
        import transformers
    except ImportError as err:
        raise ProblemError(f"--from-transformers needs transformers ({err}): pip install transformers") from err
    kind = str(config.get("model_type") or "")
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if kind not in mapping:
        raise ProblemError(
            f"transformers {transformers.__version__} has no model_type {kind!r} either. Name its shapes in a CSV"
        )
    try:
        wanted = mapping[kind].from_dict(_plain(config))
        model = _made(transformers, torch, wanted, config.get("architectures"))
    except Exception as err:
        lines = " ".join(str(err).split())
        raise ProblemError(f"transformers cannot build this model ({type(err).__name__}: {lines})") from err
    class_ = type(model).__name__
    weights = _weights(_linears(torch, model), f"{class_} of transformers builds it")
    rules = rules_of(config, config.get("hf_quant_config"), name=str(config.get("folder_name", "")))
    rules, beside = with_files(rules, str(config.get(FOLDER_KEY, "")), dtype_of(config))
    weights = applied(weights, rules)
    where = "one device" if tp == 1 else f"one of {tp} ranks"
    notes = [f"layers of {class_}, as transformers {transformers.__version__} builds them; {where}, nothing fused"]
    if tp > 1:
        weights = split(_parallel(weights, wanted, notes), tp=tp, ep=ep)
    return Plan(kind, dtype_of(config), weights, [*notes, *(rules.notes if rules else []), *beside])


# How a rank's share is cut, by transformers' own word for it and, where its plan is silent, by the weight's name
_STYLES: Final = {
    "colwise": "columns", "colwise_gather_output": "columns", "packed_colwise": "columns", "packed_rowwise": "columns",
    "rowwise": "rows", "rowwise_split_input": "rows", "mla_kv_a_proj": "whole",
}  # fmt: skip
_NAMES: Final = {
    "q_proj": "heads", "k_proj": "kv_heads", "v_proj": "kv_heads", "q_b_proj": "heads", "kv_b_proj": "heads",
    "o_proj": "rows", "out_proj": "rows", "gate_proj": "columns", "up_proj": "columns", "gate_up_proj": "columns",
    "down_proj": "rows", "w1": "columns", "w3": "columns", "w2": "rows", "fc1": "columns", "fc2": "rows",
    "lm_head": "vocab",
}  # fmt: skip
_WHOLE: Final = ("gate", "router", "q_a_proj", "kv_a_proj_with_mqa", "wk", "wq_b", "weights_proj")  # on every rank


def _parallel(weights: list[Weight], config: Any, notes: list[str]) -> list[Weight]:
    """The weights with how tensor parallelism cuts them. notes: gets a line on those that nothing speaks of."""
    text = config.get_text_config()
    plan = text.base_model_tp_plan or {}
    transposed = "packed_rowwise" in plan.values()  # experts that lie the other way round
    heads = getattr(text, "num_attention_heads", None) or 1
    units = {"heads": heads, "kv_heads": getattr(text, "num_key_value_heads", None) or heads}
    found, silent = [], []
    for w in weights:
        last = w.name.rpartition(".")[2]
        style = _NAMES.get(last)
        if style not in units and not (transposed and w.experts):
            style = _STYLES.get(plan.get(f"layers.*.{w.name}", ""), style)
        if w.part or (style in units and w.n % units[str(style)]):
            style = "whole"
        if style is None and last not in _WHOLE:
            silent.append(w.name)
        found.append(replace(w, split=style or "whole", units=units.get(style or "", 1)))
    if silent:
        notes.append(f"nothing says how ranks share {', '.join(silent[:6])}: taken as whole on each")
    return found


def _plain(value: Any) -> Any:
    """The config without what would load or run more than its layers, and with numbers that JSON has no word for."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(str(value["__float__"]))
        left_out = ("quantization_config", "compression_config", "auto_map")
        return {name: _plain(one) for name, one in value.items() if name not in left_out}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _weights(linears: Iterable[tuple[str, int, int, bool, int]], why: str) -> list[Weight]:
    each = [(*one, _LAYER.match(one[0]), _part(one[0])) for one in linears]
    stacks = {inside["before"] for *_, inside, part in each if inside and not part}
    main = stacks.pop() if len(stacks) == 1 else "model."  # one stack of layers: its names need no word before them
    found: dict[tuple[str, int, int, bool, int, str], list[int]] = {}
    for name, n, k, bias, experts, inside, part in each:
        short = inside["name"] if inside else name
        if inside and inside["before"] != main and (part or not _PLAIN.match(inside["before"])):
            short = f"{inside['before']}{inside['list']}.{short}"
        short = re.sub(r"^(model\.)?(language_model\.)?(model\.)?", "", short)
        at = int(inside["number"]) if inside else -1
        found.setdefault((short, n, k, bias, experts, part), []).append(at)
    return [
        Weight(
            name, n, k, len(at), why, bias, experts=experts, part=part, at=() if -1 in at else tuple(at)
        )
        for (name, n, k, bias, experts, part), at in found.items()
    ]  # fmt: skip


def _part(name: str) -> str:
    owner = name.rpartition(".")[0]
    return next((part for part, words in _PARTS if words.search(owner)), "")


def _made(transformers: Any, torch: Any, config: Any, classes: Any = None) -> Any:
    """The model on the meta device: of the class that its config names, else with its head where it has one."""
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    own = getattr(transformers, name, None)
    if isinstance(own, type) and getattr(own, "config_class", None) is type(config):
        with torch.device("meta"):
            return own(config)
    usual = ["AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"]
    if getattr(config, "is_encoder_decoder", False):
        usual = ["AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", *usual]
    for name in (*usual, "AutoModel"):
        class_ = getattr(transformers, name)
        if type(config) in class_._model_mapping:
            with torch.device("meta"):
                return class_.from_config(config)
    if config.get_text_config() is not config:
        raise ValueError("it is made of several models, and there is no class for the whole")
    raise ValueError("no class for it")


def _linears(torch: Any, model: Any) -> Iterator[tuple[str, int, int, bool, int]]:
    """(name, n, k, bias, experts) of linear modules, and of parameters that hold a mixture's experts or a router."""
    done: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            done.add(name)
            yield name, module.out_features, module.in_features, module.bias is not None, 0
        elif type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # GPT-2's: its weight lies transposed
            done.add(name)
            yield name, module.weight.shape[1], module.weight.shape[0], True, 0
        elif isinstance(module, torch.nn.Embedding | torch.nn.modules.conv._ConvNd) or "Norm" in type(module).__name__:
            done.add(name)
    sizes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, shape in sizes.items():
        owner, _, last = name.rpartition(".")
        if owner in done or last.endswith(("bias", "embedding", "table", "scale")) or "pos" in last:
            continue
        if len(shape) == 3 and "expert" in name:
            experts, n, k = shape
            down, first = sizes.get(f"{owner}.down_proj", shape), sizes.get(f"{owner}.gate_up_proj", (0, 0, n))
            transposed = first[2] != n if last == "down_proj" else down[1] != k and down[2] == n  # as gpt-oss's lie
            yield name, *((k, n) if transposed else (n, k)), f"{name}_bias" in sizes, experts
        elif len(shape) == 2 and last in ("weight", "fn", "hc_fn"):
            yield owner if last == "weight" else name, *shape, last == "weight" and f"{owner}.bias" in sizes, 0
        elif len(shape) == 2 and last == "in_proj_weight":
            yield name, *shape, f"{owner}.in_proj_bias" in sizes, 0
        elif len(shape) == 2 and last.endswith("projection_weight"):  # gemma3 multiplies by it from the right
            yield name, shape[1], shape[0], False, 0
