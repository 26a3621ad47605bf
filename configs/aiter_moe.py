"""Types and scales of a mixture of experts, in AITER's columns and in our words.

AITER quantises X in the call where weights are quantised, and its key tells to what.  `gemmtuned.ops.fused_moe` takes X
as it is unless its caller lets it be quantised, and what serves the former serves the latter: rows that differ in what
AITER makes of X are one problem of ours, that of the same call.
"""

from __future__ import annotations

from typing import Final

from gemmtuned.configs.problem import Problem

# aiter.QuantType -> the scales of weights; where it is called with 128x128, AITER asks for 1x128
SCALES: Final = {
    "per_Tensor": "tensor", "per_Token": "row", "per_1x32": "1x32", "per_1x128": "128x128", "per_128x128": "128x128",
}  # fmt: skip


def types(out: str, x: str | None, w: str | None, kind: str) -> dict[str, str]:
    """The problem's columns; out, x, w: what the row says of Y, X and weights.  kind: of its scales."""
    kind = kind.rpartition(".")[2]
    x = x or out
    if kind == "No":
        return {"dtype": x, "wdtype": w or x, "out_dtype": out}
    wscale = SCALES.get(kind, kind)
    return {"dtype": out, "wdtype": w or x, "wscale": wscale, "wscale_dtype": _of_scales(out, w or x, wscale)}


def says_all(problem: Problem) -> bool:
    """Whether AITER has words for the types and scales."""
    p = problem
    if p.scale != "none" or p.wscale == "none":
        return (p.scale, p.wscale) == ("none", "none")
    known = p.wscale in SCALES.values() and p.wscale_dtype == _of_scales(p.dtype, p.wdtype, p.wscale)
    return known and p.out_dtype == p.dtype


def type_of_x(problem: Problem) -> str:
    """What AITER makes of X in such a call: weights of 8 bits multiply their like, and MXFP4 but for swiglu."""
    p = problem
    if p.wscale == "none" or p.wdtype == "i4":
        return p.dtype
    return p.dtype if p.wdtype == "fp4_e2m1" and (p.act or "").startswith("swiglu") else p.wdtype


def _of_scales(dtype: str, wdtype: str, wscale: str) -> str:
    """The type of scales, which AITER does not tell: those of int4's groups are of X's."""
    return dtype if (wdtype, wscale) == ("i4", "1x32") else "e8m0" if wscale == "1x32" else "fp32"
