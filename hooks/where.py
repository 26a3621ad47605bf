"""The devices on which this process runs GEMMs, and what holds there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from gemmtuned.configs.solution import Device, Environment
from gemmtuned.hooks.imports import importing
from gemmtuned.kernels import stamps


class Here(Environment):
    """What this process has at a place: at first without the stamps that are made of our kernels' sources.

    Those of a backend come in when a row of a table asks for them; most programs have no use for them.
    """

    __slots__ = ()

    def accepts(self, backend: str, stamp: str) -> bool:
        """As an Environment does."""
        if backend in stamps.COMPILED:
            self.stamps.update(_compiled(backend, self.device))
        return super().accepts(backend, stamp)


@cache
def _compiled(backend: str, device: Device) -> dict[str, str]:
    with importing():
        return stamps.stamps(backend, device)


class Where:
    """Asked by the hook's thread alone, but for `in_use`. has_cuda: whether we stand before CUDA operators."""

    def __init__(self, has_cuda: Callable[[], bool]) -> None:
        self._has_cuda = has_cuda
        self.environments: dict[str, Environment] = {}

    def environment(self, place: str) -> Environment:
        """Device and versions of a place (`cpu`, `cuda:0`) in this process; needs torch fully imported."""
        if place not in self.environments:
            with importing():  # torch may, for a GPU
                from gemmtuned.kernels.device import device_at

                device = device_at(place)
                self.environments[place] = Here(device, stamps.of(stamps.LIBRARIES, device))
        return self.environments[place]

    def in_use(self) -> tuple[str, ...]:
        """Where this process may run GEMMs; each GPU only once it uses that one itself: we never initialise CUDA.

        A kernel is loaded for each place, and the first on a GPU makes a context there: 0.5 GiB, which eight ranks of
        one host would each take on every GPU that they see.
        """
        if not self._has_cuda():
            return ("cpu",)
        import torch

        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return ("cpu",)
        return ("cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()) if _has_context(i)))


def _has_context(index: int) -> bool:
    """Whether this process has a context on a GPU; asking makes none. For a process that has CUDA initialised."""
    import torch

    if hasattr(torch._C, "_cuda_hasPrimaryContext"):
        return bool(torch._C._cuda_hasPrimaryContext(index))
    return torch.cuda.memory_reserved(index) > 0  # the current device is no answer: each thread has its own, and ours 0
