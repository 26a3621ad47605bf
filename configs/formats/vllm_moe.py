"""Tile configs of vLLM's and SGLang's Triton kernels: fused mixtures of experts, and dense products with block scales.

    E=128,N=384,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json      {"1": {...}, "2": {...}, ...}
    N=2112,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json
    N=15360,K=3840,device_name=...,dtype=fp8_w8a8_per_token,input_dtype=float8_e4m3fn,out_dtype=bfloat16.json

Keys are token counts; the nearest is taken for others.  Newer files say `triton_version`, SGLang's folders are named
`triton_3_4_0`.  With E the file is a mixture's and N the width of one expert's shard: neither the model's width nor
top-k is known, so an entry is no problem of ours and is kept as it stands.  With N and K alone it is a dense product,
whose entries are seeds.  A file whose name has neither is kept, and taken for neither.  Source: vLLM's fused_moe.py
and fp8_utils.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.aiter_columns import DTYPE_NAMES
from gemmtuned.configs.errors import ProblemError, TableError
from gemmtuned.configs.hint import Imported
from gemmtuned.configs.numbers import odd_count
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device, Solution
from gemmtuned.configs.temporary import put

MOE: Final = "vllm-moe"
DENSE: Final = "vllm-blockscale"
_PART: Final = re.compile(r"([A-Za-z_]+)=(\[[^\]]*\]|[^,\[\]]+)(?:,|$)")
_LEAST: Final = {
    **dict.fromkeys(("BLOCK_SIZE_K", "BLOCK_SIZE_M", "BLOCK_SIZE_N", "GROUP_SIZE_M", "SPLIT_K", "num_warps"), 1),
    **dict.fromkeys(("num_stages", "waves_per_eu", "matrix_instr_nonkdim", "kpack"), 0),
}
_SIZE: Final = re.compile(r"[0-9]{1,10}")
_TILES: Final = {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K"}
# (dtype of X, of W) -> the name in the file
_DTYPES: Final = {
    ("fp8_e4m3", "fp8_e4m3"): "fp8_w8a8", ("i8", "i8"): "int8_w8a8", ("bf16", "i8"): "int8_w8a16",
    ("bf16", "i4"): "int4_w4a16", ("bf16", "bf16"): "", ("fp16", "fp16"): "",
}  # fmt: skip
_WORDS: Final = {"E": "experts", "K": "k", "device_name": "device", "block_shape": "block"}
_BLOCK_DTYPES: Final = {"fp8_w8a8": "fp8_e4m3", "int8_w8a8": "i8"}
_NO_SIGNED_ZERO: Final = re.compile(r"MI3(00|08|25)")  # AMD's first generation has the fp8 without a signed zero
_ANY_AMD: Final = re.compile(r"AMD_Radeon_Graphics|AMD_Instinct|AMD")  # what drivers call GPUs of either generation
_TWICE: Final = "stands twice"  # in place of a part's value


def is_ours(path: Path, raw: object) -> bool:
    """Whether it is one, by its name or by its keys."""
    if not isinstance(raw, dict):
        return False
    if {"N", "device_name"} <= set(_named(path)):
        return True
    entries = [value for key, value in raw.items() if _SIZE.fullmatch(key)]
    return bool(entries) and all(isinstance(value, dict) and set(value) >= _TILES for value in entries)


def read(path: Path, raw: Mapping[str, Any]) -> Imported:
    """One hint for each token count."""
    named = _named(path)
    dense = "K" in named and "E" not in named
    family = "blockscale" if dense else "fused_moe" if "E" in named else "tiles"
    found = Imported(path=str(path), format=DENSE if dense else MOE, family=family, kind="tuned")
    version = re.fullmatch(r"triton_([0-9]+)_([0-9]+)_([0-9]+)", path.parent.name)  # SGLang's folders
    triton = ".".join(version.groups()) if version else raw.get("triton_version")
    if isinstance(triton, str):
        named["triton"] = triton[:40]
    names = {**_WORDS, "N": "n" if dense else "inter"}
    words = {names.get(name, name): value for name, value in named.items()}
    for number, (key, config) in enumerate(raw.items(), 1):
        if key == "triton_version":
            continue
        wrong = _fault(key, config)
        if wrong:
            found.reject(f"{path} entry {key[:40]!r}: {wrong}")
            continue
        plain = {name: value for name, value in config.items() if value is not None}
        problem = _problem(named, int(key)) if dense else _UNTOLD[family]
        found.add(
            number,
            {"tokens": key, **words, "config": config},
            problem=problem if isinstance(problem, Problem) else None,
            why=problem if isinstance(problem, str) else "",
            candidate=Candidate.of("vllm_blockscale" if dense else "vllm_moe", **plain),
        )
    return found


_UNTOLD: Final = {
    "fused_moe": "a mixture's tile: the file tells neither the model's width nor top-k",
    "tiles": "the file's name tells neither N and K nor the number of experts",
}


def _problem(named: Mapping[str, str], m: int) -> Problem | str:
    """The dense product that one entry is for, or why there is none."""
    kind, out_dtype = named.get("dtype", ""), "bf16"
    block = re.sub(r"\s", "", named.get("block_shape", ""))
    device = named.get("device_name", "")
    odd = set(named) - {"N", "K", "device_name", "dtype", "block_shape", "triton", "input_dtype", "out_dtype"}
    if odd:
        return f"{min(odd)}={named[min(odd)]} in the file's name is not known"
    if _TWICE in named.values():
        return f"{next(name for name in named if named[name] is _TWICE)} stands twice in the file's name"
    if kind.endswith("_per_token") and not block and {"input_dtype", "out_dtype"} <= set(named):
        dtype, scale = DTYPE_NAMES.get(named["input_dtype"], named["input_dtype"]), "row"
        out_dtype = DTYPE_NAMES.get(named["out_dtype"], named["out_dtype"])
        fits = dtype.startswith(kind.split("_", 1)[0]) or (dtype, kind) == ("i8", "int8_w8a8_per_token")
    else:
        dtype, scale = _BLOCK_DTYPES.get(kind, ""), "1x128"
        fits = bool(dtype) and block == "[128,128]" and not {"input_dtype", "out_dtype"} & set(named)
        if dtype.startswith("fp8") and (not device or _ANY_AMD.fullmatch(device)):
            return f"device_name {device or 'is missing and'} does not tell which fp8 the device multiplies"
        if dtype.startswith("fp8") and _NO_SIGNED_ZERO.search(device):
            dtype = "fp8_e4m3fnuz"
    if not fits:
        said = ",".join(f"{name}={named[name]}" for name in ("dtype", "block_shape", "input_dtype") if name in named)
        return f"{said or 'no dtype'}: no problem of gemmtuned's"
    try:
        n, k = int(named["N"]), int(named["K"])
        return Problem(family="scaled", m=m, n=n, k=k, dtype=dtype, out_dtype=out_dtype, scale=scale)
    except (ProblemError, ValueError) as err:
        return str(err)


def _named(path: Path) -> dict[str, str]:
    """What the file's name tells, part by part; {} where it is not made of parts."""
    stem = path.stem.removesuffix("_down")  # SGLang's ending for the second product of a mixture
    parts: dict[str, str] = {}
    at = 0
    while at < len(stem):
        part = _PART.match(stem, at)
        if part is None:
            return {}
        parts[part[1]] = _TWICE if part[1] in parts else part[2]
        at = part.end()
    if stem != path.stem and "E" not in parts:
        parts["_down"] = "the end"
    return parts


