"""Which problems the search has a family for, decided without torch; kernels/families says the same of what it makes.

A worker says for its own device what it can tune (Environment.tunable); this is for what is asked for before there is
one: rows of other tools' tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from gemmtuned.configs.problem import FAMILIES, Problem

SCALED_TYPES: Final = (("fp8_e4m3", "fp8_e4m3"), ("fp8_e4m3", "fp8_e5m2"), ("fp8_e5m2", "fp8_e4m3"))
INT8: Final = ("i8", "i8")  # scaled, too, with one scale a tensor or a row, and with zero points
MXFP4: Final = ("fp4_e2m1", "fp4_e2m1")  # scaled, too, with a power of two for each 32 of K of X and of W
INT_PRODUCT: Final = ("i8", "i8", "i32")  # types of X, W and Y of torch._int_mm
SCALED_OUTPUTS: Final = ("bf16", "fp16", "fp32")
GROUPED_SCALED: Final = ("fp8_e4m3", "bf16", "row")  # type of X and W, of Y, and what scales stand for
SCALES: Final = (("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128"), ("128x128", "1x128"))
ZERO_POINTS: Final = (("tensor+zero", "tensor"), ("tensor+zero", "row"), ("row+zero", "row"))  # scales of int8 alone
SHUFFLED_TILE: Final = (16, 32)  # rows by bytes of K, of AITER's pre-shuffled order
SHUFFLED_ROWS: Final = 1024  # rows of X that our kernels take with such a weight: with more, it is turned back
WEIGHT_ONLY_ROWS: Final = 2048  # the same with a weight of 8 or 4 bits: with more, torch makes W anew
WIDENED: Final = ("bf16", "fp16")  # operands' types whose result may be fp32
_WITH_WIDENED: Final = ("dense", "batched")
MOE_TYPES: Final = ("bf16", "fp32", "fp16")
MOE_QUANTISED: Final = ("fp8_e4m3", "1x128", "128x128")  # W, and what a scale stands for where X and H may be quantised
MOE_ACTS: Final = tuple(
    act + more
    for act in ("silu", "silu_gated", "silu_gated_interleaved", "gelu", "gelu_gated", "gelu_gated_interleaved",
                "swiglu_gated", "swiglu_gated_interleaved")
    for more in ("", "_weighted")
)  # fmt: skip
PACKED: Final = {"i4": "int4", "fp4_e2m1": "mxfp4"}  # weights of two numbers a byte, as kernels call them
_OF_MXFP4: Final = ("1x32", "e8m0", "row")  # what a scale stands for, its type, and how scales lie
_OF_TENSORS: Final = (("tensor", "fp32"), ("row", "fp32"), ("128x128", "fp32"))
# Weight-only products: (type of X, of W) -> what one scale of W stands for and its type
WEIGHT_ONLY: Final[dict[tuple[str, str], tuple[tuple[str, str], ...]]] = {
    (x, w): scales
    for x in ("bf16", "fp16")
    for w, scales in {
        "i8": _OF_TENSORS,
        "fp8_e4m3": _OF_TENSORS,
        "i4": tuple((group, dtype) for group in ("1x32", "1x64", "1x128") for dtype in dict.fromkeys((x, "fp32"))),
        "fp4_e2m1": (("1x32", "e8m0"),),
    }.items()
}
_FLOATS: Final = ("fp64", "fp32", "fp16", "bf16", "c128", "c64")  # whose allowed error is known
_GROUPED: Final = ("bf16", "fp32", "fp16")
_QUANTISED: Final = "X may be quantised in mixtures on GPUs whose W is e4m3 with scales of 128x128, by 1x128 alone"
_UNREAD: Final = ("swizzled", "other")  # layouts of scales


def can_tune(problem: Problem) -> bool:
    """Whether the search has a family of ours for it, on some device."""
    return problem.family in FAMILIES and not why_not(problem)


def why_not(problem: Problem) -> str:
    """Why no family of ours can tune it on any device; "" where one can, and for families of other packages.

    A problem with `threads` is one of CPUs.  It does not depend on M.  kernels/families checks the same.
    """
    p = problem
    if p.family not in FAMILIES:
        return ""
    if p.packing:
        return f"its weight is packed ({p.packing}), as only the operator knows that the program calls"
    if p.weight_state == "packed" and (p.family != "dense" or not p.threads):
        return "only dense layers on CPUs have weights that are packed (gemmtuned.freeze)"
    if p.weight_state == "shuffled" and not is_shuffled(p):
        return odd_sizes(p) or "shuffled weights are of scaled products of layout nt, without zero points"
    return _CHECKS.get(p.family, _why_not_plain)(p)


def _why_not_plain(p: Problem) -> str:
    if (p.dtype, p.wdtype, p.out_dtype) == INT_PRODUCT and p.family == "dense":
        return "" if is_int_product(p) else "products of int8 into int32 are X @ W.T of plain operands alone"
    if (p.scale, p.wscale) != ("none", "none"):
        return f"family {p.family} has no scales"
    if p.dtype not in _FLOATS:
        return f"family {p.family} has no operands of {p.dtype}, only of {', '.join(_FLOATS)}"
    wider = p.family in _WITH_WIDENED and widens(p) and not p.bias and not p.threads and p.weight_state == "plain"
    if p.dtype != p.wdtype or (p.out_dtype != p.dtype and not wider):
        return f"family {p.family} has X, W and Y of one type, on GPUs of {' or '.join(WIDENED)} also fp32 without bias"
    return ""


def _why_not_grouped(p: Problem) -> str:
    if p.scale != "none":
        plain = is_scaled_grouped(p) and not p.threads
        return "" if plain else "grouped products with scales are of fp8 with one a row, on GPUs, layout nt, no bias"
    alike = p.dtype == p.wdtype == p.out_dtype and p.dtype in _GROUPED and p.wscale == "none"
    return "" if alike and not p.bias else f"grouped products are of one type of {', '.join(_GROUPED)}, without bias"


def _why_not_scaled(p: Problem) -> str:
    types, scales = (p.dtype, p.wdtype), (p.scale, p.wscale)
    if types == MXFP4:
        fits = "MXFP4 by MXFP4 has e8m0 scales of 1x32 in rows, plain weights of layout nt, into bf16 or fp16"
        return "" if is_mxfp4(p) else odd_sizes(p) or fits
    if p.out_dtype not in SCALED_OUTPUTS or types not in (*SCALED_TYPES, INT8):
        return f"scaled products are of fp8, int8 or MXFP4 into {', '.join(SCALED_OUTPUTS)}"
    if not has_scales(types, scales) or {p.scale_dtype, p.wscale_dtype} != {"fp32"}:
        return f"no kernel is known for such types with scales of {p.scale} by {p.wscale}"
    if {p.scale_layout, p.wscale_layout} & set(_UNREAD) or p.batch != 1:
        return "scaled products have their scales in rows or columns, and no batches"
    if p.threads and scales not in (*SCALES[:2], *ZERO_POINTS):
        return "torch has no scales of blocks on CPUs"
    return ""


def _why_not_weight_only(p: Problem) -> str:
    if not is_weight_only(p):
        return odd_sizes(p) or "X is of 16 bits, and W of 8 or 4 with scales that weight-only kernels are written for"
    return "" if p.batch == 1 and p.layout[1] == "t" else "weight-only products have W by rows, and no batches"


def _why_not_moe(p: Problem) -> str:
    if p.act not in MOE_ACTS or p.n != p.k or p.layout != "nt" or p.batch != 1 or (p.topk or 0) > (p.experts or 0):
        return "mixtures have n = k, layout nt, no batch, topk of their experts and act of AITER's"
    if p.wscale != "none":
        fits = "mixtures have X of 16 bits where W is of 8 or 4, with scales that weight-only kernels are written for"
        if p.scale != "none":
            exactly = replace(p, scale="none", scale_dtype="")
            return "" if may_be_quantised(p) and not p.threads and is_weight_only(exactly) else _QUANTISED
        return odd_sizes(p) or ("" if is_weight_only(p) else fits)
    alike = p.dtype == p.wdtype == p.out_dtype and p.dtype in MOE_TYPES and p.scale == "none"
    return "" if alike else f"mixtures without scales are of one type of {', '.join(MOE_TYPES)}"


def is_int_product(problem: Problem) -> bool:
    """Whether it is what torch._int_mm takes, whose rows have the same bits in every batch as they are."""
    p = problem
    plain = p.weight_state == "plain" and p.scale == p.wscale == "none" and not p.bias and not p.batch_invariant
    return p.family == "dense" and (p.dtype, p.wdtype, p.out_dtype) == INT_PRODUCT and plain


def is_shuffled(problem: Problem) -> bool:
    """Whether it is a scaled product of a weight in AITER's pre-shuffled order, of whole tiles."""
    p, (rows, columns) = problem, SHUFFLED_TILE
    whole = p.family == "scaled" and p.layout == "nt" and not p.n % rows and not p.k % columns
    return whole and p.weight_state == "shuffled" and (p.scale, p.wscale) not in ZERO_POINTS


