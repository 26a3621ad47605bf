"""All backends, simplest first: those of the files of this folder, and those that other packages offer.

A file here has a tuple BACKENDS; another package names its backend under the entry point group `gemmtuned.backends`.
Other packages are imported by `add_others` alone, which workers call and programs never do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pkgutil import iter_modules
from typing import Final

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import DEFAULT_BACKEND, NAME, Candidate, Device, Environment
from gemmtuned.kernels import other_packages
from gemmtuned.kernels.backends.base import Backend, OfferingBackend
from gemmtuned.kernels.budget import deal
from gemmtuned.kernels.other_packages import GUESTS, installed
from gemmtuned.kernels.own_kernel import Offer

GROUP: Final = "gemmtuned.backends"


def _built_in() -> Iterator[Backend]:
    for module in iter_modules(__path__):
        yield from getattr(import_module(f"{__name__}.{module.name}"), "BACKENDS", ())


def _in_order(backends: Iterable[Backend]) -> dict[str, Backend]:
    return {b.name: b for b in sorted(backends, key=lambda b: b.order)}


BACKENDS: Final[dict[str, Backend]] = _in_order(_built_in())


def add_others() -> None:
    """Import the backends that other packages offer. One that does not load, or takes a name in use, is left out."""
    ordered = _in_order([*BACKENDS.values(), *other_packages.found(GROUP, "backend", _objection)])
    BACKENDS.clear()
    BACKENDS.update(ordered)


def _objection(backend: Backend) -> str:
    order: object = backend.order
    if not isinstance(order, int):
        return f"its order is {order!r}, expected a whole number"
    if not NAME.fullmatch(backend.name) or "." in backend.name:
        return f"its name is {backend.name!r}, expected letters, digits, _ and -"
    if BACKENDS.get(backend.name, backend) is not backend:
        return f"there is a backend {backend.name} already"
    return ""


def complexity(name: str) -> int:
    """At a tie the backend with less of it wins; those that compile our kernels are alike in it."""
    backend = BACKENDS.get(name)
    return backend.order if backend is not None else max(b.order for b in BACKENDS.values())


def environment(device: Device) -> Environment:
    """The stamps of every backend that this process has for the device; programs ask kernels/stamps.py."""
    return Environment(device, {k: v for backend in BACKENDS.values() for k, v in _stamps(backend, device).items()})


def _stamps(backend: Backend, device: Device) -> dict[str, str]:
    """The backend's stamps; none where a user excludes it, or where it is another package's and broken."""
    packages = _texts(getattr(backend, "package", ()))
    package = GUESTS.package_of.get(backend.name) or next(filter(_is_installed, packages), "")
    is_ours = not package and backend.name not in GUESTS.package_of  # or of a package that is not there
    modules = {module.partition(".")[0] for module in _texts(getattr(backend, "imports", ()))} - {"gemmtuned"}
    if backend.name != DEFAULT_BACKEND and GUESTS.is_unwanted(backend.name, *packages, package, *modules):
        return {}
    if is_ours:
        return backend.stamps(device)

    def asked() -> dict[str, str]:
        stamps = backend.stamps(device)
        for name, stamp in stamps.items():
            if name.partition(".")[0] != backend.name or not isinstance(stamp, str):
                raise TypeError(f"stamp {name!r}: {stamp!r} is none of backend {backend.name}")
        return dict(stamps)

    return GUESTS.ask(backend.name, f"backend {backend.name}", package, asked, {})


def _texts(value: object) -> tuple[str, ...]:
    """A name or several; none where a backend of another package has something else under that attribute."""
    many = (value,) if isinstance(value, str) else value
    return tuple(one for one in many if isinstance(one, str)) if isinstance(many, tuple | list) else ()


def _is_installed(package: str) -> bool:
    try:
        return bool(installed(package))
    except PackageNotFoundError:
        return False
    except ValueError:  # it is there, and broken
        return True


def candidates(problem: Problem, environment: Environment) -> Iterator[Candidate]:
    """Candidates of the backends in this environment that are admitted (budget.py), the default first."""
    here = {name: backend for name, backend in BACKENDS.items() if name in environment.backends}
    offers = {name: _offers(backend, problem) for name, backend in here.items()}
    for found in deal(problem, environment.device, offers).values():
        yield from found


def _offers(backend: Backend, problem: Problem) -> list[Offer]:
    def asked() -> list[Offer]:
        if isinstance(backend, OfferingBackend):
            return list(backend.offers(problem))
        return [Offer(candidate) for candidate in backend.candidates(problem)]

    package = GUESTS.package_of.get(backend.name)
    return GUESTS.ask(backend.name, f"backend {backend.name}", package, asked, []) if package is not None else asked()
