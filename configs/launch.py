"""The launch record of a solution: JSON data by which running programs run it, so everything in it is checked here.

    {"v": 2, "binary": ..., "arguments": ["x.ptr", "w.ptr", "bias.ptr?", "y.ptr", "x.size0", "x.stride0", "w.stride0"],
     "conditions": [["x.stride1", "==", 1], ["x.ptr", "%", 16], ["x.size0", "<=", 64]], "grid": [...], ...}

A record names quantities of operands by their slots, SLOTS: x [M, K], w [N, K], the scales of both (a row for each row
or block of rows of the operand, a column for each block of K), zero_x [M] (X's zero points), sums_w [N] (of W's rows,
times the zero point where all of X has one), bias [N], c (the whole C of addmm), offs [G] (where each group's rows end)
and y [M, N].  Batched operands have the batch in front; w of groups is [G, N, K].  `b` and `scale_b` are w and scale_w
with the last two dimensions exchanged, as torch takes them.  The quantities are

    ptr             the address            size<d>, stride<d>      of a dimension, strides in elements
    dim, numel      as torch has them      contiguous              1 or 0

A condition is [quantity, "==" | "%" | "<=" | ">=", number or a size].  It holds if the call does not have its operand,
and if it is about the stride of a dimension of one element, which is never used.  It does not hold if the operand lacks
its dimension.  A call that does not meet all conditions runs on stock torch.

There are three kinds of records.  A published binary (KernelLaunch), launched by hooks/native/cuda_launch.h:
    binary          SHA-256 of the file in the tables' folder `bin`; name: the kernel's symbol in it
    shared          bytes of dynamic shared memory; threads: per thread block
    grid            three of {of, block}: ceil(that size / block) thread blocks, or of {block}: that many
    cluster         thread blocks per cluster: the first axis has that many times the thread blocks
    arguments       of the binary, in its order: pointers, sizes and strides (32 bits) of operands, tensor maps of them
                    (tensor_maps.py), `partials` and `counters` in the workspace, and `null`.  A pointer with `?` is
                    null if the operand is missing
    counters_bytes  at the workspace's beginning; partials_offset: where the partial sums begin; workspace_bytes: in all

An algorithm of a library that programs load anyway (LibraryLaunch), run by hooks/native/cublaslt.h:
    library         "cublaslt"; its version is the solution's stamp
    algo            the library's own description of the algorithm, 64 bytes in hexadecimal
    layout          BLAS letters of X and W, as in the problem; types: data types of x, w, y and bias
    compute         "f32" or "tf32"; fast: 8-bit products may be added up in fewer bits
    scale_x, scale_w    kinds of scales, as in the problem, or ""
    workspace_bytes as above

An operator that is registered with torch in the program (OperatorLaunch), called by hooks/native/operator_call.h:
    operator, schema        its name, and its schema as torch prints it, which must be equal in the program
    arguments               of the operator, in its order: operands by name, `alpha`, `beta`, or constants, of which a
                            text begins with `=`.  An operator that takes `y` writes its result into it
    package, version        of the distribution that registers it; the program must have the same

Records of version 1, which have no `v`, are converted when they are read (launch_v1.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Final, NamedTuple

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.launch_sizes import MAX_ARGUMENTS, MAX_MAPS
from gemmtuned.configs.launch_v1 import check_number, converted
from gemmtuned.configs.operator_arguments import TEXT, Argument, read_arguments
from gemmtuned.configs.problem import MAX_DIM, SCALES, ZERO_POINTS, Problem
from gemmtuned.configs.tensor_maps import tensor_map

VERSION: Final = 2
SLOTS: Final = ("x", "w", "scale_x", "scale_w", "zero_x", "sums_w", "bias", "c", "offs", "y")  # Slot of slots.h
TURNED: Final = {"b": "w", "scale_b": "scale_w"}
OPERANDS: Final = (*SLOTS, *TURNED, "alpha", "beta")  # what may be passed to an operator
WHATS: Final = ("ptr", "size", "stride", "dim", "numel", "contiguous")  # enum What
OPS: Final = ("==", "%", "<=", ">=")  # enum Op
PLAIN: Final = ("partials", "counters", "null")
# Thread blocks per cluster: more than the first number only if the kernel sets the attribute for non-portable cluster
# sizes (CUDA programming guide, thread block clusters), which sm_90 allows up to the second
PORTABLE_CLUSTER: Final = 8
MAX_CLUSTER: Final = 16
MAX_LENGTH: Final = 4096
MAX_CONDITIONS: Final = 32
TYPES: Final = ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "i8", "i32")  # types that a library's operands may have
COMPUTES: Final = ("f32", "tf32", "i32")
INT32_MAX: Final = (1 << 31) - 1
_QUANTITY: Final = r"([a-z_]+)\.(?:(ptr|dim|numel|contiguous)|(size|stride)([0-3]))"
_NUMBERS: Final = {  # field: (smallest, largest)
    "shared": (0, 1 << 20),
    "threads": (32, 1024),
    "cluster": (1, MAX_CLUSTER),
    "partials_offset": (0, 1 << 31),
    "counters_bytes": (0, 1 << 31),
    "workspace_bytes": (0, 1 << 40),
}
_FORMS: Final = {  # as text: compiled when a record is read, not in every program that imports torch
    "binary": r"[0-9a-f]{64}",
    "name": r"[A-Za-z0-9_]{1,200}",
    "library": r"cublaslt",
    "algo": r"[0-9a-f]{128}",
    "layout": r"[nt]{2}",
    "compute": "|".join(COMPUTES),
    "scale_x": "|".join(("", *SCALES[1:])),
    "scale_w": "|".join(("", *SCALES[1:])),
    "operator": r"[A-Za-z_][A-Za-z0-9_]*::[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)?",
    "schema": r"[^\0]+",
    "package": r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,100}",
    "version": r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,100}",
}


class Quantity(NamedTuple):
    """A quantity of an operand, as a record names it: `x.stride0` is ("x", "stride", 0)."""

    slot: str
    what: str
    dim: int


@cache
def quantity(text: str) -> Quantity:
    """The quantity of this name. Raises TableError for a name that this version does not know."""
    match = re.fullmatch(_QUANTITY, text)
    if match is None or (match[1] not in SLOTS and match[1] not in TURNED):
        raise TableError(f"launch has {text[:80]!r}, which this version does not know")
    return Quantity(match[1], match[2] or match[3], int(match[4] or 0))


def is_number(argument: str) -> bool:
    """Whether a kernel's argument for it is a number of 32 bits, and not an address or a map."""
    return argument not in PLAIN and not tensor_map(argument) and quantity(argument.removesuffix("?")).what != "ptr"


