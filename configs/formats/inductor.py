"""Inductor's lookup table (torch._inductor.lookup_table): which template and tile a GEMM gets when it is compiled.

    {"((torch.bfloat16, [8, 1024], [1024, 1]), (torch.bfloat16, [1024, 2048], [1, 1024]))+mm":
        [{"template_id": "triton::mm", "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "num_stages": 3, "num_warps": 4}]}

A key names each operand's dtype, size and strides, scalars (`+alpha=1&beta=1`), the operation and, in front, perhaps
the device.  A program sets `torch._inductor.config.lookup_table.table` to the parsed object.  Source: choices.py of
torch 2.13.  Keys are parsed here by their form; nothing in them is evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.aiter_columns import DTYPE_NAMES, torch_name
from gemmtuned.configs.errors import ProblemError, TableError
from gemmtuned.configs.hint import Imported
from gemmtuned.configs.numbers import odd_count, whole
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import DEFAULT_BACKEND, Candidate, Solution
from gemmtuned.configs.temporary import put

FORMAT: Final = "inductor"
_KEY: Final = re.compile(
    r"(?:(?P<device>[^(+][^(]{0,200}?)\+)?\((?P<operands>\(.+\)),?\)"
    r"(?:\+(?P<scalars>[a-z]+=[^+]*))?\+(?P<op>\w+)(?:\+tf32=(?P<tf32>True|False))?"  # the last in torch 2.10's keys
)
_OPERAND: Final = re.compile(r"\(torch\.(\w+), \[([0-9, ]*)\], \[([0-9, ]*)\]\)")
_MAX_KEY: Final = 4096
_TILES: Final = {
    "BLOCK_M": "tokens", "BLOCK_N": "rows", "BLOCK_K": "block_k", "GROUP_M": "group", "num_warps": "warps",
    "num_stages": "stages",
}  # fmt: skip
_USUAL: Final = {"group": 1}
_LEAST: Final = {**dict.fromkeys(_TILES, 1), "num_stages": 0}
_OPS: Final = {"mm": 2, "addmm": 2, "bmm": 3, "baddbmm": 3}  # and the axes of what they multiply


def is_ours(raw: object) -> bool:
    """Whether parsed JSON is a lookup table: lists of configs under keys that name operands."""
    return isinstance(raw, dict) and any(isinstance(key, str) and _KEY.fullmatch(key[:_MAX_KEY]) for key in raw)


def read(path: Path, raw: Mapping[str, Any]) -> Imported:
    """One hint for each config of each key."""
    found = Imported(path=str(path), format=FORMAT, family=FORMAT, kind="tuned")
    number = 0
    for key, configs in raw.items():
        match = _KEY.fullmatch(key) if len(key) <= _MAX_KEY else None
        entries = configs if isinstance(configs, list) else [configs]
        for config in entries:
            number += 1
            if match is None:
                found.reject(f"{path} entry {number}: key {key[:80]!r} does not name operands and operation")
            elif not isinstance(config, dict) or not isinstance(config.get("template_id"), str):
                found.reject(f"{path} entry {number}: no template_id")
            elif wrong := odd_count(config, _LEAST):
                found.reject(f"{path} entry {number}: {wrong}")
            else:
                problem = _problem(match)
                device = match["device"] or ""
                arch = device.partition(":")[0] if device.startswith("gfx") else ""
                row = {"key": key, "config": config, "device": device}
                found.add(
                    number,
                    row,
                    problem=problem if isinstance(problem, Problem) else None,
                    why=problem if isinstance(problem, str) else "",
                    candidate=_candidate(config),
                    arch=arch,
                )
    return found


def _problem(key: re.Match[str]) -> Problem | str:
    """The product that a key names, or why it is no problem of ours."""
    op = key["op"]
    if op not in _OPS:
        return f"operation {op[:40]} is no problem of gemmtuned's"
    if (key["scalars"] or "alpha=1&beta=1") != "alpha=1&beta=1":
        return f"{op} with {key['scalars'][:60]} is no problem of gemmtuned's"
    try:
        operands = _operands(key["operands"])
    except ValueError as err:
        return str(err)
    adds = op in ("addmm", "baddbmm")
    if len(operands) != 2 + adds:
        return f"{op} of {len(operands)} operands is not known"
    *third, (dtype, x, x_strides), (wdtype, w, w_strides) = operands
    if not len(x) == len(w) == _OPS[op] or x[-1] != w[-2] or x[:-2] != w[:-2]:
        return f"{op} of sizes {x} and {w} does not fit"
    out = [*x[:-1], w[-1]]
    for kind, size, _ in third:
        if kind != dtype or size not in (out, out[-1:]):
            return f"{op} that adds {kind} of size {size} to {dtype} of {out} is no problem of gemmtuned's"
    family = "dense" if len(x) == 2 else "batched"
    bias = adds and (len(third[0][1]) == 1 or third[0][2][:-1] in ([0], [0, 0]))
    values: dict[str, Any] = {
        "family": f"{family}_add" if adds and not bias else family, "m": x[-2], "k": x[-1], "n": w[-1],
        "batch": x[0] if len(x) == 3 else 1, "bias": bias, "dtype": dtype, "wdtype": wdtype,
        "layout": _letter(x, x_strides) + _letter(w, w_strides),
        "math_mode": "tf32" if key["tf32"] == "True" else "ieee",
    }  # fmt: skip
    try:
        return Problem(**values)
    except ProblemError as err:
        return f"no problem of gemmtuned's: {err}"


def _operands(text: str) -> list[tuple[str, list[int], list[int]]]:
    """(dtype, size, strides) of each. Raises ValueError where one is not made of numbers, as sizes of any length."""
    odd = _OPERAND.sub("", text).strip(", ")
    if odd:
        raise ValueError(f"operand {odd[:60]} is not a type, a size and strides in numbers")
    return [
        (DTYPE_NAMES.get(dtype, dtype), _numbers(size), _numbers(strides))
        for dtype, size, strides in _OPERAND.findall(text)
    ]


def _numbers(text: str) -> list[int]:
    numbers = [whole(part.strip()) for part in text.split(",") if part.strip()]
    if None in numbers:
        raise ValueError(f"size [{text[:60]}] cannot be read")
    return [number for number in numbers if number is not None]


def _letter(size: list[int], strides: list[int]) -> str:
    """The layout of one operand: row-major, column-major or neither."""
    if len(strides) != len(size):
        return "s"
    if strides[-1] == 1 or size[-1] == 1:
        return "n"
    return "t" if strides[-2] == 1 or size[-2] == 1 else "s"


def _candidate(config: Mapping[str, Any]) -> Candidate | None:
    template = config["template_id"]
    if template.startswith("aten::"):
        return Candidate(DEFAULT_BACKEND)
    ours = {name: config.get(theirs, _USUAL.get(name)) for theirs, name in _TILES.items()}
    if template == "triton::mm" and all(isinstance(value, int) and 0 < value < 1 << 20 for value in ours.values()):
        return Candidate.of("triton", kernel="tiles", swap=0, split=1, **ours)
    plain = {name: value for name, value in config.items() if isinstance(value, (int, str))}
    found = Candidate.of("inductor", **plain)
    return found if len(found.config) <= 4096 else None


def entry_of(solution: Solution) -> tuple[str, dict[str, Any]] | None:
    """(key, config) for a solution; None where Inductor has neither template nor operation for it."""
    p = solution.problem
    if p.family not in ("dense", "batched") or "s" in p.layout or p.scale != "none" or p.weight_state != "plain":
        return None
    op = {("dense", False): "mm", ("dense", True): "addmm", ("batched", False): "bmm"}.get((p.family, p.bias))
    config = json.loads(solution.config)
    if op is None or p.out_dtype != p.dtype:
        return None
    if solution.backend == DEFAULT_BACKEND:
        found: dict[str, Any] = {"template_id": "aten::bias_addmm" if op == "addmm" else f"aten::{op}"}
    elif solution.backend == "triton" and config.get("kernel") == "tiles" and config["split"] == 1:
        template = "triton::bmm" if op == "bmm" else "triton::mm"
        found = {"template_id": template, **{theirs: config[name] for theirs, name in _TILES.items()}}
    else:
        return None
    batch = [p.batch] if p.family == "batched" else []
    operands = [
        _operand(p.dtype, [*batch, p.m, p.k], p.layout[0]),
        _operand(p.wdtype, [*batch, p.k, p.n], p.layout[1]),
    ]
    if op == "addmm":  # the bias as Inductor sees it: expanded over the rows
        operands.insert(0, f"({torch_name(p.dtype)}, [{p.m}, {p.n}], [0, 1])")
    scalars = "+alpha=1&beta=1" if op == "addmm" else ""
    return f"({', '.join(operands)}){scalars}+{op}", found


def _operand(dtype: str, size: list[int], letter: str) -> str:
    *batch, rows, columns = size
    strides = [columns, 1] if letter == "n" else [1, rows]
    if batch:
        strides.insert(0, rows * columns)
    return f"({torch_name(dtype)}, {size}, {strides})"


def write(path: Path, entries: Mapping[str, list[dict[str, Any]]]) -> None:
    """Write a table. Raises TableError when the disk refuses; then what was there stays."""
    try:
        put(path, (json.dumps(entries, indent=1, sort_keys=True) + "\n").encode())
    except OSError as err:
        raise TableError(f"{path}: cannot be written ({err.strerror or err})") from err
