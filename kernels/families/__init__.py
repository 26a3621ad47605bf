"""All families: those in the files of this folder, and those that other packages offer.

A file here has a tuple FAMILIES.  A family that says what it `replaces` stands in for the other one of its name for
those problems: with scales, with zero points, of integers, of weights in AITER's order.  Another package registers its
family under the entry point group `gemmtuned.families`, with the name `package.family`: a name with a dot is never one
of ours.  Only `add_others` imports other packages; workers call it, programs never do.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import OTHERS_FAMILY, ZERO_POINTS, Problem
from gemmtuned.configs.tunable import why_not
from gemmtuned.kernels import other_packages
from gemmtuned.kernels.families.base import Family
from gemmtuned.kernels.other_packages import GUESTS

GROUP: Final = "gemmtuned.families"


def _built_in() -> Iterator[Family]:
    for module in iter_modules(__path__):
        yield from getattr(import_module(f"{__name__}.{module.name}"), "FAMILIES", ())


FAMILIES: Final[dict[str, Family]] = {family.name: family for family in _built_in() if family.replaces is None}
VARIANTS: Final = tuple(family for family in _built_in() if family.replaces is not None)


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
    return tuple(kind for family in (*FAMILIES.values(), *VARIANTS) for kind in _tunable(family, device_kind))


def _tunable(family: Family, device_kind: str) -> list[str]:
    def asked() -> list[str]:
        return [str(kind) for kind in family.tunable(device_kind)]

    package = GUESTS.package_of.get(family.name)
    return GUESTS.ask(family.name, f"family {family.name}", package, asked, []) if package is not None else asked()


def family_of(problem: Problem) -> Family:
    """The family that makes this problem's inputs. Raises CandidateFailed when there is none, or it cannot."""
    named = (v for v in VARIANTS if v.name == problem.family and v.replaces is not None and v.replaces(problem))
    family = next(named, FAMILIES.get(problem.family))
    needs_its_own = problem.weight_state == "shuffled" or problem.scale in ZERO_POINTS
    if problem.packing or (problem.weight_state == "packed" and not problem.threads):
        raise CandidateFailed(f"{problem}: {why_not(problem)}")
    if family is None or (needs_its_own and family.replaces is None):
        raise CandidateFailed(f"{problem}: family {problem.family} cannot be tuned yet")
    family.check(problem)
    return family
