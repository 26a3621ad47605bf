"""Products of quantised operands in AITER's tables, and in our words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from gemmtuned.configs.aiter_headers import FAMILIES
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tunable import SHUFFLED_ROWS

# For families without such columns: (scale, weight_state, dtype if none is named)
QUANTISED: Final = {
    "a8w8": ("row", "plain", "i8"),
    "asm_a8w8": ("row", "shuffled", "i8"),
    "a8w8_bpreshuffle": ("row", "shuffled", "fp8"),
    "a8w8_blockscale": ("1x128", "plain", "fp8"),
    "a8w8_blockscale_bpreshuffle": ("1x128", "shuffled", "fp8"),
    "a4w4_blockscale": ("1x32", "plain", "fp4_e2m1"),
    "batched_a8w8": ("row", "plain", "i8"),
}


def columns(name: str, dtype: str, out_dtype: str, weight_state: str) -> dict[str, Any]:
    """The columns of a problem of this family that do not depend on sizes and bias."""
    scale = QUANTISED[name][0]
    return {
        "family": "scaled", "scale": scale, "weight_state": weight_state, "dtype": dtype, "out_dtype": out_dtype,
    }  # fmt: skip


def as_called(problem: Problem) -> Problem:
    """The product that the op of a row's problem runs here (`gemmtuned.ops`): what is tuned for it.

    A batch of 8-bit products is each of its matrices by itself.  A shuffled weight with many rows of X is turned back.
    """
    if problem.family != "scaled":
        return problem
    if problem.weight_state == "shuffled" and problem.m > SHUFFLED_ROWS:
        problem = replace(problem, weight_state="plain")
    return replace(problem, batch=1)


def family_of(problem: Problem) -> str | None:
    """The family whose rows are read as exactly this problem."""
    return next((name for name in QUANTISED if _says_all(name, problem)), None)


def _says_all(name: str, problem: Problem) -> bool:
    """Whether a row of this family is read as exactly this problem."""
    scale, weight_state, usual = QUANTISED[name]
    key = FAMILIES[name].key
    plain = ("B" in key) == (problem.batch > 1) and problem.out_dtype == "bf16" and not problem.bias
    if not plain or problem.weight_state != weight_state or name == "asm_a8w8":  # asm_a8w8: an older table
        return False
    return (
        (problem.family, problem.scale) == ("scaled", scale)
        and problem.dtype == problem.wdtype
        and problem.dtype.startswith(("fp8", "i8") if "q_dtype_w" in key else usual)
    )
