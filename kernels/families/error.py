"""The error of a result, and the largest error that is allowed.

    r = RMS(y - exact) / RMS(exact)        m = max|y - exact| / RMS(exact)

A candidate passes when r <= 1.25 x and m <= 2 x the default backend's own error on the same inputs.  So there is no
constant per dtype, and the user's results are about as good as before.  There are also a floor and a cap.

The floor is there because the default's error is sometimes far below what the dtype can promise: MKL adds fp32 products
in blocks and has r = 2.5e-7 at K = 1024, oneDNN adds them in order and has 4.1e-7, and neither is wrong.  The floor is
the error that adding one product after the other may have, in any order chosen without looking at the numbers:

    Each rounding of a partial sum s is off by at most half a last digit, evenly spread: RMS u |s| / sqrt(3) at most,
    and 0 in the mean, whatever came before (the model of Connolly, Higham and Mary, "Stochastic rounding and its
    probabilistic backward error analysis", SIAM J. Sci. Comput. 43, 2021).  Weights are drawn independently around 0,
    so that in RMS over W no partial sum is larger than Y itself (as in Higham and Mary, "Sharper probabilistic
    backward error analysis for basic linear algebra kernels with random data", 42, 2020).  Hence
    r <= sqrt((K + 1) / 3) u, the bias included.  It is reached where one product outweighs all others and comes
    first; products of one size have half of it, 0.29 sqrt(K) u.
    For m the same with max|s|, which by Levy's inequality is spread as max|y| is, times DEVIATIONS: a sum of such
    errors is beyond that many of its standard deviations with a probability below 2 exp(-DEVIATIONS^2 / 2) = 3e-8
    (Hoeffding's inequality).  r over few results may be that far off its mean, too: the RMS of n normal numbers is
    beyond 1 + DEVIATIONS / sqrt(n) with less than half of that probability (Laurent and Massart, "Adaptive estimation
    of a quadratic functional", Ann. Statist. 28, 2000).  And a single y may be small by chance although its
    products are not: sizes are never taken to be below those that they have in the mean.

The last rounding, to the output's dtype, is added: RMS u / 2, at most u |y|.  For fp64 inputs the exact result consists
of fp64 sums itself, so the variance doubles.  A product that is lost from randn has r = 1/sqrt(K), a thousand times
more than the floor.

The cap is there because the default itself may be broken; it holds whatever the default's error is.

A mixture of experts rounds to its type at several points, and a right one may round in all of them.  Their effects on Y
are added up as variances, in units of one rounding (u / 2 at most, as above): weights are independent and around 0, so
that a relative error of H's elements is the same relative error of Y:
    C     the gate's sums: a relative error of g is g act'(g) / act(g) times that in act(g), the condition number of
          a function (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 1.6); in the mean over
          normal g of any size C = E[(g act'(g))^2] / E[act(g)^2] is at most 1.46 for silu and swiglu, 1.49 for gelu
    1     the sums of up
    2     H, and H of the exact result: near a tie they round apart
    1     what an expert adds
    1     Y
    C + 2 weights that are dequantised to the type: gate, up and down
Where the caller lets X and H be quantised to e4m3, with scales that are powers of two and round nothing, their
roundings are added to the floor and to the cap.  One of X is off by RMS u / sqrt(3) of its size at most, and where one
number of a row outweighs all others, gate and up are off by the same share of themselves and H by (sqrt(C) + 1) times
that; H's own rounding is another: (sqrt(C) + 1)^2 + 1 of them as a variance.
A kernel says that it makes use of this (Kernel `quantises`); any other is held to the limits of a problem without it.
R_FACTOR times the root of their sum, with the allowance for chance in few results as above, is the least cap that lets
every right candidate pass; tests/kernels/test_kernels_moe.py compares the sum with the error of torch's own form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tunable import may_be_quantised
from gemmtuned.kernels.dtypes import UNIT_ROUNDOFF, wide
from gemmtuned.kernels.kernel import Kernel

R_FACTOR: Final = 1.25
M_FACTOR: Final = 2.0
DEVIATIONS: Final = 6.0  # how many standard deviations are allowed for chance
# Largest r, whatever the default's is. bf16 outputs round by 1.7e-3; tf32 and bf16 are modes that round fp32 inputs.
CAPS: Final = {
    "fp64": 1e-12, "fp32": 1e-5, "tf32": 2e-3, "fp16": 5e-3, "bf16": 5e-3, "c128": 1e-12, "c64": 1e-5, "i32": 0.0,
}  # fmt: skip
_CONDITION: Final = 1.5  # C above, of the worst activation
_E4M3: Final = 2.0**-4  # its unit roundoff


@dataclass(frozen=True, slots=True)
class Error:
    """r and m of a result, or limits on them."""

    r: float
    m: float

    def within(self, limit: Error) -> bool:
        """False for NaN, too."""
        return self.r <= limit.r and self.m <= limit.m


def measure_error(y: Tensor, exact: Tensor) -> Error:
    """Error of y against the exact result (fp64, same shape). NaN or Inf in y gives NaN or Inf here."""
    diff = (wide(y) - exact).abs()
    rms = max(_rms(exact), 1e-300)
    return Error(float(diff.square().mean().sqrt()) / rms, float(diff.max()) / rms)


@dataclass(frozen=True, slots=True)
class Spread:
    """The number of results, and their sizes as multiples of RMS(exact).

    largest: max|exact|: 4 to 5 for normal numbers, more with outliers.
    expected: the RMS expected over all weights, at least 1; more if the results are few and happen to be small.
    """

    count: int
    largest: float
    expected: float = 1.0

    @classmethod
    def of(cls, exact: Tensor, x: Tensor) -> Spread:
        """exact: the results for these rows of X [..., M, K] and a weight of RMS 1/sqrt(K), as families make it."""
        rms = max(_rms(exact), 1e-300)
        return cls(exact.numel(), float(exact.abs().max()) / rms, max(1.0, _rms(x) / rms))


def limits(problem: Problem, default: Error, results: Spread) -> Error:
    """The largest error that a candidate may have if the default's is `default`."""
    u_out = UNIT_ROUNDOFF[problem.out_dtype]
    adding = _adding(problem)
    largest = max(results.largest, 3.0 * results.expected)
    coarse = quantised(problem)
    sums = math.hypot(adding * largest, coarse * max(results.largest, 3.0))
    floor = Error(_floor(problem, results), DEVIATIONS * sums + u_out * results.largest)
    most = cap(problem, results)
    return Error(
        min(max(R_FACTOR * default.r, floor.r), most),
        min(max(M_FACTOR * default.m, floor.m), 2 * most * max(results.largest, 3.0)),
    )