def is_mxfp4(problem: Problem) -> bool:
    """Whether it is a product of X and W that both hold 4 bits, as `gemm_a4w4` has them, of whole blocks of K."""
    p = problem
    scales = ((p.scale, p.scale_dtype, p.scale_layout), (p.wscale, p.wscale_dtype, p.wscale_layout))
    plain = p.family == "scaled" and p.layout == "nt" and p.weight_state == "plain" and p.batch == 1
    whole = plain and (p.dtype, p.wdtype) == MXFP4 and p.out_dtype in WIDENED and scales == (_OF_MXFP4, _OF_MXFP4)
    return whole and not p.k % group_of(p)


def odd_sizes(problem: Problem) -> str:
    """Why these sizes fit no weight of this kind, of whatever family; "" where they do."""
    p, (rows, columns) = problem, SHUFFLED_TILE
    if p.weight_state == "shuffled" and (p.n % rows or p.k % columns):
        return f"a shuffled weight is of whole tiles, N a multiple of {rows} and K of {columns}"
    if p.wdtype in PACKED and p.wscale.startswith("1x"):
        for size, value in (("K", p.k), ("inter", p.inter or 0)):
            if value % group_of(p):
                return f"{group_of(p)} values have one scale, and {size} is no multiple of that"
    return ""


