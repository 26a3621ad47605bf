"""The one list of backends, simplest first. A new one is a file and an entry here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Device, Environment
from gemmtuned.kernels.backends.base import Backend, CompiledBackend
from gemmtuned.kernels.backends.cublaslt import CUBLASLT
from gemmtuned.kernels.backends.cuda_ import CUDA
from gemmtuned.kernels.backends.onednn import ONEDNN, ONEDNN_PACKED
from gemmtuned.kernels.backends.torch_ import TORCH, TORCH_MV, TORCH_SWAP
from gemmtuned.kernels.backends.triton_ import TRITON

BACKENDS: Final[dict[str, Backend]] = {
    b.name: b for b in (TORCH, TORCH_SWAP, TORCH_MV, ONEDNN, ONEDNN_PACKED, CUBLASLT, TRITON, CUDA)
}


def complexity(name: str) -> int:
    """At a tie the backend with less of it wins; those that compile our kernels are alike in it."""
    order = [None if isinstance(backend, CompiledBackend) else each for each, backend in BACKENDS.items()]
    return order.index(name if name in order else None)


def environment(device: Device) -> Environment:
    """The stamps of every backend that this process has for the device."""
    stamps = {name: backend.stamp(device) for name, backend in BACKENDS.items()}
    return Environment(device, {name: stamp for name, stamp in stamps.items() if stamp is not None})


def candidates(problem: Problem, environment: Environment) -> Iterator[Candidate]:
    """All candidates of the backends available in this environment, the default first."""
    for name, backend in BACKENDS.items():
        if name in environment.stamps:
            yield from backend.candidates(problem)
