"""What the quantisation configs of AMD Quark, torchao and HQQ say of each weight's dtype.

Sources: Quark's QConfig.to_dict and its matching of `exclude` and `layer_quant_config` (fnmatch on whole names);
torchao's config_to_dict and the classes of torchao.quantization; transformers' TorchAoHfQuantizer and HqqHfQuantizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from gemmtuned.configs.model_rules import PLAIN, UNKNOWN, Kept, Rules, head_of

_QUARK: Final = {
    "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", "int8": "i8", "int4": "i4", "uint4": "i4", "fp4": "fp4_e2m1",
    "fp4_e2m1": "fp4_e2m1",
}  # fmt: skip
_QUARK_PLAIN: Final = ("bfloat16", "float16", "float32")


def quark(rules: Rules, given: Mapping[str, Any]) -> None:
    """One config for all linear layers, and some for patterns of names, of which the first that fits decides."""
    every = given["global_quant_config"]
    classes = given.get("layer_type_quant_config") or {}
    rules.kept = _of_quark(classes.get("Linear", every))
    rules.some = tuple((str(name), _of_quark(one)) for name, one in (given.get("layer_quant_config") or {}).items())
    rules.plain_first = True
    rules.head = rules.kept  # the head is a linear layer like others: `exclude` names it where it is not quantised
    rules.routers = PLAIN if rules.kept == PLAIN else UNKNOWN


def _of_quark(given: object) -> Kept:
    weight = given.get("weight") if isinstance(given, Mapping) else ""
    if weight is None:
        return PLAIN
    if isinstance(weight, list):  # steps, some of the scales, which are marked: the last other is how it is stored
        weight = next((one for one in reversed(weight) if not one.get("is_scale_quant")), "")
    if not isinstance(weight, Mapping):
        return UNKNOWN
    name, scheme, size = str(weight.get("dtype")), str(weight.get("qscheme")), weight.get("group_size")
    if name in _QUARK_PLAIN:
        return PLAIN
    dtype = _QUARK.get(name)
    if dtype is None:
        return UNKNOWN
    if scheme in ("per_tensor", "per_channel"):
        return dtype, "tensor" if scheme == "per_tensor" else "row"
    if scheme == "per_block":
        return (dtype, "1x128") if weight.get("block_size") == [128, 128] else (dtype, "block")
    if scheme != "per_group":
        return UNKNOWN
    if dtype in ("i4", "i8"):
        return dtype, "group"
    scale = {32: "1x32", 16: "1x16"}.get(size if isinstance(size, int) else 0)
    return (dtype, scale) if scale else UNKNOWN


def torchao(rules: Rules, given: Mapping[str, Any]) -> None:
    """One config for all linear layers, or one for each name: a whole name, a `re:` expression, or `_default`."""
    kind = given["quant_type"]
    rules.way = "expression"
    if isinstance(kind, str):
        rules.kept = _OF_NAMES.get(kind, UNKNOWN)
    else:
        config = kind.get("default", kind)
        name, data = str(config.get("_type")), config.get("_data") or {}
        layers = data.get("fqn_to_config", data.get("module_fqn_to_config"))
        if name in ("FqnToConfig", "ModuleFqnToConfig") and isinstance(layers, Mapping):
            others = layers.get("_default")
            rules.kept = _of_torchao(others) if others is not None else PLAIN
            rules.some = tuple(
                (str(one), PLAIN if own is None else _of_torchao(own))
                for one, own in layers.items()
                if one != "_default"
            )
        else:
            rules.kept = _of_torchao(config)
    rules.head = rules.kept if given.get("include_input_output_embeddings") else head_of(rules)
    if rules.kept != PLAIN:
        rules.experts = UNKNOWN  # in some versions of transformers they are no linear layers, and then not quantised


_OF_NAMES: Final[dict[str, Kept]] = {  # by names of torchao's functions, which its classes have replaced
    "int4_weight_only": ("i4", "group"), "int8_weight_only": ("i8", "row"),
    "int8_dynamic_activation_int8_weight": ("i8", "row"), "int8_dynamic_activation_int4_weight": ("i4", "group"),
    "float8_dynamic_activation_float8_weight": ("fp8_e4m3", "tensor"),
}  # fmt: skip


def _of_torchao(config: object) -> Kept:
    if not isinstance(config, Mapping):
        return UNKNOWN
    name, data = str(config.get("_type")), config.get("_data") or {}
    if name in (
        "Int4WeightOnlyConfig",
        "Int8DynamicActivationInt4WeightConfig",
        "Float8DynamicActivationInt4WeightConfig",
    ):
        return "i4", "group"
    if name == "Int8WeightOnlyConfig":
        return "i8", "group" if data.get("group_size") else _granularity(data.get("granularity"), "row")
    if name == "Int8DynamicActivationInt8WeightConfig":
        return "i8", _granularity(data.get("granularity"), "row")
    if name in ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"):
        dtype = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}.get(
            _data_of(data.get("weight_dtype"), "float8_e4m3fn")
        )
        usual = "row" if name == "Float8WeightOnlyConfig" else "tensor"
        scale = _granularity(data.get("granularity"), usual)
        return (dtype, scale) if dtype and scale else UNKNOWN
    if name in ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig"):
        dtype = {"int4": "i4", "int8": "i8"}.get(_data_of(data.get("weight_dtype"), ""))
        scale = _granularity(data.get("granularity", data.get("weight_granularity")), "")
        return (dtype, scale) if dtype and scale else UNKNOWN
    return ("fp4_e2m1", "1x16") if name.startswith("NVFP4") else UNKNOWN


def _granularity(given: object, usual: str) -> str:
    """What shares a scale of the weight, whose granularity is the second of two; "" where it is not known."""
    if given is None:
        return usual
    one = given[-1] if isinstance(given, list) and given else given
    name = str(one.get("_type")) if isinstance(one, Mapping) else ""
    data = (one.get("_data") or {}) if isinstance(one, Mapping) else {}
    if name == "PerBlock":
        return "1x128" if list(data.get("block_size") or ()) == [128, 128] else ""
    if name == "PerAxis":
        return "row" if data.get("axis") == 0 else ""
    return {"PerRow": "row", "PerTensor": "tensor", "PerGroup": "group"}.get(name, "")


def _data_of(given: object, usual: str) -> str:
    """A torch.dtype as config_to_dict writes it."""
    said = given.get("_data") if isinstance(given, Mapping) else given
    return usual if said is None else str(said).removeprefix("torch.")


def hqq(rules: Rules, given: Mapping[str, Any]) -> None:
    """One config for all linear layers, or one for each ending of a name; other layers are not quantised."""
    config = given["quant_config"]
    rules.plain = tuple(str(one) for one in given.get("skip_modules") or ("lm_head",))
    rules.plain_first = True
    if "weight_quant_params" in config:
        rules.kept = _of_hqq(config)
    else:
        rules.kept = PLAIN
        rules.some = tuple((f"*{tag}", _of_hqq(one)) for tag, one in config.items())


def _of_hqq(given: object) -> Kept:
    if given is None:
        return PLAIN
    values = given.get("weight_quant_params") if isinstance(given, Mapping) else None
    if not isinstance(values, Mapping):
        return UNKNOWN
    dtype = {4: "i4", 8: "i8"}.get(values.get("nbits", 4))
    return (dtype, "group" if values.get("group_size", 64) else "row") if dtype else UNKNOWN


READERS: Final[Mapping[str, Callable[[Rules, Mapping[str, Any]], None]]] = {
    "quark": quark, "torchao": torchao, "hqq": hqq,
}  # fmt: skip
