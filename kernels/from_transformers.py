"""The linear layers of a model that we have no description of, as transformers builds them: without weights, in memory.

The model is made on torch's meta device from its config.json; code that comes with a model is never run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.model_parts import Weight
from gemmtuned.configs.model_quant import applied, rules_of
from gemmtuned.configs.model_shapes import Plan, dtype_of

_LAYER = re.compile(r"^(?P<before>.*?)(?:layers|blocks|h|layer)\.(?P<number>\d+)\.(?P<name>.+)$")
_TOWER = re.compile(r"vis(ion|ual)|image|audio")


def built(config: Mapping[str, Any]) -> Plan:
    """Every linear layer, each on one device and unfused. Raises ProblemError where transformers cannot build it."""
    try:
        import torch
        import transformers
    except ImportError as err:
        raise ProblemError(f"--from-transformers needs transformers ({err}): pip install transformers") from err
    kind = str(config.get("model_type") or "")
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if kind not in known:
        raise ProblemError(
            f"transformers {transformers.__version__} has no model_type {kind!r} either. Name its shapes in a CSV"
        )
    plain = {name: value for name, value in config.items() if name not in ("quantization_config", "auto_map")}
    if isinstance(plain.get("text_config"), Mapping):
        plain["text_config"] = {k: v for k, v in plain["text_config"].items() if k != "quantization_config"}
    try:
        wanted = known[kind].from_dict(plain)
        model = _made(transformers, torch, wanted)
    except Exception as err:
        raise ProblemError(f"transformers cannot build this model ({type(err).__name__}: {err})") from err
    found: dict[tuple[str, int, int, bool, int, str], list[int]] = {}
    for name, n, k, bias, experts in _linears(torch, model):
        inside = _LAYER.match(name)
        part = "vision" if _TOWER.search(name.rsplit(".", 1)[0]) else ""
        short = inside["name"] if inside else name.removeprefix("model.").removeprefix("language_model.")
        at = int(inside["number"]) if inside else -1
        found.setdefault((short, n, k, bias, experts, part), []).append(at)
    class_ = type(model).__name__
    weights = [
        Weight(
            name, n, k, len(at), f"{class_} of transformers builds it", bias, experts=experts, part=part,
            at=() if -1 in at else tuple(at),
        )
        for (name, n, k, bias, experts, part), at in found.items()
    ]  # fmt: skip
    rules = rules_of(config, config.get("hf_quant_config"), name=str(config.get("folder_name", "")))
    weights = applied(weights, rules)
    notes = [f"layers of {class_}, as transformers {transformers.__version__} builds them; one device, nothing fused"]
    return Plan(kind, dtype_of(config), weights, notes + (rules.notes if rules else []))


def _made(transformers: Any, torch: Any, config: Any) -> Any:
    """The model on the meta device: with its head where it has one."""
    trouble: Exception | None = None
    for name in ("AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel"):
        try:
            with torch.device("meta"):
                return getattr(transformers, name).from_config(config)
        except (ValueError, AttributeError, KeyError) as err:  # noqa: PERF203  the first that has a class for it
            trouble = trouble or err
    raise trouble or ValueError("no class for it")


def _linears(torch: Any, model: Any) -> Iterator[tuple[str, int, int, bool, int]]:
    """(name, n, k, bias, experts) of linear modules, and of parameters that hold a mixture's experts or a router."""
    linear: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            linear.add(name)
            yield name, module.out_features, module.in_features, module.bias is not None, 0
        elif isinstance(module, torch.nn.Embedding | torch.nn.modules.conv._ConvNd):
            linear.add(name)
    biases = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        if owner in linear or last.endswith(("bias", "embedding", "table", "scale")) or "pos" in last:
            continue
        if parameter.dim() == 3 and "expert" in name:
            experts, n, k = parameter.shape
            transposed = bool(getattr(model.get_submodule(owner), "is_transposed", False))
            yield name, *((k, n) if transposed else (n, k)), f"{name}_bias" in biases, experts
        elif parameter.dim() == 2 and last == "weight":
            yield owner, *parameter.shape, f"{owner}.bias" in biases, 0
