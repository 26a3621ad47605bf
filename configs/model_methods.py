"""What the methods of quantisation say in their own words: of each weight's dtype, and of those they leave alone.

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


def read(told: Mapping[str, Any]) -> Rules:
    """The rules of one quantization_config. Raises AttributeError, KeyError, TypeError or ValueError for an odd one."""
    method = str(told.get("quant_method") or ("modelopt" if "quant_algo" in told else ""))
    rules = Rules(method, plain=tuple(one for name in _LISTS for one in _flat(told.get(name))))
    if isinstance(told.get("quantized_layers"), Mapping):  # ModelOpt: each layer by itself
        _each_layer(rules, told)
    elif method == "modelopt" or method.startswith("modelopt"):
        rules.kept = _algo(str(told.get("quant_algo") or ""))
        if told.get("quant_algo") is None and told.get("kv_cache_quant_algo"):  # keys and values alone
            rules.kept = PLAIN
    elif method in ("fp8", "fbgemm_fp8", "finegrained_fp8"):
        rules.kept, rules.way = _fp8(told), "expression"
        rules.head = head_of(rules)
    elif method == "compressed-tensors":
        rules.kept, rules.some = _groups(told)
        rules.plain_first = True
        rules.head = rules.kept  # its targets mean what they say
        rules.routers = PLAIN if rules.kept == PLAIN else UNKNOWN
    elif method == "mxfp4":
        rules.kept, rules.experts_only, rules.way = ("fp4_e2m1", "1x32"), True, "expression"
    elif method in ("gptq", "awq", "auto-round", "auto_round", "intel/auto-round", "gptq_marlin", "awq_marlin"):
        _of_groups(rules, told)
    elif method == "bitsandbytes":
        four = {"nf4": ("nf4", "group"), "fp4": ("bnb_fp4", "group")}
        rules.kept = (
            ("i8", "row") if told.get("load_in_8bit")
            else four.get(str(told.get("bnb_4bit_quant_type") or "fp4"), UNKNOWN) if told.get("load_in_4bit")
            else UNKNOWN
        )  # fmt: skip
        rules.way, rules.head = "expression", head_of(rules)
    elif method in model_tools.READERS:
        model_tools.READERS[method](rules, told)
    if rules.kept == UNKNOWN:
        algo = f" {told['quant_algo']}" if told.get("quant_algo") else ""
        rules.notes.append(
            f"how quant_method {method or '(none)'!r}{algo} keeps weights is not known: they are not planned"
        )
    odd = Counter(re.sub(r"\d+", "#", pattern) for pattern, kept in rules.some if kept == UNKNOWN)
    rules.notes += [
        f"what the quantisation's entry {pattern!r} says of weights is not known ({number} of them): not planned"
        for pattern, number in odd.items()
    ]
    return rules


def _each_layer(rules: Rules, told: Mapping[str, Any]) -> None:
    layers = {str(name): one for name, one in told["quantized_layers"].items()}
    rules.some = tuple((name, _algo(str(one.get("quant_algo", "")))) for name, one in layers.items())
    mixed = told.get("quant_algo") == "MIXED_PRECISION" and rules.method == "modelopt"
    rules.kept = PLAIN if mixed else _fp8(told)
    if rules.method == "fp8":  # beside it the method of the whole: what ModelOpt leaves alone is fp8 still
        rules.plain = tuple(one for one in rules.plain if one in ("head", "lm_head"))


def _of_groups(rules: Rules, told: Mapping[str, Any]) -> None:
    """GPTQ, AWQ and auto-round: integers in groups, with layers of bits of their own."""
    usual = {"bits": told.get("bits", told.get("w_bit")), "data_type": told.get("data_type")}
    rules.kept = _bits(usual)
    if rules.method.startswith("awq"):
        rules.way = "part"
    if told.get("lm_head") is True:
        rules.head = rules.kept
    single = told.get("dynamic")  # GPTQModel's: `-:expression` leaves modules alone, `+:` has bits of their own
    for pattern, own in single.items() if isinstance(single, Mapping) else ():
        left = str(pattern).startswith("-:")  # the first that fits decides
        own_kept = PLAIN if left else _bits({**usual, **dict(own)})
        rules.some += ((f"re:{str(pattern).removeprefix('-:').removeprefix('+:')}", own_kept),)
    extra = told.get("extra_config")  # auto-round's: by name, or by an expression
    for name, own in extra.items() if isinstance(extra, Mapping) else ():
        kept = _bits({**usual, **dict(own)})
        form = name if not any(sign in name for sign in "*+?\\[(|") else f"re:{name}"
        rules.some += ((form, kept),)
    within = _flat(told.get("modules_in_block_to_quantize")) + _flat(told.get("block_name_to_quantize"))
    rules.within = tuple(part.strip() for one in within for part in one.split(",") if part.strip())


def _flat(told: object) -> list[str]:
    if isinstance(told, str):
        return [told]
    return [name for one in told for name in _flat(one)] if isinstance(told, Iterable) else []


def _bits(told: Mapping[str, Any]) -> Kept:
    kind, bits = str(told.get("data_type") or "int"), told.get("bits")
    if bits == 16 and kind in ("int", "float", "bf16", "fp16", "fp"):
        return PLAIN
    if kind.startswith("int"):
        return {4: ("i4", "group"), 8: ("i8", "group")}.get(bits, UNKNOWN)  # type: ignore[arg-type]
    known = {("mx_fp", 4): ("fp4_e2m1", "1x32"), ("mx_fp", 8): ("fp8_e4m3", "1x32"), ("nv_fp", 4): ("fp4_e2m1", "1x16")}
    return known.get((kind, bits), UNKNOWN)  # type: ignore[arg-type]


def _fp8(told: Mapping[str, Any]) -> Kept:
    block, form = told.get("weight_block_size"), str(told.get("fmt") or "e4m3")
    dtype = f"fp8_{form.removeprefix('float8_').removesuffix('fn')}"
    if dtype not in ("fp8_e4m3", "fp8_e5m2") or not isinstance(block, list | None):
        return UNKNOWN
    if block is None:
        return (dtype, "row" if told.get("quant_method") == "fbgemm_fp8" else "tensor")
    return dtype, {(128, 128): "1x128", (1, 32): "1x32"}.get(tuple(block), "block")


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
    if groups == {} and told.get("kv_cache_scheme") and not told.get("sparsity_config"):  # keys and values alone
        return PLAIN, ()
    if not isinstance(groups, Mapping) or not groups:
        return UNKNOWN, ()
    for group in groups.values():
        kept = _weights(
            group.get("weights") if isinstance(group, Mapping) else None, group.get("format", told.get("format"))
        )
        for target in _flat(group.get("targets") or "Linear"):
            if target == "Linear":
                every = kept if every in (PLAIN, kept) else UNKNOWN  # two groups of all linears
            else:
                some.append((target, kept))
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
