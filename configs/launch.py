"""The launch record of a solution: JSON text that running programs hand to the driver, so it is checked here.

There are three kinds.  One names a published binary; what it means is told by kernels/triton/launch.py, which makes it,
and hooks/native/cuda_launch.h, which uses it:
    binary          SHA-256 of the file in the tables' folder `bin`; name: the kernel's symbol in it
    shared          bytes of dynamic shared memory; warps of warp_size threads a program
    grid            three of {over, block}: ceil(m or n / block) programs along the axis, or `block` of them
    cluster         programs of a cluster: the first axis has that many times the programs; 1 where there is no field
    arguments       what the binary takes, in its order, then null_pointers null pointers
    ld_multiple     leading dimensions are a multiple of this many elements; pointers of pointer_align bytes
    max_m           the workspace suffices up to here: counters_bytes of it are counters, partial sums begin at
                    partials_offset, workspace_bytes in all

Another names an algorithm of a library that programs have loaded anyway, and is used by hooks/native/cublaslt.h:
    library         "cublaslt"; its version is the solution's stamp
    algo            the library's own description of the algorithm, 64 bytes in hexadecimal
    dtype, layout   of the operands, as in the problem; tf32: products in TF32
    max_m, workspace_bytes, ld_multiple, pointer_align      as above

The third names an operator that is registered with torch in the program, and is called through its dispatcher:
    operator, schema        its name and its schema as torch prints it: another schema is another operator
    arguments               of the operator in its order: operands by name, or constants
    contiguous              operands that must be contiguous
    package, version        of the distribution that registers it; both must be in the program as well
    max_m                   as above
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.problem import MAX_DIM

OPERANDS: Final = ("x", "w", "b", "bias")  # of an operator: X, W [N, K], W as torch.mm takes it, and the bias or none
# In the order of enum Argument and enum Over in hooks/native/cuda_launch.h
ARGUMENTS: Final = ("x", "w", "bias", "y", "partials", "counters", "m", "ldx", "ldw")
OVERS: Final = ("", "m", "n")
# Programs of a cluster: more than the first number only where a kernel is allowed it (CUDA programming guide, thread
# block clusters, non-portable cluster sizes), as sm_90 does up to the second
PORTABLE_CLUSTER: Final = 8
MAX_CLUSTER: Final = 16
MAX_LENGTH: Final = 4096
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_SYMBOL: Final = re.compile(r"[A-Za-z0-9_]{1,200}")
_NUMBERS: Final = {  # field: (smallest, largest)
    "shared": (0, 1 << 20),
    "warps": (1, 32),
    "warp_size": (32, 64),
    "cluster": (1, MAX_CLUSTER),
    "null_pointers": (0, 3),
    "ld_multiple": (1, 64),
    "max_m": (1, MAX_DIM),
    "partials_offset": (0, 1 << 31),
    "counters_bytes": (0, 1 << 31),
    "workspace_bytes": (0, 1 << 40),
    "pointer_align": (1, 256),
}
_FIELDS: Final = {*_NUMBERS, "binary", "name", "grid", "arguments"}
LIBRARY_DTYPES: Final = ("fp32", "fp16", "bf16")
_LIBRARY_NUMBERS: Final = ("max_m", "workspace_bytes", "ld_multiple", "pointer_align")
_LIBRARY_FIELDS: Final = {*_LIBRARY_NUMBERS, "library", "algo", "dtype", "layout", "tf32"}
_ALGO: Final = re.compile(r"[0-9a-f]{128}")
_OPERATOR: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*::[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)?")
_PACKAGE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,100}")
_OPERATOR_FIELDS: Final = {"operator", "schema", "arguments", "contiguous", "package", "version", "max_m"}
MAX_OPERATOR_ARGUMENTS: Final = 16


def read_launch(text: str) -> dict[str, Any]:
    """The fields of a launch record, every one present and in range; it has `library`, `operator` or `binary`.

    Raises TableError that names the field.
    """
    if len(text) > MAX_LENGTH:
        raise TableError(f"launch has {len(text)} characters, at most {MAX_LENGTH} are read")
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise TableError(f"launch is not valid JSON ({err})") from err
    if isinstance(facts, dict) and "operator" in facts:
        _check_operator(facts)
        return facts
    library = isinstance(facts, dict) and "library" in facts
    if isinstance(facts, dict) and not library:
        facts.setdefault("cluster", 1)
    expected = _LIBRARY_FIELDS if library else _FIELDS
    if not isinstance(facts, dict) or set(facts) != expected:
        found = ", ".join(sorted(map(str, facts))) if isinstance(facts, dict) else type(facts).__name__
        raise TableError(f"launch has {found[:300]}, expected {', '.join(sorted(expected))}")
    for name in _LIBRARY_NUMBERS if library else _NUMBERS:
        _number(f"launch.{name}", facts[name], *_NUMBERS[name])
    for name in ("ld_multiple", "pointer_align"):
        if facts[name] & (facts[name] - 1):
            raise TableError(f"launch.{name} is {facts[name]}, expected a power of two")
    if library:
        _check_library(facts)
        return facts
    for name, form in (("binary", _HASH), ("name", _SYMBOL)):
        if not isinstance(facts[name], str) or not form.fullmatch(facts[name]):
            raise TableError(f"launch.{name} is {str(facts[name])[:80]!r}, expected {form.pattern}")
    _check_grid(facts["grid"])
    _check_arguments(facts)
    return facts


def _check_operator(facts: dict[str, Any]) -> None:
    if set(facts) != _OPERATOR_FIELDS:
        raise TableError(f"launch has {', '.join(sorted(facts))[:300]}, expected {', '.join(sorted(_OPERATOR_FIELDS))}")
    for name, form in (("operator", _OPERATOR), ("package", _PACKAGE), ("version", _PACKAGE)):
        if not isinstance(facts[name], str) or not form.fullmatch(facts[name]):
            raise TableError(f"launch.{name} is {str(facts[name])[:80]!r}, expected {form.pattern}")
    if not isinstance(facts["schema"], str) or not facts["schema"].startswith(facts["operator"]):
        raise TableError(f"launch.schema is {str(facts['schema'])[:80]!r}, expected that of {facts['operator']}")
    arguments, contiguous = facts["arguments"], facts["contiguous"]
    known = isinstance(arguments, list) and all(
        x in OPERANDS if isinstance(x, str) else x is None or isinstance(x, int | float) for x in arguments
    )
    if not known or len(arguments) > MAX_OPERATOR_ARGUMENTS or "x" not in arguments:
        raise TableError(f"launch.arguments is {str(arguments)[:200]}, expected operands of {OPERANDS} and constants")
    if not isinstance(contiguous, list) or not all(isinstance(x, str) and x in OPERANDS for x in contiguous):
        raise TableError(f"launch.contiguous is {str(contiguous)[:200]}, expected operands of {OPERANDS}")
    _number("launch.max_m", facts["max_m"], *_NUMBERS["max_m"])


def _check_library(facts: dict[str, Any]) -> None:
    if not isinstance(facts["algo"], str) or not _ALGO.fullmatch(facts["algo"]):
        raise TableError(f"launch.algo is {str(facts['algo'])[:80]!r}, expected {_ALGO.pattern}")
    for name, allowed in (("library", ("cublaslt",)), ("dtype", LIBRARY_DTYPES), ("layout", ("nn", "nt", "tn", "tt"))):
        if facts[name] not in allowed:
            raise TableError(f"launch.{name} is {str(facts[name])[:80]!r}, expected one of {', '.join(allowed)}")
    if not isinstance(facts["tf32"], bool):
        raise TableError(f"launch.tf32 is {str(facts['tf32'])[:80]}, expected true or false")


def _check_grid(grid: object) -> None:
    if not isinstance(grid, list) or len(grid) != 3:
        raise TableError("launch.grid is not a list of three axes")
    for axis in grid:
        if not isinstance(axis, dict) or set(axis) != {"over", "block"} or axis["over"] not in OVERS:
            raise TableError(f"launch.grid has {str(axis)[:80]}, expected over ({', '.join(OVERS)}) and block")
        _number("launch.grid.block", axis["block"], 1, MAX_DIM if axis["over"] else 65535)


def _check_arguments(facts: dict[str, Any]) -> None:
    arguments = facts["arguments"]
    if (
        not isinstance(arguments, list)
        or not all(isinstance(name, str) and name in ARGUMENTS for name in arguments)
        or len(set(arguments)) != len(arguments)
        or not {"x", "w", "y"} <= set(arguments)
    ):
        raise TableError(f"launch.arguments is {str(arguments)[:200]}, expected x, w, y and others of {ARGUMENTS}")
    scratch = {"partials", "counters"} & set(arguments)
    room = facts["counters_bytes"] <= facts["partials_offset"] < facts["workspace_bytes"]
    if scratch and not room:
        raise TableError("launch takes a workspace, but its offsets do not lie in one")
    if facts["warp_size"] * facts["warps"] > 1024:
        raise TableError(
            f"launch has {facts['warps']} warps of {facts['warp_size']}, a program has at most 1024 threads"
        )
    if facts["warp_size"] & (facts["warp_size"] - 1):
        raise TableError(f"launch.warp_size is {facts['warp_size']}, expected a power of two")


def _number(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise TableError(f"{name} is {str(value)[:40]}, expected an integer from {low} to {high}")