def _fault(key: str, config: object) -> str:
    if not _SIZE.fullmatch(key):
        return "not a token count"
    if not isinstance(config, dict) or not set(config) >= _TILES:
        return f"no tile, expected {', '.join(sorted(_TILES))}"
    wrong = next((f"{name} is None" for name in sorted(_TILES) if config[name] is None), "") or odd_count(
        config, _LEAST
    )
    if wrong:
        return wrong
    odd = [name for name, value in config.items() if not isinstance(value, (int, str, type(None)))]
    return f"parameter {odd[0][:40]} is no plain value" if odd else ""


def file_name(problem: Problem, device: Device) -> str | None:
    """vLLM's name of the file a mixture's solution goes to; None where it has no word for the dtypes."""
    dtype = _DTYPES.get((problem.dtype, problem.wdtype))
    if problem.family != "moe" or dtype is None:
        return None
    block = ",block_shape=[128,128]" if problem.scale == "1x128" else ""
    name = f"E={problem.experts},N={problem.inter},device_name={device.name.replace(' ', '_')}"
    return f"{name}{f',dtype={dtype}' if dtype else ''}{block}.json"


def tables(solutions: Sequence[Solution], device: Device) -> tuple[dict[str, dict[str, Any]], list[Solution]]:
    """(file name -> token count -> config, solutions that no file can hold); of two for one count the faster."""
    files: dict[str, dict[int, Solution]] = {}
    left = []
    for solution in solutions:
        name = file_name(solution.problem, device)
        if name is None or not set(json.loads(solution.config)) >= _TILES:
            left.append(solution)
            continue
        kept = files.setdefault(name, {})
        other = kept.get(solution.problem.m)
        if other is None or solution.us < other.us:
            kept[solution.problem.m] = solution
    return {name: {str(m): json.loads(kept[m].config) for m in sorted(kept)} for name, kept in files.items()}, left


def write(path: Path, entries: Mapping[str, Any]) -> None:
    """Write one file. Raises TableError when the disk refuses; then what was there stays."""
    try:
        put(path, (json.dumps(entries, indent=4) + "\n").encode())
    except OSError as err:
        raise TableError(f"{path}: cannot be written ({err.strerror or err})") from err
