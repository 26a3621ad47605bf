"""Tile configs of vLLM's and SGLang's fused mixture of experts.

    E=128,N=384,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json      {"1": {...}, "2": {...}, ...}

Keys are token counts; the nearest is taken for others.  Newer files say `triton_version`, SGLang's folders are named
`triton_3_4_0`.  N is the width of one expert's shard.  Neither the model's width nor top-k is told, so an entry is no
problem of ours and is kept as it stands.  Source: vLLM's fused_moe.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.hint import Imported
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device, Solution

FORMAT: Final = "vllm-moe"
_NAME: Final = re.compile(
    r"E=(?P<experts>[0-9]{1,6}),N=(?P<inter>[0-9]{1,9}),device_name=(?P<device>[^,]+)(?:,dtype=(?P<dtype>[A-Za-z0-9_]+))?"
    r"(?:,block_shape=\[(?P<block>[0-9]+, ?[0-9]+)\])?(?:,per_channel_quant=[A-Za-z]+)?(?:_down)?"
)
_TOKENS: Final = re.compile(r"[0-9]{1,10}")
_TILES: Final = {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K"}
# (dtype of X, of W) -> the name in the file
_DTYPES: Final = {
    ("fp8_e4m3", "fp8_e4m3"): "fp8_w8a8", ("i8", "i8"): "int8_w8a8", ("bf16", "i8"): "int8_w8a16",
    ("bf16", "i4"): "int4_w4a16", ("bf16", "bf16"): "", ("fp16", "fp16"): "",
}  # fmt: skip


def is_ours(path: Path, raw: object) -> bool:
    """Whether it is one, by its name or by its keys."""
    if _NAME.fullmatch(path.stem):
        return isinstance(raw, dict)
    entries = [value for key, value in raw.items() if _TOKENS.fullmatch(key)] if isinstance(raw, dict) else []
    return bool(entries) and all(isinstance(value, dict) and set(value) >= _TILES for value in entries)


def read(path: Path, raw: Mapping[str, Any]) -> Imported:
    """One hint for each token count."""
    told = _NAME.fullmatch(path.stem)
    found = Imported(path=str(path), format=FORMAT, family="fused_moe", kind="tuned")
    named = {name: value for name, value in (told.groupdict() if told else {}).items() if value}
    version = re.fullmatch(r"triton_([0-9]+)_([0-9]+)_([0-9]+)", path.parent.name)  # SGLang's folders
    triton = ".".join(version.groups()) if version else raw.get("triton_version")
    if isinstance(triton, str):
        named["triton"] = triton[:40]
    for number, (key, config) in enumerate(raw.items(), 1):
        if key == "triton_version":
            continue
        wrong = _fault(key, config)
        if wrong:
            found.reject(f"{path} entry {key[:40]!r}: {wrong}")
            continue
        plain = {name: value for name, value in config.items() if value is not None}
        found.add(number, {"tokens": key, **named, "config": config}, candidate=Candidate.of("vllm_moe", **plain))
    return found


def _fault(key: str, config: object) -> str:
    if not _TOKENS.fullmatch(key):
        return "not a token count"
    if not isinstance(config, dict) or not set(config) >= _TILES:
        return f"no tile, expected {', '.join(sorted(_TILES))}"
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
    """Write one file. Raises TableError when the disk refuses."""
    try:
        path.write_text(json.dumps(entries, indent=4) + "\n")
    except OSError as err:
        raise TableError(f"{path}: cannot be written ({err.strerror or err})") from err
