"""What the files beside a config.json say that it does not: weights of other types, GGUF files, an adapter.

Of safetensors the header alone is read (8 bytes of length, then JSON: name -> dtype, shape), never a weight.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.model_rules import Rules
from gemmtuned.configs.read_file import read_regular

_PLAIN: Final = frozenset(("F64", "F32", "F16", "BF16"))
_WEIGHT: Final = re.compile(
    r"(^|[._])(q?weight|weight_packed|gate_up_proj|down_proj|\w+_blocks)$"
)  # not masks, positions
_MOST_HEADER: Final = 32 << 20
_MOST_FILES: Final = 2000
_FLOATS: Final = frozenset(("", "bfloat16", "float16", "half", "float32", "float", "float64", "bf16", "fp16", "fp32"))


def with_files(rules: Rules | None, folder: str, dtype: str) -> tuple[Rules | None, list[str]]:
    """(the rules, or those of what only the files in the model's folder tell; notes). folder: "" where there is none.

    dtype: torch's name of the one that config.json tells.
    """
    if not folder:
        return rules, []
    odd = _unsaid(Path(folder), dtype) if rules is None else ""
    return Rules("", notes=[f"{odd}: none is planned"]) if odd else rules, _adapter(Path(folder))


def _unsaid(folder: Path, dtype: str) -> str:
    """Why the weights are not of the model's own dtype though its configs say no more; "" where nothing tells so."""
    if dtype not in _FLOATS:
        return f"config.json tells dtype {dtype}, and not how weights of it are scaled"
    names = _names(folder)
    tensors = [name for name in names if name.endswith(".safetensors")]
    gguf = next((name for name in names if name.endswith(".gguf")), "")
    if gguf and not tensors and not any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return f"the weights are GGUF files ({gguf}), whose types are not read"
    for name in tensors[:_MOST_FILES]:
        for tensor, kept in _tensors(folder / name):
            if kept not in _PLAIN:
                return f"{name} has {tensor} as {kept}, and config.json tells no quantisation"
    return ""


def _adapter(folder: Path) -> list[str]:
    """A line on an adapter that lies in the folder of its model."""
    if not (folder / "adapter_config.json").is_file():
        return []
    return ["adapter_config.json lies beside config.json: the products of an adapter that is not merged are not listed"]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def _tensors(path: Path) -> Iterator[tuple[str, str]]:
    """(name, dtype) of the weights of linear layers in a file; none where it is no safetensors (a pointer of LFS)."""
    try:
        head = read_regular(path, 8)
        size = int.from_bytes(head, "little")
        if len(head) < 8 or not 2 <= size <= _MOST_HEADER:
            return
        header: Any = json.loads(read_regular(path, 8 + size)[8:])
    except (OSError, ValueError, RecursionError):
        return
    for name, entry in header.items() if isinstance(header, Mapping) else ():
        shape = entry.get("shape") if isinstance(entry, Mapping) else None
        if isinstance(shape, list) and len(shape) >= 2 and _WEIGHT.search(str(name)):
            yield str(name), str(entry.get("dtype"))
