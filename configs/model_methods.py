"""Reads quantisation configs: how each weight is stored, and which weights are not quantised.

Each method spells that in its own way.  A config is the `quantization_config` of a model's config.json.

Sources: transformers' quantizers, vLLM's quantisation configs, compressed-tensors, GPTQModel, AutoAWQ and auto-round.
model_tools.py has the methods of AMD Quark, torchao and HQQ.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from gemmtuned.configs import model_tools
from gemmtuned.configs.model_rules import PLAIN, UNKNOWN, Kept, Rules, head_of

_LISTS: Final = (
    "modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules", "exclude",
    "modules_to_not_quantize",
)  # fmt: skip


def read(config: Mapping[str, Any]) -> Rules:
    """The rules of one quantization_config. Raises AttributeError, KeyError, TypeError or ValueError for an odd one."""
    method = str(config.get("quant_method") or ("modelopt" if "quant_algo" in config else ""))
    rules = Rules(method, plain=tuple(one for name in _LISTS for one in _flat(config.get(name))))
    if isinstance(config.get("quantized_layers"), Mapping):  # ModelOpt: a method for each layer
        _each_layer(rules, config)
    elif method == "modelopt" or method.startswith("modelopt"):
        rules.kept = _algo(str(config.get("quant_algo") or ""))
        if config.get("quant_algo") is None and config.get("kv_cache_quant_algo"):  # only keys and values are quantised
            rules.kept = PLAIN
    elif method in ("fp8", "fbgemm_fp8", "finegrained_fp8"):
        rules.kept, rules.way = _fp8(config), "expression"
        rules.head = head_of(rules)
    elif method == "compressed-tensors":
        rules.kept, rules.some = _groups(config)
        rules.plain_first = True
        rules.head = rules.kept  # the head is a linear layer like others
        rules.routers = PLAIN if rules.kept == PLAIN else UNKNOWN
    elif method == "mxfp4":
        rules.kept, rules.experts_only, rules.way = ("fp4_e2m1", "1x32"), True, "expression"
    elif method in ("gptq", "awq", "auto-round", "auto_round", "intel/auto-round", "gptq_marlin", "awq_marlin"):
        _of_groups(rules, config)
    elif method == "bitsandbytes":
        four = {"nf4": ("nf4", "group"), "fp4": ("bnb_fp4", "group")}
        rules.kept = (
            ("i8", "row") if config.get("load_in_8bit")
            else four.get(str(config.get("bnb_4bit_quant_type") or "fp4"), UNKNOWN) if config.get("load_in_4bit")
            else UNKNOWN
        )  # fmt: skip
        rules.way, rules.head = "expression", head_of(rules)
    elif method in model_tools.READERS:
        model_tools.READERS[method](rules, config)
    if rules.kept == UNKNOWN:
        algo = f" {config['quant_algo']}" if config.get("quant_algo") else ""
        rules.notes.append(
            f"how quant_method {method or '(none)'!r}{algo} keeps weights is not known: they are not planned"
        )
    odd = Counter(re.sub(r"\d+", "#", pattern) for pattern, kept in rules.some if kept == UNKNOWN)
    rules.notes += [
        f"what the quantisation's entry {pattern!r} says of weights is not known ({number} of them): not planned"
        for pattern, number in odd.items()
    ]
    return rules


def _each_layer(rules: Rules, config: Mapping[str, Any]) -> None:
    layers = {str(name): one for name, one in config["quantized_layers"].items()}
    rules.some = tuple((name, _algo(str(one.get("quant_algo", "")))) for name, one in layers.items())
    mixed = config.get("quant_algo") == "MIXED_PRECISION" and rules.method == "modelopt"
    rules.kept = PLAIN if mixed else _fp8(config)
    if rules.method == "fp8":  # the method is for the whole model: what ModelOpt leaves alone is fp8 nevertheless
        rules.plain = tuple(one for one in rules.plain if one in ("head", "lm_head"))


def _of_groups(rules: Rules, config: Mapping[str, Any]) -> None:
    """GPTQ, AWQ and auto-round: integers in groups; some layers have their own number of bits."""
    usual = {"bits": config.get("bits", config.get("w_bit")), "data_type": config.get("data_type")}
    rules.kept = _bits(usual)
    if rules.method.startswith("awq"):
        rules.way = "part"
    if config.get("lm_head") is True:
        rules.head = rules.kept
    # GPTQModel: `-:expression` names layers that are not quantised, `+:expression` those with their own bits
    single = config.get("dynamic")
    for pattern, own in single.items() if isinstance(single, Mapping) else ():
        left = str(pattern).startswith("-:")  # the first that fits decides
        own_kept = PLAIN if left else _bits({**usual, **dict(own)})
        rules.some += ((f"re:{str(pattern).removeprefix('-:').removeprefix('+:')}", own_kept),)
    extra = config.get("extra_config")  # auto-round: by name, or by an expression
    for name, own in extra.items() if isinstance(extra, Mapping) else ():
        kept = _bits({**usual, **dict(own)})
        form = name if not any(sign in name for sign in "*+?\\[(|") else f"re:{name}"
        rules.some += ((form, kept),)
    within = _flat(config.get("modules_in_block_to_quantize")) + _flat(config.get("block_name_to_quantize"))
    rules.within = tuple(part.strip() for one in within for part in one.split(",") if part.strip())


def _flat(listed: object) -> list[str]:
    if isinstance(listed, str):
        return [listed]
    return [name for one in listed for name in _flat(one)] if isinstance(listed, Iterable) else []


def _bits(layer: Mapping[str, Any]) -> Kept:
    kind, bits = str(layer.get("data_type") or "int"), layer.get("bits")
    if bits == 16 and kind in ("int", "float", "bf16", "fp16", "fp"):
        return PLAIN
    if kind.startswith("int"):
        return {4: ("i4", "group"), 8: ("i8", "group")}.get(bits, UNKNOWN)  # type: ignore[arg-type]
    known = {("mx_fp", 4): ("fp4_e2m1", "1x32"), ("mx_fp", 8): ("fp8_e4m3", "1x32"), ("nv_fp", 4): ("fp4_e2m1", "1x16")}
    return known.get((kind, bits), UNKNOWN)  # type: ignore[arg-type]


def _fp8(config: Mapping[str, Any]) -> Kept:
    block, form = config.get("weight_block_size"), str(config.get("fmt") or "e4m3")
    dtype = f"fp8_{form.removeprefix('float8_').removesuffix('fn')}"
    if dtype not in ("fp8_e4m3", "fp8_e5m2") or not isinstance(block, list | None):
        return UNKNOWN
    if block is None:
        return (dtype, "row" if config.get("quant_method") == "fbgemm_fp8" else "tensor")
    return dtype, {(128, 128): "1x128", (1, 32): "1x32"}.get(tuple(block), "block")


def _algo(name: str) -> Kept:
    """How weights are stored by an algorithm of ModelOpt, by its name."""
    known = {
        "FP8": ("fp8_e4m3", "tensor"), "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_e4m3", "row"),
        "FP8_PB_WO": ("fp8_e4m3", "1x128"),
        "FP8_BLOCK_SCALES": ("fp8_e4m3", "1x128"), "NVFP4": ("fp4_e2m1", "1x16"), "W4A16_NVFP4": ("fp4_e2m1", "1x16"),
        "NVFP4_AWQ": ("fp4_e2m1", "1x16"), "MXFP4": ("fp4_e2m1", "1x32"), "MXFP8": ("fp8_e4m3", "1x32"),
        "W8A16": ("i8", "row"), "W4A16": ("i4", "group"), "W4A16_AWQ": ("i4", "group"), "W4A8_AWQ": ("i4", "group"),
        "W8A8_SQ_PER_CHANNEL": ("i8", "row"), "INT8": ("i8", "row"), "NONE": PLAIN, "": UNKNOWN,
    }  # fmt: skip
    return known.get(name.upper(), UNKNOWN)


def _groups(config: Mapping[str, Any]) -> tuple[Kept, tuple[tuple[str, Kept], ...]]:
    """(how all linear layers are stored, patterns of others) of compressed-tensors' groups.

    A group has targets: a class ("Linear": all linear layers), or names.
    """
    groups = config.get("config_groups")
    every, some = PLAIN, []
    # then only keys and values are quantised
    if groups == {} and config.get("kv_cache_scheme") and not config.get("sparsity_config"):
        return PLAIN, ()
    if not isinstance(groups, Mapping) or not groups:
        return UNKNOWN, ()
    for group in groups.values():
        kept = _weights(
            group.get("weights") if isinstance(group, Mapping) else None, group.get("format", config.get("format"))
        )
        for target in _flat(group.get("targets") or "Linear"):
            if target == "Linear":
                every = kept if every in (PLAIN, kept) else UNKNOWN  # two groups of all linears
            else:
                some.append((target, kept))
    return every, tuple(some)


def _weights(weights: object, form: object) -> Kept:
    if weights is None:
        return PLAIN
    if not isinstance(weights, Mapping):
        return UNKNOWN
    bits, kind, size = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    strategy = str(weights.get("strategy") or ("group" if size else "tensor"))
    scale = {"tensor": "tensor", "channel": "row", "token": "row", "group": "group", "tensor_group": "group"}.get(
        strategy, ""
    )
    if strategy == "block":
        scale = "1x128" if weights.get("block_structure") in ([128, 128], "128x128") else "block"
    if not scale:
        return UNKNOWN
    if (bits, kind) == (8, "float"):
        return "fp8_e4m3", "1x32" if size == 32 else scale
    if (bits, kind) == (4, "float"):
        return "fp4_e2m1", "1x32" if size == 32 or str(form).startswith("mxfp4") else "1x16"
    return {(8, "int"): ("i8", scale), (4, "int"): ("i4", scale)}.get((bits, kind), UNKNOWN)  # type: ignore[arg-type]
