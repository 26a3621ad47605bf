"""All families: those of the files of this folder, and those that other packages offer.

A file here has a tuple FAMILIES, or WITH_SCALES: what stands for a family where its problems have scales, which are
operands of their own.  Another package names its family under the entry point group `gemmtuned.families`, and calls it
`package.family`: a name with a dot is never one of ours.  Other packages are imported by `add_others` alone, which
workers call and programs never do.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import OTHERS_FAMILY, Problem
from gemmtuned.kernels import other_packages
from gemmtuned.kernels.families.base import Family

GROUP: Final = "gemmtuned.families"


def _built_in(tuples: str) -> Iterator[Family]:
    for module in iter_modules(__path__):
        yield from getattr(import_module(f"{__name__}.{module.name}"), tuples, ())


FAMILIES: Final[dict[str, Family]] = {family.name: family for family in _built_in("FAMILIES")}
WITH_SCALES: Final[dict[str, Family]] = {family.name: family for family in _built_in("WITH_SCALES")}


def add_others() -> None:
    """Import the families that other packages offer. One that does not load, or takes a name in use, is left out."""
    FAMILIES.update({family.name: family for family in other_packages.found(GROUP, "family", _objection)})


def _objection(family: Family) -> str:
    if not OTHERS_FAMILY.fullmatch(family.name):
        return f"its name is {family.name!r}, expected package.family in small letters, digits and _"
    if FAMILIES.get(family.name, family) is not family:
        return f"there is a family {family.name} already"
    return ""


def tunable(device_kind: str) -> tuple[str, ...]:
    """All that this version can tune there, as Problem.operands says it: the rest is counted and never tried."""
    families = (*FAMILIES.values(), *WITH_SCALES.values())
    return tuple(kind for family in families for kind in family.tunable(device_kind))


def family_of(problem: Problem) -> Family:
    """The family that makes this problem's inputs. Raises CandidateFailed when there is none, or it cannot."""
    family = FAMILIES.get(problem.family)
    if problem.scale != "none":
        family = WITH_SCALES.get(problem.family, family)
    if family is None:
        raise CandidateFailed(f"{problem}: family {problem.family} cannot be tuned yet")
    family.check(problem)
    return family
