"""Which problems the search has a family for, decided without torch; kernels/families says the same of what it makes.

A worker says for its own device what it can tune (Environment.tunable); this is for what is asked for before there is
one: rows of other tools' tables.
"""

from __future__ import annotations

from typing import Final

from gemmtuned.configs.problem import Problem

SCALED_TYPES: Final = (("fp8_e4m3", "fp8_e4m3"), ("fp8_e4m3", "fp8_e5m2"), ("fp8_e5m2", "fp8_e4m3"))
INT8: Final = ("i8", "i8")  # scaled, too, with one scale a tensor or a row, and with zero points
MXFP4: Final = ("fp4_e2m1", "fp4_e2m1")  # scaled, too, with a power of two for each 32 of K of X and of W
INT_PRODUCT: Final = ("i8", "i8", "i32")  # types of X, W and Y of torch._int_mm
SCALED_OUTPUTS: Final = ("bf16", "fp16", "fp32")
GROUPED_SCALED: Final = ("fp8_e4m3", "bf16", "row")  # type of X and W, of Y, and what scales stand for
SCALES: Final = (("tensor", "tensor"), ("row", "row"), ("1x128", "128x128"), ("1x128", "1x128"), ("128x128", "1x128"))
ZERO_POINTS: Final = (("tensor+zero", "tensor"), ("tensor+zero", "row"), ("row+zero", "row"))  # scales of int8 alone
SHUFFLED_TILE: Final = (16, 32)  # rows by bytes of K, of AITER's pre-shuffled order
SHUFFLED_ROWS: Final = 1024  # of X beside such a weight that kernels of ours take: with more, it is turned back
WEIGHT_ONLY_ROWS: Final = 2048  # of X beside a weight of 8 or 4 bits: with more, torch makes W anew
WIDENED: Final = ("bf16", "fp16")  # operands' types whose result may be fp32
_WITH_WIDENED: Final = ("dense", "batched")
MOE_TYPES: Final = ("bf16", "fp32", "fp16")
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
_PLAIN: Final = ("dense", "batched", "dense_add", "batched_add", "grouped")


def can_tune(problem: Problem) -> bool:
    """Whether the search has a family for it, on some device."""
    p = problem
    if p.weight_state != "plain" and not is_shuffled(p):
        return False
    if p.family == "scaled" and (p.dtype, p.wdtype) == MXFP4:
        return is_mxfp4(p)
    if p.family == "scaled":
        types, scales = (p.dtype, p.wdtype), (p.scale, p.wscale)
        if p.out_dtype not in SCALED_OUTPUTS or not has_scales(types, scales) or p.batch != 1:
            return False
        on_cpu = scales in (*SCALES[:2], *ZERO_POINTS) or not p.threads  # torch has no blocks of scales there
        return on_cpu and {p.scale_dtype, p.wscale_dtype} == {"fp32"}
    if p.family == "grouped" and p.scale != "none":
        return is_scaled_grouped(p) and not p.threads
    if p.family == "weight_only":
        return is_weight_only(p) and p.batch == 1
    if (p.dtype, p.wdtype, p.out_dtype) == INT_PRODUCT and p.family == "dense":
        return is_int_product(p)
    wider = p.family in _WITH_WIDENED and widens(p) and not p.bias and not p.threads
    if p.family == "moe":
        if p.act not in MOE_ACTS or p.n != p.k:
            return False
        if p.wscale != "none":
            return is_weight_only(p) and not (p.wdtype in PACKED and (p.inter or 1) % group_of(p))
        if p.dtype not in MOE_TYPES:
            return False
    return (
        p.family in (*_PLAIN, "moe") and p.scale == "none" and p.dtype == p.wdtype and (p.out_dtype == p.dtype or wider)
    )


def is_int_product(problem: Problem) -> bool:
    """Whether it is what torch._int_mm takes, whose rows have the same bits in every batch as they are."""
    p = problem
    plain = p.weight_state == "plain" and p.scale == "none" and not p.bias and not p.batch_invariant
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
    return int(problem.wscale.partition("x")[2])


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