class Condition(NamedTuple):
    """A condition on a call. of: a quantity.  value: a number, or a size."""

    of: str
    op: str
    value: int | str


class Axis(NamedTuple):
    """One axis of a grid: ceil(the size `of` / block) thread blocks, or `block` of them if `of` is ""."""

    of: str
    block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What all records have."""

    conditions: tuple[Condition, ...] = ()

    @property
    def named(self) -> frozenset[str]:
        """Slots of the operands that the record takes."""
        raise NotImplementedError

    @property
    def needed(self) -> frozenset[str]:
        """Slots of operands that every call must have."""
        return self.named

    @property
    def checked(self) -> tuple[Condition, ...]:
        """The conditions, and those by which all numbers that the kernel takes fit into 32 bits."""
        return self.conditions

    def at_most(self, of: str) -> int | None:
        """The largest value of a quantity that the conditions allow; None if they do not limit it."""
        values = [c.value for c in self.conditions if c.of == of and c.op == "<=" and isinstance(c.value, int)]
        return min(values, default=None)

    def check_for(self, problem: Problem) -> None:
        """Raise TableError unless the record takes all operands that calls of this problem have, and no others."""
        there = slots_of(problem)
        if there - self.named or self.needed - there:
            raise TableError(
                f"its launch record takes {', '.join(sorted(self.named))}, a {problem.family} call has "
                f"{', '.join(sorted(there))}"
            )

    def text(self) -> str:
        """Canonical JSON."""
        facts = {"v": VERSION, **{f.name: getattr(self, f.name) for f in fields(self)}}
        if "grid" in facts:
            facts["grid"] = [{"of": a.of, "block": a.block} if a.of else {"block": a.block} for a in facts["grid"]]
        return json.dumps(facts, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLaunch(Launch):
    """A published binary. While it is not compiled yet, `binary` and `name` are empty."""

    binary: str = ""
    name: str = ""
    shared: int
    threads: int
    cluster: int = 1
    grid: tuple[Axis, Axis, Axis]
    arguments: tuple[str, ...]
    counters_bytes: int = 0
    partials_offset: int = 0
    workspace_bytes: int = 0

    @property
    def named(self) -> frozenset[str]:
        return frozenset(_slot(a) for a in self.arguments if a not in PLAIN)

    @property
    def needed(self) -> frozenset[str]:
        return frozenset(_slot(a) for a in self.arguments if a not in PLAIN and not a.endswith("?"))

    @property
    def checked(self) -> tuple[Condition, ...]:
        unbound = (a for a in self.arguments if is_number(a) and self.at_most(a) is None)
        return (*self.conditions, *(Condition(a, "<=", INT32_MAX) for a in unbound))


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryLaunch(Launch):
    """An algorithm of a library."""

    library: str
    algo: str
    layout: str
    types: Mapping[str, str]
    compute: str = "f32"
    fast: bool = False
    scale_x: str = ""
    scale_w: str = ""
    workspace_bytes: int = 0

    @property
    def named(self) -> frozenset[str]:
        scaled = {name for name in ("scale_x", "scale_w") if getattr(self, name)}
        return frozenset({"x", "w", "y", "c", "bias"} | scaled)

    @property
    def needed(self) -> frozenset[str]:
        return self.named - {"c", "bias"}

    def check_for(self, problem: Problem) -> None:
        """As Launch.check_for; the data types and the layout must be the problem's as well."""
        p = problem
        Launch.check_for(self, p)
        types = [self.types[name] for name in ("x", "w", "y")]
        mine = (types, self.layout, self.scale_x or "none", self.scale_w or "none")
        if mine != ([p.dtype, p.wdtype, p.out_dtype], p.layout, p.scale, p.wscale):
            raise TableError(f"its launch record is for {' '.join(types)} operands of layout {self.layout}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorLaunch(Launch):
    """A registered operator."""

    operator: str
    schema: str
    arguments: tuple[Argument, ...]
    package: str
    version: str

    @property
    def named(self) -> frozenset[str]:
        given = (a for a in self.arguments if isinstance(a, str) and a not in ("alpha", "beta"))
        return frozenset({"y", *(TURNED.get(a, a) for a in given if not a.startswith(TEXT))})

    @property
    def needed(self) -> frozenset[str]:
        return self.named - {"bias"}  # as None


_KINDS: Final[dict[str, type[Launch]]] = {
    "binary": KernelLaunch, "library": LibraryLaunch, "operator": OperatorLaunch,
}  # fmt: skip


def slots_of(problem: Problem) -> frozenset[str]:
    """Slots of the operands that a call of this problem has, and of its result."""
    found = {"x", "w", "y", *(("bias",) if problem.bias else ())}
    if problem.family in ("dense_add", "batched_add"):
        found.add("c")
    if problem.family == "grouped":
        found.add("offs")
    if problem.scale != "none" or problem.family == "weight_only":
        found |= {"scale_w"} if problem.scale == "none" else {"scale_x", "scale_w"}
    if problem.scale in ZERO_POINTS:
        found |= {"zero_x", "sums_w"} if problem.scale == "row+zero" else {"sums_w"}
    return frozenset(found)


def read_launch(text: str) -> Launch:
    """A KernelLaunch, LibraryLaunch or OperatorLaunch, every field present and in range.

    Raises TableError that names the field.
    """
    if len(text) > MAX_LENGTH:
        raise TableError(f"launch has {len(text)} characters, at most {MAX_LENGTH} are read")
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise TableError(f"launch is not valid JSON ({err})") from err
    if not isinstance(facts, dict):
        raise TableError(f"launch is {type(facts).__name__}, expected an object")
    facts = facts if "v" in facts else converted(facts)
    if facts["v"] != VERSION:
        raise TableError(f"launch is of version {str(facts['v'])[:40]}, this one reads versions 1 and {VERSION}")
    kind = next((kind for word, kind in _KINDS.items() if word in facts), KernelLaunch)
    expected = {"v", *(f.name for f in fields(kind))}
    if set(facts) != expected:
        raise TableError(f"launch has {', '.join(sorted(facts))[:300]}, expected {', '.join(sorted(expected))}")
    del facts["v"]
    for name, value in facts.items():
        if name in _NUMBERS:
            check_number(f"launch.{name}", value, *_NUMBERS[name])
        elif name in _FORMS and (not isinstance(value, str) or not re.fullmatch(_FORMS[name], value)):
            raise TableError(f"launch.{name} is {str(value)[:80]!r}, expected {_FORMS[name]}")
    facts["conditions"] = tuple(_conditions(facts["conditions"]))
    _CHECKS[kind](facts)
    return kind(**facts)


def binary_of(text: str) -> str | None:
    """The binary that a record names, if any. Raises TableError as read_launch does."""
    launch = read_launch(text)
    return launch.binary if isinstance(launch, KernelLaunch) else None


def _conditions(given: object) -> Iterable[Condition]:
    if not isinstance(given, list) or len(given) > MAX_CONDITIONS:
        raise TableError(f"launch.conditions is no list of at most {MAX_CONDITIONS}")
    for one in given:
        if not isinstance(one, list) or len(one) != 3 or not isinstance(one[0], str) or one[1] not in OPS:
            raise TableError(f"launch.conditions has {str(one)[:80]}, expected [quantity, {' '.join(OPS)}, value]")
        of, op, value = one
        found = quantity(of)
        if isinstance(value, str):
            other = quantity(value)
            if op == "%" or other.what != "size" or other.slot in TURNED:
                raise TableError(f"launch.conditions has {str(one)[:80]}, expected a number or a size to compare with")
        else:
            check_number(f"launch.conditions: {of}", value, 0, INT32_MAX)
            if op == "%" and (value < 1 or value & (value - 1)):
                raise TableError(f"launch.conditions: {of} is divided by {value}, expected a power of two")
        if found.what == "ptr" and op != "%":
            raise TableError(f"launch.conditions has {str(one)[:80]}: of an address only its alignment counts")
        yield Condition(of, op, value)


def _check_kernel(facts: dict[str, Any]) -> None:
    arguments, grid = facts["arguments"], facts["grid"]
    if not isinstance(arguments, list) or not arguments or len(arguments) > MAX_ARGUMENTS:
        raise TableError(f"launch.arguments is no list of at most {MAX_ARGUMENTS}")
    for name in arguments:
        if isinstance(name, str) and (name in PLAIN or tensor_map(name)):
            continue
        if not isinstance(name, str) or quantity(name.removesuffix("?")).what not in WHATS[:3]:
            raise TableError(f"launch.arguments has {str(name)[:80]}, expected pointers, sizes, strides and maps")
        if name.endswith("?") and quantity(name[:-1]).what != "ptr":
            raise TableError(f"launch.arguments has {name}: only a pointer may be null")
    once = [name for name in arguments if name != "null"]
    if sum(bool(tensor_map(name)) for name in once) > MAX_MAPS:
        raise TableError(f"launch.arguments has more than {MAX_MAPS} maps")
    if len(set(once)) != len(once) or not {"x", "w", "y"} <= {_slot(name) for name in once if name not in PLAIN}:
        raise TableError(f"launch.arguments is {str(arguments)[:200]}, expected x, w, y and others, each once")
    if not isinstance(grid, list) or len(grid) != 3:
        raise TableError("launch.grid is not a list of three axes")
    axes = []
    for axis in grid:
        if not isinstance(axis, dict) or set(axis) not in ({"of", "block"}, {"block"}):
            raise TableError(f"launch.grid has {str(axis)[:80]}, expected of (a size) and block")
        of = axis.get("of", "")
        if not isinstance(of, str) or (
            of and (quantity(of).what != "size" or quantity(of).slot not in ("x", "w", "y"))
        ):
            raise TableError(f"launch.grid has {str(axis)[:80]}, expected a size of x, w or y")
        check_number("launch.grid.block", axis["block"], 1, MAX_DIM if of else 65535)
        axes.append(Axis(of, axis["block"]))
    room = facts["counters_bytes"] <= facts["partials_offset"] < facts["workspace_bytes"]
    if {"partials", "counters"} & set(arguments) and not room:
        raise TableError("launch takes a workspace, but its offsets do not lie in one")
    if facts["threads"] % 32:
        raise TableError(f"launch.threads is {facts['threads']}, expected a multiple of 32")
    facts["arguments"], facts["grid"] = tuple(arguments), tuple(axes)


def _check_library(facts: dict[str, Any]) -> None:
    types = facts["types"]
    if not isinstance(types, dict) or set(types) != {"x", "w", "y", "bias"} or not set(types.values()) <= set(TYPES):
        raise TableError(f"launch.types is {str(types)[:80]}, expected x, w, y and bias, each of {', '.join(TYPES)}")
    if not isinstance(facts["fast"], bool):
        raise TableError(f"launch.fast is {str(facts['fast'])[:80]}, expected true or false")
    if bool(facts["scale_x"]) != bool(facts["scale_w"]):
        raise TableError("launch has a scale of one operand, expected of both or of none")


def _check_operator(facts: dict[str, Any]) -> None:
    if not facts["schema"].startswith(facts["operator"]):
        raise TableError(f"launch.schema is {facts['schema'][:80]!r}, expected that of {facts['operator']}")
    facts["arguments"] = read_arguments(facts["arguments"], OPERANDS)


_CHECKS: Final = {KernelLaunch: _check_kernel, LibraryLaunch: _check_library, OperatorLaunch: _check_operator}


def _slot(word: str) -> str:
    slot = word.partition(".")[0]
    return TURNED.get(slot, slot)
