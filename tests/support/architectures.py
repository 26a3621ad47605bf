"""Configs of every type of transformers, shrunk and changed one field at a time, and what it builds from them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.model_parts import Weight
from gemmtuned.configs.model_shapes import plan
from gemmtuned.kernels.from_transformers import built

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
          "decoder_layers", "depth", "num_global_layers")  # fmt: skip
# changed, these say nothing of a layer, or only what must fit another field
SILENT = ("token", "vocab", "position", "version", "pretraining_tp", "chunk", "image_size", "window", "seed", "seq_len",
          "max_", "min_", "type_vocab", "pad_")  # fmt: skip
Sizes = tuple[str, int, int, int, bool]


def mapping() -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING


def shrunk(kind: str, config: Any = None) -> dict[str, Any]:
    """A config.json of this type: its class's own defaults, of six layers."""
    from transformers import PreTrainedConfig

    config = config or mapping()[kind]
    common = {one.name for one in dataclasses.fields(PreTrainedConfig)}
    found: dict[str, Any] = {"model_type": kind}
    for one in dataclasses.fields(config):
        if one.name in config.sub_configs_defaults or one.name in common:
            continue
        value = one.default
        if value is not dataclasses.MISSING and isinstance(value, int | float | str):
            found[one.name] = 6 if one.name in LAYERS and value > 6 else value
    for name, spec in config.sub_configs_defaults.items():
        inner = spec.config_class if spec.config_class.__name__ != "AutoConfig" else mapping()[spec.model_type]
        if not spec.optional:
            found[name] = {**shrunk(inner.model_type, inner), **(spec.init_kwargs or {})}
            found[name].update({layer: 6 for layer in LAYERS if found[name].get(layer, 0) > 6})
    return found


def changes(config: dict[str, Any], kind: str, empty: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config with one field changed, left out or said, each with a word on it."""
    for name, value in config.items():
        if name == "model_type" or any(word in name for word in SILENT):
            continue
        if isinstance(value, dict):
            for word, inner in changes(value, str(value.get("model_type")), empty=False):
                yield f"{name}.{word}", {**config, name: inner}
        elif isinstance(value, bool):
            yield f"{name}={not value}", {**config, name: not value}
        elif isinstance(value, int):
            for other in (2 * value, value // 2, value + 1, 3):
                if other != value and other > 0:
                    yield f"{name}={other}", {**config, name: other}
            same = mapping()[kind].attribute_map.items() if kind in mapping() else ()
            if not any(name in pair and {*pair} <= config.keys() for pair in same):  # said twice under two names
                yield f"no {name}", {key: one for key, one in config.items() if key != name}
    if empty and kind in mapping():
        absent = [one.name for one in dataclasses.fields(mapping()[kind]) if one.default is None]
        for name in absent:
            if any(word in name for word in ("head", "dim", "size", "rank", "experts", "_layers")):
                for other in (2, 4, 48):
                    yield f"{name}={other}", {**config, name: other}
            if name in ("layer_types", "mlp_layer_types", "layers_block_type"):
                made = getattr(mapping()[kind].from_dict(dict(config)), name, None)
                if isinstance(made, list) and len(set(made)) > 1:
                    yield f"{name} turned", {**config, name: [*made[1:], made[0]]}


def counted(weights: list[Weight], *, names: bool) -> Counter[Sizes]:
    found: Counter[Sizes] = Counter()
    for w in weights:
        found[w.name if names else "", w.experts, w.n, w.k, w.bias] += w.count
    return found


def difference(config: dict[str, Any], *, names: bool = False) -> str | None:
    """What we and transformers see differently of a config; None where it is the same, or a refusal that helps.

    "-" where transformers cannot build it.
    """
    try:
        theirs = counted(built(config).weights, names=names)
    except ProblemError:
        return "-"
    try:
        ours = counted(plan(config, fused=False).weights, names=names)
    except ProblemError as err:
        said = str(err)
        return None if "--from-transformers" in said or "needs it" in said else f"refused: {said}"
    return None if ours == theirs else f"ours alone {dict(ours - theirs)}, transformers' alone {dict(theirs - ours)}"
