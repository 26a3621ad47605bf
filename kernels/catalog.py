"""All kernels of our own: found in their folders, and what they offer; without torch and without a GPU.

A kernel is a file of kernels/triton or kernels/cuda with a KERNEL (own_kernel.py).  There is no list of them.  Triton
is imported only when there is something for it to do: its kernels' names and parameters are read from their files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device
from gemmtuned.kernels import budget
from gemmtuned.kernels.cuda import nvrtc
from gemmtuned.kernels.own_kernel import Offer, OwnKernel, Parameter
from gemmtuned.kernels.triton import source

FOLDERS: Final = ("triton", "cuda")  # each is a backend, and whose candidates its kernels are


@cache
def kernels(backend: str) -> Mapping[str, Any]:
    """The KERNEL of each file of the backend's folder, by its name; imports Triton for those of `triton`."""
    folder = import_module(f"gemmtuned.kernels.{backend}")
    files = [module.name for module in iter_modules(folder.__path__) if _has_kernel(folder.__path__[0], module.name)]
    found: list[OwnKernel] = [import_module(f"{folder.__name__}.{name}").KERNEL for name in files]
    return {kernel.name: kernel for kernel in found}


def _has_kernel(folder: str, name: str) -> bool:
    """Whether this file ends with a KERNEL: no other is imported, for it may need torch, or what is not here."""
    return re.search(r"^KERNEL\b", (Path(folder) / f"{name}.py").read_text(), re.MULTILINE) is not None


def parameters() -> dict[str, tuple[Parameter, ...]]:
    """The parameters of every kernel's configs, by `backend.kernel`; reads Triton's from their files."""
    of_triton = {f"triton.{name}": declared for name, declared in source.parameters().items()}
    return of_triton | {f"cuda.{name}": kernel.parameters for name, kernel in kernels("cuda").items()}


def has_compiler(backend: str, device: Device) -> bool:
    """Whether kernels of this backend can be compiled here for a device of this kind; nothing is imported for it."""
    if device.kind != "cuda":
        return False
    if backend != "triton":
        return nvrtc.version() is not None
    try:
        return find_spec("triton") is not None
    except ValueError:  # a stub of the program's stands in its place
        return False


def offers(problem: Problem, device: Device, backends: Iterable[str] = FOLDERS) -> dict[str, list[Offer]]:
    """All that kernels of these backends offer for the problem on this device, as far as a compiler is here for it."""
    return {
        backend: [o for kernel in kernels(backend).values() for o in kernel.offers(problem, device, backend)]
        for backend in backends
        if has_compiler(backend, device)
    }


def candidates(problem: Problem, device: Device, backends: Iterable[str] = FOLDERS) -> dict[str, list[Candidate]]:
    """The candidates that are admitted of all that these backends offer."""
    return budget.deal(problem, device, offers(problem, device, backends))


def kernel_of(candidate: Candidate) -> tuple[Any, dict[str, int]]:
    """(kernel, its parameters) of a candidate.

    Raises CandidateFailed for a config that is no JSON, or names no kernel of ours.
    """
    known = kernels(candidate.backend)
    try:
        values = json.loads(candidate.config)
        return known[values.pop("kernel")], values
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise CandidateFailed(f"{candidate}: its config names no kernel of ours ({', '.join(known)})") from err


def record_of(candidate: Candidate, problem: Problem) -> tuple[Any, Any]:
    """(kernel, how it runs the problem) of a candidate.

    Raises CandidateFailed for what is no config of ours, or cannot run the problem.
    """
    kernel, values = kernel_of(candidate)
    return kernel, kernel.record(values, problem)
