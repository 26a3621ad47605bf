"""Architectures described in architectures/: a line for each linear layer, with its sizes as expressions.

A section `[type ...]` describes one or more model types, `[@name]` is a block that sections take in by a line `@name`,
of whichever file.  In a section stand

    name = EXPRESSION                       a value; it wins over the config's own of that name
    like TYPE                               the lines of another section, after these values
    + FIELD [vision|audio]                  the layers of a config inside, by its own model_type
    WEIGHT  N  K  [SPLIT]  [repeated E]  [bias E]  [experts E]  [if E]  [per E | once]

with two blanks or more between cells.

EXPRESSION is Python's arithmetic over the names of config.json, the values above and `i`, the layer.  What config.json
leaves out has transformers' default (model_defaults.json); a name that nothing says is None.  SPLIT is how tensor
parallelism cuts a weight (model_parts.Weight): heads, kv_heads, columns, rows, vocab, groups, each with the number of
its units where that is not the usual one; `repeated E` of its columns are cut by units or repeated.  `per E` says how
many layers there are, `once` that it stands outside them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, Final

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.model_parts import Weight
from gemmtuned.configs.model_reader import CORE, MAX_LAYERS, Reader
from gemmtuned.configs.numbers import whole

FOLDER: Final = Path(__file__).with_name("architectures")
_SPLITS: Final = ("heads", "kv_heads", "columns", "rows", "vocab", "groups", "whole")
_UNITS: Final = {"heads": "heads", "kv_heads": "kv_heads"}
_GIVEN: Final[dict[str, Any]] = {"len": len, "max": max, "min": min, "int": int, "range": range, "str": str}
# What an expression raises over a config that lacks a name, or has a value of another kind
_NO_VALUE: Final = (TypeError, ZeroDivisionError, IndexError, AttributeError, ValueError)
_NODES: Final = (
    ast.Expression, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Compare, ast.Call, ast.Constant, ast.Name,
    ast.Load, ast.Subscript, ast.Slice, ast.List, ast.Tuple, ast.boolop, ast.operator, ast.unaryop, ast.cmpop,
    ast.Attribute,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Expression:
    """Arithmetic over a config's names. text: as written."""

    text: str
    code: CodeType
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Line:
    """One linear layer. when: in which layers; per: how many layers there are, None where it stands outside them."""

    name: str
    n: Expression
    k: Expression
    split: str
    units: Expression | None
    repeated: Expression | None
    bias: Expression | None
    experts: Expression | None
    when: Expression | None
    per: Expression | None


@dataclass(slots=True)
class Section:
    """What describes one type. inside: (field, part) of the configs inside it."""

    values: dict[str, Expression] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    inside: list[tuple[str, str]] = field(default_factory=list)


@cache
def expression(text: str) -> Expression:
    """Raises ValueError for what is more than arithmetic."""
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _NODES) or (isinstance(node, ast.Attribute) and node.attr.startswith("_")):
            raise ValueError(f"{type(node).__name__} in {text!r}")
    names = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)) - set(_GIVEN)
    return Expression(text.strip(), compile(tree, FOLDER.name, "eval"), names)


