"""All families: those in the files of this folder, and those that other packages offer.

A file here has a tuple FAMILIES.  WITH_SCALES has the families that replace those of the same name for problems with
scales, which are additional operands, WITH_ZERO_POINTS those for problems with zero points as well, INTO_INTEGERS those
for products of int8 into int32, which nothing rounds, SHUFFLED those for weights in AITER's order.  Another package
registers its family under the entry point group `gemmtuned.families`, with the name `package.family`: a name with a dot
is never one of ours.  Only `add_others` imports other packages; workers call it, programs never do.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import OTHERS_FAMILY, ZERO_POINTS, Problem
from gemmtuned.configs.tunable import INT_PRODUCT
from gemmtuned.kernels import other_packages
from gemmtuned.kernels.families.base import Family

GROUP: Final = "gemmtuned.families"


def _built_in(tuples: str) -> Iterator[Family]:
    for module in iter_modules(__path__):
        yield from getattr(import_module(f"{__name__}.{module.name}"), tuples, ())


FAMILIES: Final[dict[str, Family]] = {family.name: family for family in _built_in("FAMILIES")}
WITH_SCALES: Final[dict[str, Family]] = {family.name: family for family in _built_in("WITH_SCALES")}
WITH_ZERO_POINTS: Final[dict[str, Family]] = {family.name: family for family in _built_in("WITH_ZERO_POINTS")}
INTO_INTEGERS: Final[dict[str, Family]] = {family.name: family for family in _built_in("INTO_INTEGERS")}
SHUFFLED: Final[dict[str, Family]] = {family.name: family for family in _built_in("SHUFFLED")}


def add_others() -> None:
    """Import the families of other packages. One that cannot be loaded, or has a name in use, is left out."""
    FAMILIES.update({family.name: family for family in other_packages.found(GROUP, "family", _objection)})


def _objection(family: Family) -> str:
    if not OTHERS_FAMILY.fullmatch(family.name):
        return f"its name is {family.name!r}, expected package.family in small letters, digits and _"
    if FAMILIES.get(family.name, family) is not family:
        return f"there is a family {family.name} already"
    return ""


def tunable(device_kind: str) -> tuple[str, ...]:
    """What this version can tune on such a device, as texts of Problem.operands; other calls are only counted."""
    kinds = (FAMILIES, WITH_SCALES, WITH_ZERO_POINTS, INTO_INTEGERS, SHUFFLED)
    return tuple(kind for families in kinds for family in families.values() for kind in family.tunable(device_kind))


def family_of(problem: Problem) -> Family:
    """The family that makes this problem's inputs. Raises CandidateFailed when there is none, or it cannot."""
    family = FAMILIES.get(problem.family)
    if problem.weight_state == "shuffled":
        family = SHUFFLED.get(problem.family)
    elif problem.scale in ZERO_POINTS:
        family = WITH_ZERO_POINTS.get(problem.family)
    elif problem.scale != "none":
        family = WITH_SCALES.get(problem.family, family)
    elif (problem.dtype, problem.wdtype, problem.out_dtype) == INT_PRODUCT:
        family = INTO_INTEGERS.get(problem.family, family)
    if family is None:
        raise CandidateFailed(f"{problem}: family {problem.family} cannot be tuned yet")
    family.check(problem)
    return family
