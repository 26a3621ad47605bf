"""Writes configs/model_defaults.json: what the installed transformers takes where a config.json leaves something out.

For each type that gemmtuned describes: its fields with their defaults (values), names that mean the same (names), the
configs inside it with the type each is of (inside), and that it has no head (base).  Run it after a new transformers:
`python -m lab model_defaults`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from gemmtuned.configs.model_layers import MODELS
from gemmtuned.configs.model_lines import sections
from gemmtuned.configs.model_reader import DEFAULTS

# fields of every config, and those that say nothing of a layer
_SILENT = (
    "token_id", "token_index", "dropout", "pdrop", "initializer", "_eps", "epsilon", "rope", "loss", "_coef", "_act",
    "activation_function", "max_position", "use_cache", "layerdrop", "logit", "router_jitter", "topk", "router_aux",
    "begin_suppress", "suppress", "mask_", "_prob", "ctc_", "return_",
    "output_attentions", "output_hidden_states", "output_router", "scaling", "norm_topk",
)  # fmt: skip


def defaults(config: Any) -> dict[str, Any]:
    """What one config class of transformers takes."""
    from transformers import PreTrainedConfig

    common = {one.name for one in dataclasses.fields(PreTrainedConfig)}
    values = {}
    for one in dataclasses.fields(config):
        value = one.default if one.default is not dataclasses.MISSING else None
        if value is None and one.default_factory is not dataclasses.MISSING:
            value = one.default_factory()
        whole = isinstance(value, int) or (isinstance(value, str) and one.name.endswith(("pattern", "type")))
        listed = isinstance(value, list | tuple) and all(isinstance(each, int | str) for each in value)
        if one.name in common or not (whole or (listed and value)) or any(word in one.name for word in _SILENT):
            continue
        values[one.name] = list(value) if listed else value
    found = {"values": values, "names": {k: v for k, v in config.attribute_map.items() if k != v}}
    inside = {}
    for name, spec in config.sub_configs_defaults.items():
        fixed = spec.config_class.__name__ != "AutoConfig"
        kind = spec.config_class.model_type if fixed else spec.model_type
        given = _plain(spec.init_kwargs or {})
        inside[name] = [kind or "", fixed, given, bool(spec.optional), _joined(config, name, kind, given)]
    return {name: one for name, one in (*found.items(), ("inside", inside)) if one}


def _joined(config: Any, name: str, kind: str | None, given: dict[str, Any]) -> bool:
    """Whether a whole gives its own defaults to a config inside that says something, too."""
    try:
        made = getattr(config(**{name: {"model_type": kind}}), name)
    except Exception:  # a whole that asks for more than one of its parts: as the others
        return False
    return bool(given) and all(getattr(made, one, None) == value for one, value in given.items())


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, int | str | list | dict)}


def everything() -> dict[str, Any]:
    """For each type that is described, as far as this transformers has it."""
    import transformers.models.auto.modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    kinds = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM")
    headed = {kind for one in kinds for kind in getattr(auto, f"MODEL_FOR_{one}_MAPPING_NAMES")}
    found = {kind: defaults(CONFIG_MAPPING[kind]) for kind in sorted({*MODELS, *sections()})
             if kind in CONFIG_MAPPING}  # fmt: skip
    for kind in (MODEL_MAPPING_NAMES.keys() & found.keys()) - headed:
        found[kind]["base"] = True
    return found


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    lines = [f"  {json.dumps(kind)}: {json.dumps(one, sort_keys=True)}" for kind, one in everything().items()]
    DEFAULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    sys.stdout.write(f"{DEFAULTS}: {len(lines)} types\n")
