"""Weights of 8 and 4 bits with scales, as families draw them for their inputs.

Of 8 bits a sixteenth is any code that is a number, so that none is never tried; all others are normal numbers far from
both ends of their type.  Of 4 bits codes are drawn alike, but for int4's -8, which has no counterpart: as often as
others it would keep sums from being around 0.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tunable import PACKED

APART, INTEGERS = "apart", "integers"  # kinds of inputs that have weights of their own
_RMS: Final = {"i4": 4.2, "fp4_e2m1": 2.926, "fp8_e4m3": 39.8, "i8": 36.1}  # the RMS of what is drawn here
_USUAL: Final = 32  # how much normal numbers are multiplied by
_NAN: Final = 0x7F  # NaN in e4m3, with either sign


def quant_of(problem: Problem) -> str:
    """What dequantised calls the problem's weights; `none` where they have no scales."""
    return PACKED.get(problem.wdtype, problem.wscale)


def drawn(problem: Problem, shape: tuple[int, ...], dtype: torch.dtype, kind: str, random: torch.Generator) -> Tensor:
    """Weights [.., rows, K], of 4 bits [.., rows, K / 2] in bytes."""
    of: Any = {"generator": random, "device": random.device}
    if problem.wdtype in PACKED:
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, **of)
        if problem.wdtype == "i4":
            rare = torch.randint(0, 64, shape, dtype=torch.uint8, **of) == 0
            codes = torch.where((codes & 0x0F == 0) & ~rare, codes | 0x08, codes)
            codes = torch.where((codes & 0xF0 == 0) & ~rare, codes | 0x80, codes)
        return codes
    if kind == INTEGERS:
        return torch.randint(-2, 3, shape, **of).float().to(dtype)
    values = torch.empty(shape, device=random.device).normal_(generator=random).mul_(_USUAL)
    values = values if dtype.is_floating_point else values.round_().clamp_(-127, 127)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, **of)
    rare = torch.randint(0, 16, shape, dtype=torch.uint8, **of) == 0
    if dtype.is_floating_point:
        rare &= codes & _NAN != _NAN
    return torch.where(rare, codes, values.to(dtype).view(torch.uint8)).view(dtype)


def scales(
    problem: Problem, shape: tuple[int, ...], dtype: torch.dtype, kind: str, usual: float, random: torch.Generator,
    *, wide: int = 2,
) -> Tensor:  # fmt: skip
    """Scales that make such weights numbers of this size; of kind `integers` usual * 2^-wide to usual * 2^wide.

    Those of 4 bits, and of kind `apart`, differ from each other.
    """
    most = {APART: 4, INTEGERS: wide}.get(kind, 1 if problem.wdtype in PACKED else 0)
    powers = torch.randint(-most, most + 1, shape, generator=random, device=random.device).float()
    factor = usual if kind == INTEGERS else usual / _RMS[problem.wdtype]
    if dtype == torch.uint8:  # e8m0
        return (powers + math.floor(math.log2(factor)) + 127).to(torch.uint8)
    return (torch.exp2(powers) * factor).to(dtype)
