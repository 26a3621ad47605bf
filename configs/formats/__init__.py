"""Tables of other tools, read as hints: one file a format; `read_any` tells which it is.

A reader takes a path and gives an Imported; it raises TableError for a file that is none of its format.  `gemmtuned
import` asks `read_any`; what is written by `gemmtuned export` is in the same files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemmtuned.configs import triton_json
from gemmtuned.configs.aiter_csv import MAX_BYTES, lines_of, open_text
from gemmtuned.configs.aiter_text import numbered
from gemmtuned.configs.errors import HeaderError, TableError
from gemmtuned.configs.formats import aiter, bundle, inductor, others, tunableop, vllm_moe
from gemmtuned.configs.hint import Imported
from gemmtuned.configs.manifest import MANIFEST

MAX_JSON_BYTES = 8 << 20  # parsed it takes twenty times as much


def read_any(path: Path, *, family: str | None = None, ignore: Sequence[str] = ()) -> Imported:
    """Read a file, or a folder that we published or exported, by what is in it.

    family: of an AITER table that does not tell it.  ignore: columns of such tables that do not matter.  Raises
    TableError when it is none of the formats.
    """
    if path.name == MANIFEST:
        path = path.parent
    if path.is_dir():
        return bundle.read(path)
    try:
        with open_text(path, limit=MAX_BYTES) as file:
            start = file.read(4096)
    except OSError as err:
        raise TableError(f"{path}: cannot be read ({err.strerror or err})") from err
    said = others.what_it_is(start)
    if said:
        raise TableError(f"{path}: it is {said}")
    if not start.lstrip().startswith(("{", "[")):
        if tunableop.is_ours(start):
            return tunableop.read(path)
        try:
            return aiter.read_csv(path, family=family, ignore=ignore)
        except HeaderError as err:
            raise TableError(f"{err}, or TunableOp's results, whose first word is Validator") from err
    return _read_json(path)


def rows_in(path: Path) -> int:
    """How many rows there are in a file that is refused as a whole: lines under a header, or entries of a JSON object.

    0 for what cannot be read.
    """
    try:
        with open_text(path, limit=MAX_BYTES) as file:
            start = file.read(4096)
        if not start.lstrip().startswith(("{", "[")):
            return max(sum(1 for _ in numbered(lines_of(path), str(path))) - 1, 0)
        with open_text(path, limit=MAX_JSON_BYTES) as file:
            raw = json.load(file)
        return len(raw) if isinstance(raw, (dict, list)) else 0
    except (TableError, OSError, ValueError, RecursionError):
        return 0


def _read_json(path: Path) -> Imported:
    pairs: list[tuple[str, Any]] = []  # the object read last, which is the whole: JSON keeps one of equal keys

    def noted(found: list[tuple[str, Any]]) -> dict[str, Any]:
        pairs[:] = found
        return dict(found)

    try:
        with open_text(path, limit=MAX_JSON_BYTES) as file:
            raw = json.load(file, object_pairs_hook=noted)
    except (OSError, ValueError, RecursionError) as err:
        raise TableError(f"{path}: not valid JSON ({err})") from err
    if triton_json.is_tiles(raw):
        return aiter.read_tiles(path)
    if vllm_moe.is_ours(path, raw):
        return _with_lost(vllm_moe.read(path, raw), pairs)
    if inductor.is_ours(raw):
        return _with_lost(inductor.read(path, raw), pairs)
    raise TableError(
        f"{path}: JSON of no format we know, expected AITER's or vLLM's tile configs or Inductor's lookup table"
    )


def _with_lost(found: Imported, pairs: list[tuple[str, Any]]) -> Imported:
    """Add a complaint for each entry whose key stands there twice: the last one hides it."""
    times = Counter(key for key, _ in pairs)
    seen: Counter[str] = Counter()
    for key, value in pairs:
        seen[key] += 1
        for _ in range((len(value) if isinstance(value, list) else 1) if seen[key] < times[key] else 0):
            found.reject(f"{found.path} entry {key[:40]!r}: stands {times[key]} times, the last is taken")
    return found
