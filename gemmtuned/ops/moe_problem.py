"""The key of a call of fused_moe, under which it is counted and looked up."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from gemmtuned.configs.aiter_columns import SHORT_NAMES
from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.problem import SCALES, Problem, as_by_default
from gemmtuned.configs.tunable import PACKED
from gemmtuned.kernels.mixture import How, Operands

_WEIGHT: Final = {quant: dtype for dtype, quant in PACKED.items()}  # dtypes of weights that lie in bytes
_Scales = tuple[torch.Size, torch.dtype] | None  # one weight's


def problem_of(o: Operands, how: How) -> Problem | None:
    """The key of a call, under which it is counted; None for types that no key has.

    X has its own type and only weights have scales, whatever AITER's key says; X's scale is that by which it may be
    quantised on a GPU.
    """
    if (o.bias1 is None) != (o.bias2 is None) or o.w1.dtype != o.w2.dtype:
        return None
    problem = _problem(
        o.x.shape, o.w1.shape, o.w2.shape, o.ids.shape[1], how, o.bias1 is not None, o.x.dtype, o.w1.dtype,
        _said(o.scale1), _said(o.scale2), torch.are_deterministic_algorithms_enabled(),
        0 if o.x.is_cuda else torch.get_num_threads(),
    )  # fmt: skip
    if problem is None or problem.dtype not in ("bf16", "fp16") or not o.x.is_cuda:
        return problem
    reduces = getattr(torch.backends.cuda.matmul, f"allow_{problem.dtype}_reduced_precision_reduction", False)
    return as_by_default(problem, gpu=True) if reduces else problem


@lru_cache(4096)
def _problem(
    x: torch.Size, w1: torch.Size, w2: torch.Size, topk: int, how: How, bias: bool, dtype: torch.dtype,
    wdtype: torch.dtype, scale1: _Scales, scale2: _Scales, deterministic: bool, threads: int,
) -> Problem | None:  # fmt: skip
    act = how.act + "_gated" * how.gated + "_interleaved" * how.interleaved + "_weighted" * how.weighted
    inter = w2[2] * (2 if how.quant in _WEIGHT else 1)
    try:
        wscale, wscale_dtype = _scales(how.quant, (x[1], inter), scale1, scale2)
        return Problem(
            family="moe", m=x[0], n=x[1], k=x[1], inter=inter, experts=w1[0], topk=topk, act=act, bias=bias,
            scale="none" if threads else how.activations, dtype=SHORT_NAMES[str(dtype)],
            wdtype=_WEIGHT.get(how.quant) or SHORT_NAMES[str(wdtype)], wscale=wscale, wscale_dtype=wscale_dtype,
            deterministic=deterministic, threads=threads,
        )  # fmt: skip
    except (KeyError, ProblemError):
        return None


def _said(scale: Tensor | None) -> _Scales:
    return None if scale is None else (scale.shape, scale.dtype)


def _scales(quant: str, sizes: tuple[int, int], scale1: _Scales, scale2: _Scales) -> tuple[str, str]:
    """(what one scale of both weights stands for, its type). Raises KeyError where no key says it.

    int4 tells its group; one as long as a row is called so where no key has its length.
    """
    if scale1 is None or scale2 is None:
        return "none", ""
    if quant == "mxfp4":
        return "1x32", "e8m0"
    kind, groups = quant, [size // scale[0][-1] for size, scale in zip(sizes, (scale1, scale2), strict=True)]
    if quant == "int4":
        alike = groups[0] == groups[1] and f"1x{groups[0]}" in SCALES
        kind = f"1x{groups[0]}" if alike else "row" if scale1[0][-1] == scale2[0][-1] == 1 else ""
    if not kind or scale1[1] != scale2[1]:
        raise KeyError(f"{groups} values of {scale1[1]} and {scale2[1]}")
    return kind, SHORT_NAMES[str(scale1[1])]
