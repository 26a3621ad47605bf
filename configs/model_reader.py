"""Values of a model's config.json by name, checked, with transformers' own where the file leaves something out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import ProblemError

Layers = tuple[int, ...]
MAX_LAYERS: Final = 10_000  # no model has more; a larger number is a slip
DEFAULTS: Final = Path(__file__).with_name("model_defaults.json")
# What no config.json of a whole model leaves out; one inside another says what differs from the defaults alone
TEXTS: Final = ("text_config", "llm_config", "thinker_config", "decoder")  # where a whole has its language model
CORE: Final = frozenset(("hidden_size", "num_hidden_layers", "intermediate_size", "n_embd", "n_layer", "d_model",
                          "num_layers", "vocab_size", "depth"))  # fmt: skip


@cache
def _defaults() -> Mapping[str, Mapping[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(DEFAULTS.read_text(encoding="utf-8"))
    return found


class Reader:
    """Values of a config by name, checked; what it leaves out is what transformers takes for a model of this type.

    nested: the config stands inside another.  taken: what was left out and is a default of transformers, by name.
    """

    def __init__(self, values: Mapping[str, Any], kind: str, *, nested: bool = False) -> None:
        self.values, self.kind, self.nested = values, kind, nested
        known = _defaults().get(kind, {})
        self._defaults, self._inside = known.get("values", {}), known.get("inside", {})
        self.headless = bool(known.get("base"))  # transformers has no class for it with a head
        self._other: dict[str, list[str]] = {}  # names that mean the same
        for one, other in known.get("names", {}).items():
            self._other.setdefault(one, []).append(other)
            self._other.setdefault(other, []).append(one)
        self.taken: dict[str, Any] = {}

    def value(self, name: str) -> Any:
        """What the config says, under this or another name of transformers for it; else the default; else None."""
        found = self._said(name)
        if found is None and name not in self.values and (self.nested or name not in CORE):
            found = next((self._defaults[one] for one in (name, *self._other.get(name, ())) if one in self._defaults),
                         None)  # fmt: skip
            if found is not None:
                self.taken[name] = found
        return found

    def _said(self, name: str) -> Any:
        names = (name, *self._other.get(name, ()))
        return next((self.values[one] for one in names if self.values.get(one) is not None), None)

    def inner(self, name: str) -> Reader | None:
        """The config inside of this name, of the type that transformers reads it as; None where there is none."""
        value = self.values.get(name)
        usual, fixed, given, optional, joined = self._inside.get(name, ("", False, {}, True, False))
        if not isinstance(value, Mapping):
            flat = "hidden_size" in self.values and not any(name in self.values for name in TEXTS)
            if flat and name in TEXTS:  # as older wholes are published: their text's values stand beside
                return Reader(self.values, usual, nested=True)
            if optional or flat:
                return None
            self.taken[name] = usual
            return Reader(given, usual, nested=True)
        value = {**given, **value} if joined else value
        return Reader(value, usual if fixed else str(value.get("model_type") or usual), nested=True)

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of these that is there, a whole number above 0."""
        first = next((name for name in names if self._said(name) is not None), names[0])
        for name in (first, *names):
            value = self.value(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise ProblemError(f"config.json: {name} is {value!r}, expected a whole number of at least 1")
                return value
        if default is None:
            raise ProblemError(f"config.json: {' or '.join(names)} is missing, a {self.kind} model needs it")
        return default

    def none_or_size(self, *names: str) -> int:
        """As size, 0 where there is none, or 0 is said."""
        there = next((name for name in names if self.value(name)), "")
        return self.size(there) if there else 0

    def flag(self, name: str) -> bool:
        """A switch; off where nothing says."""
        return bool(self.value(name))

    def names(self, name: str) -> list[str] | None:
        """A list with one word for each layer; None where there is none. Raises ProblemError for another length."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < self.layers:
            raise ProblemError(f"config.json: {name} is no list of {self.layers} layers")
        return [str(one) for one in value[: self.layers]]

    def part(self, name: str) -> Reader | None:
        """A config inside, such as vision_config."""
        value = self.values.get(name)
        return Reader(value, f"{self.kind}.{name}") if isinstance(value, Mapping) else None

    @property
    def hidden(self) -> int:
        """The model's width."""
        return self.size("hidden_size")

    @property
    def layers(self) -> int:
        """Decoder layers."""
        found = self.size("num_hidden_layers")
        if found > MAX_LAYERS:
            raise ProblemError(f"config.json: num_hidden_layers is {found}, more than any model has")
        return found

    @property
    def all(self) -> Layers:
        """All decoder layers."""
        return tuple(range(self.layers))

    def of_type(self, *kinds: str) -> Layers:
        """The layers that `layer_types` says are of one of these kinds."""
        listed = self.names("layer_types")
        return tuple(i for i, one in enumerate(listed or ()) if one in kinds)
