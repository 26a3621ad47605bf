"""What somebody may have meant by a word that is none of those known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

_TORCHS_NAMES: Final[Mapping[str, str]] = {
    "float32": "fp32", "float": "fp32", "f32": "fp32", "single": "fp32", "float64": "fp64", "double": "fp64",
    "f64": "fp64", "float16": "fp16", "half": "fp16", "f16": "fp16", "bfloat16": "bf16", "int8": "i8", "uint8": "u8",
    "int16": "i16", "int32": "i32", "int": "i32", "int64": "i64", "long": "i64", "int4": "i4",
    "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "float8_e5m2fnuz": "fp8_e5m2fnuz", "float8_e8m0fnu": "e8m0", "float4_e2m1fn_x2": "fp4_e2m1",
    "fp8": "fp8_e4m3", "linear": "dense", "mm": "dense", "addmm": "dense", "bmm": "batched", "baddbmm": "batched_add",
    "grouped_mm": "grouped", "scaled_mm": "scaled",
}  # fmt: skip


def nearest(word: object, known: Iterable[str]) -> str:
    """The one of `known` that is written nearly like this, or that torch calls so; "" where there is none."""
    if not isinstance(word, str) or len(word) > 60:
        return ""
    words = {name: name for name in known}
    words |= {called: name for called, name in _TORCHS_NAMES.items() if name in words and called not in words}
    asked = word.strip().lower().removeprefix("torch.")
    if asked in words:
        return words[asked]
    from difflib import get_close_matches  # programs that run import this module and ask nothing

    alike = 0.5 if len(asked) < 4 else 0.6  # one of two letters may be wrong
    return next((words[near] for near in get_close_matches(asked, words, n=1, cutoff=alike)), "")


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """`. Did you mean fp32?` for the end of an error, or "" where nothing is near."""
    meant = nearest(word, known)
    return f". Did you mean {meant}?" if meant else ""