def is_weight_only(problem: Problem) -> bool:
    """Whether X is of 16 bits, and W alone of 8 or 4 bits, with scales that kernels are written for."""
    p = problem
    if (p.wscale, p.wscale_dtype) not in WEIGHT_ONLY.get((p.dtype, p.wdtype), ()):
        return False
    plain = p.scale == "none" and p.out_dtype == p.dtype and p.wscale_layout == "row"
    return plain and not (p.wdtype in PACKED and p.k % group_of(p))


def group_of(problem: Problem) -> int:
    """Values of K with one scale, of 4 bits."""
    return int(problem.wscale.partition("x")[2].partition("+")[0])


def may_be_quantised(problem: Problem) -> bool:
    """Whether it is a mixture whose caller lets X and H be quantised to e4m3, a scale for each 128 of K."""
    p = problem
    types = (p.wdtype, p.scale, p.wscale)
    return p.family == "moe" and types == MOE_QUANTISED and (p.scale_dtype, p.scale_layout) == ("fp32", "row")


def is_scaled_grouped(problem: Problem) -> bool:
    """Whether it is what torch._scaled_grouped_mm takes in fp8, with a value for each row of X and of each W."""
    p = problem
    dtype, out, scale = GROUPED_SCALED
    types, scales = (p.dtype, p.wdtype, p.out_dtype), (p.scale, p.scale_dtype, p.scale_layout)
    of_w = (p.wscale, p.wscale_dtype, p.wscale_layout)
    plain = p.family == "grouped" and p.layout == "nt" and p.weight_state == "plain" and not p.bias
    return plain and types == (dtype, dtype, out) and scales == of_w == (scale, "fp32", "row")


def has_scales(types: tuple[str, str], scales: tuple[str, str]) -> bool:
    """Whether scaled products of these types of X and W have these scales."""
    return (types in SCALED_TYPES and scales in SCALES) or (types == INT8 and scales in (*SCALES[:2], *ZERO_POINTS))


def widens(problem: Problem) -> bool:
    """Whether the result is fp32 where the operands are of 16 bits: torch.mm(..., out_dtype=torch.float32)."""
    return problem.dtype == problem.wdtype and problem.dtype in WIDENED and problem.out_dtype == "fp32"


_CHECKS: Final[dict[str, Callable[[Problem], str]]] = {
    "grouped": _why_not_grouped, "scaled": _why_not_scaled, "weight_only": _why_not_weight_only, "moe": _why_not_moe,
}  # fmt: skip
