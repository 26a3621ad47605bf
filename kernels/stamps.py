"""The stamps of our backends: what must be equal here for a solution by one of them to hold.

A program asks for them and runs solutions without the backends, which bring families, kernels and the search for
candidates along: nothing is imported here but what the stamp asked for is made of.  Those of CPUs and of libraries
need nothing; those of kernels that we compile need their sources, and are asked for once a row of a table names one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from gemmtuned.configs.solution import DEFAULT_BACKEND, Device, kernel_stamps

Stamps = dict[str, str]
_VERSION: Final = r"(?m)^__version__\s*=\s*[\"']([^\"']+)"


def of(backends: Iterable[str], device: Device) -> Stamps:
    """The stamps of several backends."""
    return {name: stamp for backend in backends for name, stamp in stamps(backend, device).items()}


def stamps(backend: str, device: Device) -> Stamps:
    """The stamps of a backend on this device; none where it is not here, and none for a backend of another package."""
    return _OF[backend](backend, device) if backend in _OF else {}


def _torchs(backend: str, _: Device) -> Stamps:
    """Torch's version: it brings the BLAS it calls."""
    import torch

    return {backend: str(torch.__version__)}


def _torchs_on_cpus(backend: str, device: Device) -> Stamps:
    return _torchs(backend, device) if device.kind == "cpu" else {}


def _rows(backend: str, device: Device) -> Stamps:
    """Torch's version and the CPU: which instructions a library uses decides in which order it adds up."""
    import torch

    return {backend: f"{torch.__version__}/{device.key}"} if device.kind == "cpu" else {}


def _onednn(backend: str, device: Device) -> Stamps:
    """Torch's version (oneDNN comes with it) and the CPU, whose instruction set decides what oneDNN generates."""
    import torch

    if device.kind != "cpu" or not torch._C._has_mkldnn:
        return {}
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # private: may go with a later torch
        return {}
    return {backend: f"{torch.__version__}/{device.key}"}


def _cublaslt(backend: str, device: Device) -> Stamps:
    """The library's version and the architecture; none on a device that is not NVIDIA's."""
    if device.kind != "cuda":
        return {}
    from gemmtuned.kernels import cublaslt

    version = cublaslt.version()
    return {backend: f"{version}/{device.arch}"} if version else {}


def _cuda(backend: str, device: Device) -> Stamps:
    """One a kernel: NVRTC's version, the architecture, the kernel's source; none on any other architecture."""
    if device.kind != "cuda":
        return {}
    from gemmtuned.kernels import catalog
    from gemmtuned.kernels.arch import is_among
    from gemmtuned.kernels.cuda import nvrtc

    if not catalog.has_compiler(backend, device):
        return {}
    here = [kernel for kernel in catalog.kernels(backend).values() if is_among(device.arch, kernel.archs)]
    versions = {kernel.name: f"{nvrtc.version()}/{device.arch}/{kernel.source_hash()}" for kernel in here}
    return kernel_stamps(backend, versions)


def _triton(backend: str, device: Device) -> Stamps:
    """One a kernel: Triton's version, the architecture, the kernel's source; none on other devices than CUDA's."""
    version = triton_version() if device.kind == "cuda" else None
    if version is None:
        return {}
    from gemmtuned.kernels.triton.source import kernel_hashes

    return kernel_stamps(backend, {name: f"{version}/{device.arch}/{s}" for name, s in kernel_hashes().items()})


@cache
def triton_version() -> str | None:
    """As Triton's first file says it, without importing Triton; None where it is not installed."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    found = re.search(_VERSION, Path(spec.origin).read_text("utf-8"))
    if found:
        return found[1]
    import triton

    return str(triton.__version__)


def _moe_decode(backend: str, device: Device) -> Stamps:
    """NVRTC's version, the architecture, the kernels' source without comments; none on any other architecture."""
    if device.kind != "cuda":
        return {}
    from gemmtuned.kernels.cuda import moe_compile, moe_decode, nvrtc
    from gemmtuned.kernels.cuda.kernel import without_comments
    from gemmtuned.kernels.triton.source import code_of

    if not moe_compile.runs_on(device):
        return {}
    folder = Path(moe_decode.__file__).parent
    launched_by = (code_of((folder / name).read_text()) for name in ("moe_decode.py", "moe_run.py", "moe_compile.py"))
    text = without_comments(moe_decode.text()) + "".join(launched_by)
    return {backend: f"{nvrtc.version()}/{device.arch}/{sha256(text.encode()).hexdigest()[:12]}"}


def _moe_tiles(backend: str, device: Device) -> Stamps:
    """Triton's version, the architecture, the kernels' source; none where they do not run."""
    version = triton_version() if device.kind == "cuda" else None
    if version is None:
        return {}
    from gemmtuned.kernels.arch import is_among
    from gemmtuned.kernels.triton import moe_fp8_tiling, moe_tiling

    tiling = moe_fp8_tiling if backend == moe_fp8_tiling.NAME else moe_tiling
    if not is_among(device.arch, tiling.ARCHS):
        return {}
    return {backend: f"{version}/{device.arch}/{tiling.source_hash()}"}


_OF: Final[dict[str, Callable[[str, Device], Stamps]]] = {
    DEFAULT_BACKEND: _torchs, "torch_swap": _torchs, "torch_mv": _torchs, "moe_grouped": _torchs_on_cpus,
    "onednn": _onednn, "onednn_packed": _onednn, "rows": _rows, "cublaslt": _cublaslt, "cuda": _cuda,
    "triton": _triton, "moe_decode": _moe_decode, "moe_tiles": _moe_tiles,
    "moe_fp8_tiles": _moe_tiles,
}  # fmt: skip
COMPILED: Final = ("cuda", "triton", "moe_decode", "moe_tiles", "moe_fp8_tiles")  # by us: their stamps are of sources
LIBRARIES: Final = tuple(name for name in _OF if name not in COMPILED)