def cap(problem: Problem, results: Spread) -> float:
    """The largest r, whatever the default's is. The hook's live check has the same, hooks/native/live_check.h."""
    cut = problem.math_mode if problem.dtype == "fp32" and problem.math_mode in CAPS else problem.out_dtype
    if problem.scale != "none":  # shorter sums of the tensor core, whatever they are rounded to
        cut = "bf16"
    usual = max(CAPS[cut], _floor(problem, results))
    if problem.family != "moe":
        return usual
    chance = 1 + DEVIATIONS / math.sqrt(results.count)
    fine = math.sqrt(roundings(problem)) * UNIT_ROUNDOFF[problem.out_dtype] / 2
    return max(usual, R_FACTOR * math.hypot(fine, quantised(problem)) * chance)


def _adding(problem: Problem) -> float:
    """RMS error of adding the products in any order, as a share of RMS(Y)."""
    u_sum = min(UNIT_ROUNDOFF[problem.out_dtype], UNIT_ROUNDOFF["fp32"])  # 16-bit numbers are added in fp32
    terms = (2 if problem.dtype in ("c64", "c128") else 1) * problem.k + 1
    reference = 2.0 if u_sum == UNIT_ROUNDOFF["fp64"] else 1.0
    return math.sqrt(reference * terms / 3) * u_sum


def _floor(problem: Problem, results: Spread) -> float:
    chance = 1 + DEVIATIONS / math.sqrt(results.count)
    added = math.hypot(_adding(problem) * results.expected, quantised(problem))
    return math.hypot(added * chance, UNIT_ROUNDOFF[problem.out_dtype] / 2)


def quantised(problem: Problem) -> float:
    """RMS error of what a mixture may quantise, as a share of RMS(Y); 0 where nothing may be."""
    if not may_be_quantised(problem):
        return 0.0
    return math.sqrt(((math.sqrt(_CONDITION) + 1) ** 2 + 1) / 3) * _E4M3


def held_to(problem: Problem, kernel: Kernel) -> Problem:
    """The problem whose limits hold for this kernel: where it quantises nothing, the one that allows no quantising."""
    if not may_be_quantised(problem) or getattr(kernel, "quantises", False):
        return problem
    return replace(problem, scale="none", scale_dtype="")


def roundings(problem: Problem) -> float:
    """How many roundings to its type a right result has behind it at most, as a variance; see above."""
    if problem.family != "moe":
        return 1.0
    return _CONDITION + 5.0 + (_CONDITION + 2.0 if problem.wscale != "none" else 0.0)


def _rms(t: Tensor) -> float:
    return float(wide(t).abs().square().mean().sqrt())
