"""What the name of one of AITER's tables tells: its family, and what speaks against it."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

# Parts of file names, most telling first; AITER writes a8w8_tuned_batched_gemm as well as a8w8_blockscale_..._mm2.5
_PARTS: Final = (
    ("mxscale_preshuffle", "mxscale_preshuffle"),
    ("mxscale_bpreshuffle_untuned", "mxscale_preshuffle"),
    ("mxscale_bpreshuffle_tuned", "mxscale_preshuffle"),
    ("smallm_mxfp8", "smallm_mxfp8"),
    ("asm_a8w8", "asm_a8w8"),
    ("grouped_gemm_mxfp8", "grouped_mxfp8"),
    ("a8w8_mxscale", "a8w8_mxscale"),
    ("mxscale", "batched_mxscale"),
    ("a8w8_blockscale_wpreshuffle", "a8w8_blockscale_bpreshuffle"),
    ("a8w8_bpreshuffle_mxfp8", "a8w8_bpreshuffle_mxfp8"),
    ("a8w8_blockscale_bpreshuffle", "a8w8_blockscale_bpreshuffle"),
    ("a8w8_blockscale", "a8w8_blockscale"),
    ("a8w8_bpreshuffle", "a8w8_bpreshuffle"),
    ("a4w4", "a4w4_blockscale"),
    ("a6w6", "a6w6_blockscale"),
    ("a8w8", "a8w8"),
    ("bf16", "bf16"),
    ("a16w16", "bf16"),
)
# Words of a file's name that tell a data type or a kind of product
_TELLING: Final = re.compile(
    r"[aw]\d{1,2}([aw]\d{1,2})?|(mx|nv)?(fp|f|int|i|u|float)\d{1,2}|bf16|fp8\w*|mx\w*|nvfp\w*|nf4|awq|gptq|marlin|"
    r"quant\w*|\w*scale[ds]?|e\dm\d\w*|ptpc|\w*moe|batched|bmm|grouped|\w*pre?shuffled?|shuffled?|fp8fp4|block\w*|"
    r"\d{1,3}x\d{1,3}|per_?(\d+x\d+|t\w+|channel|block)|channelwise|rowwise|tensorwise"
)
# Those that tell how operands are kept or multiplied, wherever they stand: others after AITER's own name are a model's
_KIND: Final = re.compile(r"\w*pre?shuffled?|\w*blockscale\w*|batched|bmm|ptpc")
_SCALED_BY_BLOCKS: Final = frozenset({"blockscale", "1x128", "128x128", "block", "blockwise"})
_SHUFFLED: Final = frozenset({"bpreshuffle", "wpreshuffle", "preshuffle", "preshuffled", "shuffled"})
_BATCHED: Final = frozenset({"batched", "bmm"})
_FP8: Final = frozenset({"fp8", "f8", "float8", "e4m3", "e4m3fn", "e4m3fnuz", "ptpc"})
_INT8: Final = frozenset({"int8", "i8"})


def family_of_name(name: str) -> str:
    """The family a file's name tells, or ""."""
    stem = name.rsplit("/", 1)[-1].lower()
    found = next((family for part, family in _PARTS if part in stem), "")
    if "batched" in stem and found in ("bf16", "a8w8"):
        return f"batched_{found}"
    return found


def _words(name: str) -> list[str]:
    stem = re.sub(r"\.(csv|txt)$", "", name.rsplit("/", 1)[-1].lower())
    return [word for word in re.split(r"[^a-z0-9]+", stem) if word]


def _agrees(family: str) -> frozenset[str]:
    """The telling words that a file of this family may have in its name."""
    plain = family.removeprefix("batched_").removeprefix("asm_")
    kinds = {"a4w4": {"a4w4", "fp4", "mxfp4", "1x32"}, "a8w8": {"a8w8"}, "bf16": {"bf16", "a16w16"}}
    found = {word for start, words in kinds.items() if plain.startswith(start) for word in words}
    if plain.startswith("a8w8"):
        found |= _FP8
    if plain in ("a8w8", "a8w8_bpreshuffle"):
        found |= _INT8  # a file without q_dtype_w is one of these
    if "blockscale" in plain:
        found |= _SCALED_BY_BLOCKS
        found -= {"ptpc"}
    if "shuffle" in plain or family.startswith("asm"):
        found |= _SHUFFLED
    if family.startswith("batched"):
        found |= _BATCHED | (_INT8 if plain == "a8w8" else frozenset())
    if family.startswith("asm"):
        found |= {"asm"}
    return frozenset(found)


def contradiction(family: str, name: str) -> str:
    """A word of the file's name that speaks of another product than this family's, or "". family: "" for none yet."""
    words, known = _words(name), _agrees(family)
    own = len(words)
    if family:  # what follows AITER's own name is a model's
        own = next((position for position, word in enumerate(words) if position and word in ("tuned", "untuned")), own)
    telling = (word for position, word in enumerate(words) if (_TELLING if position < own else _KIND).fullmatch(word))
    return next((word for word in telling if word not in known), "")


@lru_cache(64)
def dtype_told(name: str) -> str:
    """What a file's name says that its 8-bit weights are: fp8, i8, both or "".

    Only tables without a column for it are asked so.
    """
    words = {*_words(name)}
    fp8 = bool(words & _FP8) or any(word.startswith("fp8") for word in words)
    i8 = bool(words & _INT8)
    return "both" if fp8 and i8 else "fp8" if fp8 else "i8" if i8 else ""


def canonical_name(family: str, kind: str) -> str:
    """AITER's file name for a family's table: bf16_tuned_gemm.csv, a8w8_untuned_batched_gemm.csv, tuned_fmoe.csv ..."""
    if "moe" in family:
        return f"{kind}_{family}.csv"
    if family == "batched_mxscale":
        return f"batched_gemm_a8w8_blockscale_mxscale_{kind}.csv"
    if family.startswith("batched_"):
        return f"{family.removeprefix('batched_')}_{kind}_batched_gemm.csv"
    if family == "gdn":
        return f"chunk_gdn_h_opt_{kind}.csv"
    return f"{family}_{kind}_gemm.csv"
