"""The one list of families: a new one is a file here and an entry below."""

from __future__ import annotations

from typing import Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.families import batched, dense, grouped, scaled
from gemmtuned.kernels.families.base import Family

FAMILIES: Final[dict[str, Family]] = {
    f.name: f for module in (dense, batched, scaled, grouped) for f in module.FAMILIES
}


def tunable(device_kind: str) -> tuple[str, ...]:
    """All that this version can tune there, as Problem.operands says it: the rest is counted and never tried."""
    return tuple(kind for family in FAMILIES.values() for kind in family.tunable(device_kind))


def family_of(problem: Problem) -> Family:
    """The family that makes this problem's inputs. Raises CandidateFailed when there is none, or it cannot."""
    family = FAMILIES.get(problem.family)
    if family is None:
        raise CandidateFailed(f"{problem}: family {problem.family} cannot be tuned yet")
    family.check(problem)
    return family