@cache
def sections() -> Mapping[str, Section]:
    """The descriptions by model type."""
    return read(*(path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.txt"))))


def read(*texts: str) -> dict[str, Section]:
    """Descriptions of such texts, which share their blocks. Raises ValueError that names the line."""
    raw: dict[str, list[str]] = {}
    for text in texts:
        at: list[list[str]] = []
        for line in text.splitlines():
            content = line.split("#", 1)[0].rstrip()
            if not content:
                continue
            if header := re.fullmatch(r"\[(.+)\]", content):
                at = [raw.setdefault(name, []) for name in header[1].split()]
            elif not at:
                raise ValueError(f"{content!r} stands in no section")
            else:
                for lines in at:
                    lines.append(content)
    return {name: _section(raw, name) for name in raw if not name.startswith("@")}


def _section(raw: Mapping[str, list[str]], name: str) -> Section:
    found = Section()
    for line in _flat(raw, name):
        cells = re.split(r"\s{2,}", line.strip())
        if value := re.fullmatch(r"(\w+) = (.+)", line.strip()):
            found.values.setdefault(value[1], expression(value[2]))
        elif inner := re.fullmatch(r"\+ (\w+)(?: (vision|audio))?", line):
            found.inside.append((inner[1], inner[2] or ""))
        elif len(cells) >= 3:
            found.lines.append(_line(cells))
        else:
            raise ValueError(f"[{name}]: {line!r} is not understood")
    for value_name, value_text in _USUAL.items():
        found.values.setdefault(value_name, expression(value_text))
    return found


# What the blocks call them, where a section does not say otherwise
_USUAL: Final = {
    "hidden": "hidden_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads or heads",
    "dim": "head_dim or hidden // heads", "width": "intermediate_size", "layers": "num_hidden_layers",
    "vocab": "vocab_size", "qkv_bias": "attention_bias", "o_bias": "attention_bias", "in_bias": "mlp_bias",
    "attends": "True", "dense": "True", "sparse": "True", "shared_width": "0", "expert_width": "moe_intermediate_size",
    "experts": "num_experts or num_local_experts or n_routed_experts",
}  # fmt: skip


def _flat(raw: Mapping[str, list[str]], name: str) -> Iterator[str]:
    for line in raw[name]:
        if taken := re.fullmatch(r"(?:like (\S+)|(@\w+))", line.strip()):
            yield from _flat(raw, taken[1] or taken[2])
        else:
            yield line


def _line(cells: list[str]) -> Line:
    words: dict[str, str] = {}
    for cell in cells[3:]:
        word, _, rest = cell.partition(" ")
        if word in _SPLITS:
            words["split"], words["units"] = word, rest or _UNITS.get(word, "")
        elif word in ("repeated", "bias", "experts", "if", "per", "once"):
            words[word] = rest
        else:
            raise ValueError(f"{cell!r} of {cells[0]} is not understood")
    maybe = {name: expression(text) for name, text in words.items() if text and name != "split"}
    return Line(
        cells[0], expression(cells[1]), expression(cells[2]), words.get("split", "whole"), maybe.get("units"),
        maybe.get("repeated"), maybe.get("bias"), maybe.get("experts"), maybe.get("if"),
        None if "once" in words else maybe.get("per", expression("layers")),
    )  # fmt: skip


class _Values(dict[str, Any]):
    """The names of an expression: the section's values, then the config's. read: what the config gave."""

    def __init__(self, section: Section, reader: Reader, more: Mapping[str, Any]) -> None:
        super().__init__(more)
        self._section, self._reader, self.read = section, reader, dict[str, Any]()
        self._open: set[str] = set()
        by_layer = reader.values.get("per_layer_config")  # what single layers have of their own, by number
        given = by_layer.items() if isinstance(by_layer, Mapping) else ()
        layers = ((whole(str(i)), one) for i, one in given)
        self.layered = {i: one for i, one in layers if i is not None and isinstance(one, Mapping)}

    def __missing__(self, name: str) -> Any:
        if name in _GIVEN:
            return _GIVEN[name]
        if name == "config":  # its own names, where a section has given them another meaning
            return _Inside(self._reader)
        value = self._section.values.get(name)
        if value is not None and name not in self._open:  # `dim = dim or 64` means the config's own
            self._open.add(name)
            try:
                return self.of(value)
            finally:
                self._open.discard(name)
        layer = self.layered.get(self.get("i", -1))
        if layer is not None and layer.get(name) is not None:
            return layer[name]
        inside = self._reader.inner(name)
        if inside is not None:
            return _Inside(inside)
        self.read[name] = found = self._reader.value(name)
        return found

    def of(self, one: Expression) -> Any:
        return eval(one.code, {"__builtins__": {}}, self)  # noqa: S307  our own file, arithmetic alone (expression)


class _Inside:
    """The values of a config inside, as attributes."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        inside = self._reader.inner(name)
        return self._reader.value(name) if inside is None else _Inside(inside)


def described(kind: str) -> bool:
    """Whether there is a section for this type."""
    return kind in sections()


def make(reader: Reader, *, task: str = "lm") -> list[Weight]:
    """The weights of a type that has a section, without those of the configs inside it.

    task: what the model is for: lm, base (no head) or classify.  Raises ProblemError that names what config.json lacks.
    """
    section = sections()[reader.kind]
    values = _Values(section, reader, {"task": task})
    absent = {name for name, _ in section.inside if reader.inner(name) is None}
    found: list[Weight] = []
    for line in section.lines:
        if absent.isdisjoint({*_all_names(line.n, section), *_all_names(line.k, section)}):
            found += _weights(line, values, section, reader)
    return found


def _weights(line: Line, values: _Values, section: Section, reader: Reader) -> list[Weight]:
    values.read.clear()
    try:
        count = 1 if line.per is None else values.of(line.per)
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_LAYERS:
            raise TypeError
        layered = bool(values.layered) or any(one is not None and "i" in _all_names(one, section) for one in
                      (line.n, line.k, line.bias, line.experts, line.when))  # fmt: skip
        groups: dict[tuple[int, int, bool, int], list[int]] = {}
        for i in range(count if layered else min(count, 1)):
            values["i"] = i
            if line.when is not None and not values.of(line.when):
                continue
            bias = bool(line.bias is not None and values.of(line.bias))
            experts = values.of(line.experts) if line.experts is not None else 0
            one = (_size(values.of(line.n)), _size(values.of(line.k)), bias, experts)
            groups.setdefault(one, []).append(i)
        units = _size(values.of(line.units)) if line.units is not None and groups else 1
        repeated = values.of(line.repeated) if line.repeated is not None and groups else 0
    except _NO_VALUE as err:
        raise ProblemError(_what_is_wrong(line, values.read, reader)) from err
    values.pop("i", None)
    why = _why(line, values)
    return [
        Weight(
            line.name, n, k, 1 if line.per is None else len(at) if layered else count, why, bias, line.split,
            units, experts=experts, at=() if line.per is None else tuple(at) if layered else tuple(range(count)),
            repeated=repeated,
        )
        for (n, k, bias, experts), at in groups.items()
    ]  # fmt: skip


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TypeError
    return value


def _all_names(one: Expression, section: Section) -> set[str]:
    found: set[str] = set()
    todo = [*one.names]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += section.values[name].names if name in section.values else ()
    return found


def _what_is_wrong(line: Line, read: Mapping[str, Any], reader: Reader) -> str:
    """What of config.json is to blame for a line that has no size."""
    absent = [name for name, value in read.items() if value is None]
    odd = {name: value for name, value in read.items() if value is not None and name in reader.values}
    bad = [name for name, value in odd.items() if isinstance(value, float | str) or (value is not True and value == 0)
           or (isinstance(value, int) and value < 0)]  # fmt: skip
    bad.sort(key=lambda name: odd[name] == 0)
    absent.sort(key=lambda name: name not in CORE)
    if absent and not (bad and odd[bad[0]] != 0 and absent[0] not in CORE):
        return f"config.json: {absent[0]} is missing, a {reader.kind} model needs it"
    if bad:
        return f"config.json: {bad[0]} is {odd[bad[0]]!r}, expected a whole number of at least 1"
    shown = ", ".join(f"{name} {value!r}" for name, value in read.items())
    size = f"{line.n.text} x {line.k.text} with {shown}"
    return f"config.json: {line.name} would be {size}: no size here; --from-transformers may read it"


def _why(line: Line, values: _Values) -> str:
    def shown(one: Expression) -> str:
        def number(name: re.Match[str]) -> str:
            if name[0] not in one.names or name[0] == "i":
                return name[0]
            value = values[name[0]]
            return f"{value} {name[0]}" if isinstance(value, int) and not isinstance(value, bool) else name[0]

        try:
            return re.sub(r"(?<![\w.])[A-Za-z_]\w*(?![\w.(\[])", number, one.text)
        except _NO_VALUE:
            return one.text  # one that only single layers can say

    of = f" of {shown(line.experts)}" if line.experts is not None else ""
    return f"{shown(line.n)} by {shown(line.k)}{of}"
