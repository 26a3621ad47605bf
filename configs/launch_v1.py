"""Launch records of version 1, as gemmtuned 0.1 wrote them, in the words of version 2 (launch.py).

They had no list of conditions: what a call must be like stood in the code that read them, and is written out here.
A binary took `x, w, bias, y, partials, counters, m, ldx, ldw`; `ld_multiple` and `pointer_align` held for all operands.
"""

from __future__ import annotations

from typing import Any, Final

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.problem import MAX_DIM

_MEANING: Final = {
    "x": "x.ptr", "w": "w.ptr", "bias": "bias.ptr", "y": "y.ptr", "partials": "partials", "counters": "counters",
    "m": "x.size0", "ldx": "x.stride0", "ldw": "w.stride0",
}  # fmt: skip
_OVER: Final = {"": "", "m": "x.size0", "n": "w.size0"}
_KERNEL: Final = frozenset({
    "binary", "name", "shared", "warps", "warp_size", "grid", "cluster", "arguments", "null_pointers", "ld_multiple",
    "max_m", "counters_bytes", "partials_offset", "workspace_bytes", "pointer_align",
})  # fmt: skip
_LIBRARY: Final = frozenset({
    "library", "algo", "dtype", "layout", "tf32", "max_m", "workspace_bytes", "ld_multiple", "pointer_align",
})  # fmt: skip
_OPERATOR: Final = frozenset({"operator", "schema", "arguments", "contiguous", "package", "version", "max_m"})
_RANGES: Final = {
    "warps": (1, 32), "warp_size": (32, 64), "null_pointers": (0, 3), "ld_multiple": (1, 64), "pointer_align": (1, 256),
    "max_m": (1, MAX_DIM),
}  # fmt: skip


def converted(facts: dict[str, Any]) -> dict[str, Any]:
    """The fields of the same record in version 2, `v` among them; read_launch checks what is taken over as it stands.

    Raises TableError that names the field.
    """
    if "operator" not in facts and "library" not in facts:
        facts = {"cluster": 1, **facts}  # from before there were clusters
    expected = _OPERATOR if "operator" in facts else _LIBRARY if "library" in facts else _KERNEL
    if set(facts) != expected:
        raise TableError(f"launch has {', '.join(sorted(facts))[:300]}, expected {', '.join(sorted(expected))}")
    for name, (low, high) in _RANGES.items():
        if name in facts:
            check_number(f"launch.{name}", facts[name], low, high)
    for name in ("ld_multiple", "pointer_align", "warp_size"):
        if name in facts and facts[name] & (facts[name] - 1):
            raise TableError(f"launch.{name} is {facts[name]}, expected a power of two")
    make = _operator if "operator" in facts else _library if "library" in facts else _kernel
    return {"v": 2, **make(facts)}


def _kernel(facts: dict[str, Any]) -> dict[str, Any]:
    given, grid = facts["arguments"], facts["grid"]
    if not isinstance(given, list) or not all(isinstance(name, str) and name in _MEANING for name in given):
        raise TableError(f"launch.arguments is {str(given)[:200]}, expected names of {', '.join(_MEANING)}")
    if not isinstance(grid, list) or not all(
        isinstance(a, dict) and set(a) == {"over", "block"} and isinstance(a["over"], str) and a["over"] in _OVER
        for a in grid
    ):
        raise TableError(f"launch.grid is {str(grid)[:200]}, expected axes of over (m, n or nothing) and block")
    kept = ("binary", "name", "shared", "cluster", "counters_bytes", "partials_offset", "workspace_bytes")
    return {name: facts[name] for name in kept} | {
        "threads": facts["warps"] * facts["warp_size"],
        "grid": [{"of": _OVER[a["over"]], "block": a["block"]} if a["over"] else {"block": a["block"]} for a in grid],
        "arguments": [*(_MEANING[name] for name in given), *["null"] * facts["null_pointers"]],
        "conditions": [
            _most(facts), *_matrix("x", 1, facts), *_matrix("w", 1, facts),
            *(_vector("bias", facts) if "bias" in given else ()),
        ],
    }  # fmt: skip


def _library(facts: dict[str, Any]) -> dict[str, Any]:
    layout, dtype, tf32 = facts["layout"], facts["dtype"], facts["tf32"]
    for name, allowed in (("dtype", ("fp32", "fp16", "bf16")), ("layout", ("nn", "nt", "tn", "tt"))):
        if facts[name] not in allowed:
            raise TableError(f"launch.{name} is {str(facts[name])[:80]!r}, expected one of {', '.join(allowed)}")
    if not isinstance(tf32, bool):
        raise TableError(f"launch.tf32 is {str(tf32)[:80]}, expected true or false")
    conditions = [_most(facts)]
    for name, unit in (("x", int(layout[0] == "n")), ("w", int(layout[1] == "t"))):  # X [M, K] and W [N, K]
        conditions += [*_matrix(name, unit, facts), [f"{name}.stride{1 - unit}", ">=", f"{name}.size{unit}"]]
    return {name: facts[name] for name in ("library", "algo", "layout", "workspace_bytes")} | {
        "types": dict.fromkeys(("x", "w", "y", "bias"), dtype), "compute": "tf32" if tf32 else "f32", "fast": False,
        "scale_x": "", "scale_w": "", "conditions": [*conditions, *_vector("bias", facts)],
    }  # fmt: skip


def _operator(facts: dict[str, Any]) -> dict[str, Any]:
    contiguous = facts["contiguous"]
    if not isinstance(contiguous, list) or not all(x in ("x", "w", "b", "bias") for x in contiguous):
        raise TableError(f"launch.contiguous is {str(contiguous)[:200]}, expected operands")
    return {name: facts[name] for name in ("operator", "schema", "arguments", "package", "version")} | {
        "conditions": [_most(facts), *([f"{name}.contiguous", "==", 1] for name in contiguous)]
    }


def _most(facts: dict[str, Any]) -> list[Any]:
    return ["x.size0", "<=", facts["max_m"]]


def _matrix(name: str, unit: int, facts: dict[str, Any]) -> list[list[Any]]:
    """unit: the dimension along which it lies without gaps."""
    return [
        [f"{name}.stride{unit}", "==", 1],
        [f"{name}.stride{1 - unit}", "%", facts["ld_multiple"]],
        [f"{name}.ptr", "%", facts["pointer_align"]],
    ]


def _vector(name: str, facts: dict[str, Any]) -> list[list[Any]]:
    return [[f"{name}.stride0", "==", 1], [f"{name}.ptr", "%", facts["pointer_align"]]]


def check_number(name: str, value: object, low: int, high: int) -> None:
    """Raise TableError unless it is an integer in this range."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise TableError(f"{name} is {str(value)[:40]}, expected an integer from {low} to {high}")
