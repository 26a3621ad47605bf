"""How wrong a result is, and how wrong it may be.

    r = RMS(y - exact) / RMS(exact)        m = max|y - exact| / RMS(exact)

A candidate passes when r <= 1.25 x and m <= 2 x the default backend's own error on the same inputs: no constant
a dtype, and what the user gets is about as good as before.  Two things are added.

A floor, because the default's error is sometimes far below what the dtype can promise: MKL adds fp32 products in
blocks and has r = 2.5e-7 at K = 1024, oneDNN adds them in order and has 4.1e-7, and neither is wrong.  Adding K
products of random sign one after the other in precision u has r of about sqrt(K) u / sqrt(12) = 0.29 sqrt(K) u
(each partial sum is rounded once: variances u^2 i / 6 up to i = K, over a variance of K; Higham and Mary, "A new
approach to probabilistic rounding error analysis", 2019, prove the sqrt(K) u), so 0.5 sqrt(K) u is allowed, and the
last rounding to the output's dtype: RMS u / 2, at most u |y|.  A product lost from randn has r = 1/sqrt(K): it stays
a thousand times above.

A cap, because the default may itself be broken: it holds whatever the default does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.dtypes import UNIT_ROUNDOFF, wide

R_FACTOR: Final = 1.25
M_FACTOR: Final = 2.0
# Largest r whatever the default does. bf16 outputs round to 1.7e-3; tf32 and bf16 are what fp32 inputs are cut to.
CAPS: Final = {"fp64": 1e-12, "fp32": 1e-5, "tf32": 2e-3, "fp16": 5e-3, "bf16": 5e-3, "c128": 1e-12, "c64": 1e-5}


@dataclass(frozen=True, slots=True)
class Error:
    """r and m as above; also used for limits on them."""

    r: float
    m: float

    def within(self, limit: Error) -> bool:
        """False for NaN, too."""
        return self.r <= limit.r and self.m <= limit.m


def measure_error(y: Tensor, exact: Tensor) -> Error:
    """Error of y against the exact result (fp64, same shape). NaN or Inf in y gives NaN or Inf here."""
    diff = (wide(y) - exact).abs()
    rms = max(float(exact.abs().square().mean().sqrt()), 1e-300)
    return Error(float(diff.square().mean().sqrt()) / rms, float(diff.max()) / rms)


def reach(exact: Tensor) -> float:
    """max|exact| / RMS(exact): 4 to 5 for normal numbers, more with outliers."""
    rms = max(float(exact.abs().square().mean().sqrt()), 1e-300)
    return float(exact.abs().max()) / rms


def limits(problem: Problem, default: Error, reach: float) -> Error:
    """The largest error a candidate may have where the default has `default`."""
    u_out = UNIT_ROUNDOFF[problem.out_dtype]
    u_sum = min(u_out, UNIT_ROUNDOFF["fp32"])  # products of 16-bit numbers are added in fp32
    adding = 0.5 * math.sqrt(problem.k) * u_sum
    floor = Error(math.hypot(adding, u_out / 2), 2 * max(reach, 3.0) * adding + u_out * reach)
    cut = problem.math_mode if problem.dtype == "fp32" and problem.math_mode in CAPS else problem.out_dtype
    cap = max(CAPS[cut], floor.r)
    return Error(
        min(max(R_FACTOR * default.r, floor.r), cap),
        min(max(M_FACTOR * default.m, floor.m), 2 * cap * max(reach, 3.0)),
    )
