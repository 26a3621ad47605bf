"""All backends, simplest first: those of the files of this folder, and those that other packages offer.

A file here has a tuple BACKENDS; another package names its backend under the entry point group `gemmtuned.backends`.
Other packages are imported by `add_others` alone, which workers call and programs never do.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Final

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import NAME, Candidate, Device, Environment
from gemmtuned.kernels.backends.base import Backend, OfferingBackend
from gemmtuned.kernels.budget import deal
from gemmtuned.kernels.own_kernel import Offer

logger = logging.getLogger("gemmtuned.kernels")
GROUP: Final = "gemmtuned.backends"


def _built_in() -> Iterator[Backend]:
    for module in iter_modules(__path__):
        yield from getattr(import_module(f"{__name__}.{module.name}"), "BACKENDS", ())


def _in_order(backends: Iterable[Backend]) -> dict[str, Backend]:
    return {b.name: b for b in sorted(backends, key=lambda b: b.order)}


BACKENDS: Final[dict[str, Backend]] = _in_order(_built_in())


def add_others() -> None:
    """Import the backends that other packages offer. One that does not load, or takes a name in use, is left out."""
    found = list(BACKENDS.values())
    for point in entry_points(group=GROUP):
        try:
            backend: Backend = point.load()
            if not NAME.fullmatch(backend.name) or "." in backend.name:
                raise ValueError(f"its name is {backend.name!r}, expected letters, digits, _ and -")
            if BACKENDS.get(backend.name, backend) is not backend:
                raise ValueError(f"there is a backend {backend.name} already")
            found.append(backend)
        except Exception as err:  # noqa: PERF203  other people's code may raise anything
            logger.warning("backend left out entry_point=%r reason=%r", point.value, f"{type(err).__name__}: {err}")
    ordered = _in_order(found)
    BACKENDS.clear()
    BACKENDS.update(ordered)


def complexity(name: str) -> int:
    """At a tie the backend with less of it wins; those that compile our kernels are alike in it."""
    backend = BACKENDS.get(name)
    return backend.order if backend is not None else max(b.order for b in BACKENDS.values())


def environment(device: Device) -> Environment:
    """The stamps of every backend that this process has for the device."""
    return Environment(device, {k: v for backend in BACKENDS.values() for k, v in backend.stamps(device).items()})


def candidates(problem: Problem, environment: Environment) -> Iterator[Candidate]:
    """Candidates of the backends in this environment that get a place (budget.py), the default first."""
    here = {name: backend for name, backend in BACKENDS.items() if name in environment.backends}
    offers = {
        name: backend.offers(problem)
        if isinstance(backend, OfferingBackend)
        else [Offer(candidate) for candidate in backend.candidates(problem)]
        for name, backend in here.items()
    }
    for found in deal(problem, environment.device, offers).values():
        yield from found
