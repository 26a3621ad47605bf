"""What the columns of AITER's tables hold, and how their text is read.

A reader takes the text of a cell, stripped, and gives its value; it raises ValueError with what goes on after the text
in a complaint ("is not a whole number").  Missing values are `""`, `None`, `Null` and pandas' `nan`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from gemmtuned.configs.aiter_headers import AiterFamily
from gemmtuned.configs.problem import DTYPES, MAX_DIM

Parse = Callable[[str], Any]
# AITER's and torch's names for ours, lower case, without "torch." or "dtypes."
DTYPE_NAMES: Final = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "float64": "fp64",
    "int8": "i8", "uint8": "u8", "int32": "i32", "int16": "i16", "int64": "i64", "int4": "i4", "i4x2": "i4",
    "uint32": "u32", "float8_e4m3fn": "fp8_e4m3", "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "float8_e5m2": "fp8_e5m2", "float8_e5m2fnuz": "fp8_e5m2fnuz", "float4_e2m1fn_x2": "fp4_e2m1", "fp4x2": "fp4_e2m1",
    "f32": "fp32", "f16": "fp16", "float8_e8m0fnu": "e8m0", "fp8_e8m0": "e8m0",
}  # fmt: skip
_TORCH_NAMES: Final = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "i8": "int8", "u8": "uint8",
    "i4": "int4", "fp8_e4m3": "float8_e4m3fn", "fp8_e4m3fnuz": "float8_e4m3fnuz", "fp8_e5m2": "float8_e5m2",
    "fp8_e5m2fnuz": "float8_e5m2fnuz", "fp4_e2m1": "float4_e2m1fn_x2", "e8m0": "float8_e8m0fnu",
}  # fmt: skip
# Data types that problems of ours have no word for: rows with them are kept as they are.  fp8 is AITER's word for
# whichever fp8 the device has, u32 for eight int4 in a word
_FOREIGN: Final = re.compile(r"(mx|nv)?(fp|bf|nf|f|uint|int|u|i|float|bfloat)[0-9]{1,3}[a-z0-9_]{0,24}")
NOTHING: Final = frozenset({"", "none", "null", "nan", "<na>", "n/a", "#n/a", "na", "-"})
_BOOLS: Final = {"true": True, "1": True, "false": False, "0": False}
_INTEGER: Final = re.compile(r"-?[0-9]{1,18}(\.0+)?")
_WORD: Final = re.compile(r"[A-Za-z0-9_.:+-]{0,64}")


def torch_name(dtype: str) -> str:
    """Our short name as AITER writes it: bf16 is torch.bfloat16. Ours where torch has none."""
    return f"torch.{_TORCH_NAMES.get(dtype, dtype)}"


# torch's names with "torch.", as str() of a dtype gives them, for ours
SHORT_NAMES: Final = {torch_name(short): short for short in DTYPES}


@lru_cache(16_384)  # there are thousands of M
def _size(text: str) -> int:
    """M, N, K and the like."""
    if text.isascii() and text.isdigit():
        value = int(text[:20])  # a longer number is too large anyway
    elif _INTEGER.fullmatch(text) and (text[0] == "-" or "." in text):  # pandas writes whole numbers so after a gap
        value = int(text.partition(".")[0])
    else:
        raise ValueError("is not a whole number")
    if value < 1:
        raise ValueError("must be 1 or more")
    if value > MAX_DIM:
        raise ValueError(f"is out of range, expected an integer from 1 to {MAX_DIM}")
    return value


@lru_cache(4096)
def _integer(text: str) -> int | None:
    """Kernel numbers: -1 is a library's own choice."""
    if text.lower() in NOTHING:
        return None
    if not _INTEGER.fullmatch(text):
        large = text.isascii() and text.removeprefix("-").isdigit()
        raise ValueError("is too large" if large else "is not an integer")
    return int(text.partition(".")[0])


def real(text: str) -> float | None:
    """A time, a rate; infinity is one, nan is none."""
    try:
        if text.isascii() and "_" not in text:
            number = float(text)
            return None if number != number and text.lower() in NOTHING else number
    except ValueError:
        pass
    if text.lower() in NOTHING:
        return None
    raise ValueError("is not a number")


def _share(text: str) -> float | None:
    """An error ratio: 0.005 or 0.5%."""
    return real(text[:-1]) if text.endswith("%") else real(text)


@lru_cache(4096)
def _bool(text: str) -> bool:
    if text.lower() in NOTHING:
        return False
    found = _BOOLS.get(text.lower().removesuffix(".0"))
    if found is None:
        raise ValueError("is neither True nor False")
    return found


@lru_cache(4096)
def _dtype(text: str) -> str | None:
    if text.lower() in NOTHING:
        return None
    short = text.lower().removeprefix("aiter.").removeprefix("torch.").removeprefix("dtypes.")
    found = DTYPE_NAMES.get(short, short)
    if found not in DTYPES and not _FOREIGN.fullmatch(found):
        raise ValueError("is no dtype we know")
    return found


_ENUMS: Final = ("torch.", "dtypes.", "aiter.dtypes.", "quanttype.", "activationtype.")


@lru_cache(4096)
def decides(text: str, *, flag: bool = False) -> bool:
    """Whether a cell of a column that nobody knows is a data type, or another of AITER's words for products.

    flag: whether it may be True or False, which in a column of figures are another column's.
    """
    low = text.lower()
    if low in ("true", "false"):
        return not flag
    known = low in DTYPES or low in ("fp8", "fp4") or (low in DTYPE_NAMES and low not in ("float", "half"))
    return known or low.startswith(_ENUMS)


def _topk(text: str) -> int | None:
    """Experts a token; AITER's lists of models whose tokens choose them otherwise say -1."""
    return None if text == "-1" else _size(text)


@lru_cache(4096)
def _word(text: str) -> str:
    if text.lower() in NOTHING:
        return ""
    if not _WORD.fullmatch(text):
        raise ValueError("is not a plain name")
    return text


@lru_cache(4096)
def _arch(text: str) -> str:
    """An architecture: gfx950, sm_90. A number in its place tells that the cells stand one column off."""
    if text[:1].isdigit():
        raise ValueError("is no architecture")
    return _word(text)


CHECKED: Final[dict[str, Parse]] = {
    **dict.fromkeys(("kernelId", "solidx", "splitK", "block_m", "ksplit", "cu_num", "algo_index"), _integer),
    **dict.fromkeys(("us", "us1", "us2", "total_us", "duration", "tflops", "bw", "bandwidth_gb_s"), real),
    **dict.fromkeys(("errRatio", "err_ratio", "err1", "err2"), _share),
    **dict.fromkeys(("libtype", "lib"), _word),
    **dict.fromkeys(("gfx", "arch", "gfx_arch", "gpu_arch"), _arch),
}
_BOOL_COLUMNS: Final = frozenset({
    "bias", "scaleAB", "bpreshuffle", "use_g1u1", "doweight_stage1", "is_varlen", "use_h0", "store_fs",
})  # fmt: skip
_WORD_COLUMNS: Final = frozenset({"act_type", "q_type", "gate_mode"})
_OPTIONAL: Final = frozenset({"shared_expert_id", "hidden_pad", "intermediate_pad"})


def parser(column: str, family: AiterFamily) -> Parse:
    """The reader of a key column."""
    if column in _BOOL_COLUMNS:
        return _bool
    if "dtype" in column:
        return _dtype
    if column in _WORD_COLUMNS:
        return _word
    if column == "topk":
        return _topk
    if column in _OPTIONAL or family.name in ("gdn", "hipblaslt_online"):
        return _integer
    return _word if column == "case" else _size
