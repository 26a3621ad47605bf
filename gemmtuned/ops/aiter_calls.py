"""AITER's own kernels, where AITER is installed: which one its dispatcher falls back to, and how each is called.

The order and the calls are those of aiter/tuned_gemm.py at e4048607.  Nothing of AITER is imported before it is needed;
where a kernel of its is missing (another version, another vendor's GPU) stock torch serves the call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

_SKINNY_GFX: Final = ("gfx90a", "gfx942", "gfx950")
_HALF: Final = ("torch.bfloat16", "torch.float16")


class GemmKey(NamedTuple):
    """AITER's nine columns: what its dispatcher looks a GEMM up by. dtypes as `str(tensor.dtype)`."""

    cu_num: int
    M: int
    N: int
    K: int
    bias: bool
    dtype: str
    outdtype: str
    scaleAB: bool
    bpreshuffle: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """A library of AITER's and its kernel. padded_m: the M of the row it came from, None when no row fitted."""

    libtype: str
    solidx: int = 0
    splitK: int | None = None
    kernelName: str = ""
    padded_m: int | None = None


@dataclass(frozen=True, slots=True)
class Operands:
    """x [M, K], weight [N, K] and the rest of one call, with the device's compute units."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    otype: torch.dtype
    scale_a: Tensor | None
    scale_b: Tensor | None
    scale_c: Tensor | None
    bpreshuffle: bool
    cu_num: int


Call = Callable[[Operands, Choice], Tensor]


def fallback(key: GemmKey, gfx: str) -> Choice:
    """What AITER runs when no row of its table fits. Where AITER stops with an assertion, this is torch."""
    if key.bpreshuffle:
        if gfx == "gfx942":
            return Choice("hipblaslt", -1)
        fits = key.N % 64 == 0 and key.K % 64 == 0 and key.outdtype in ("torch.bfloat16", "torch.float32")
        return Choice("asm") if key.dtype == "torch.bfloat16" and fits else Choice("torch")
    if gfx in _SKINNY_GFX and _is_skinny(key):
        return Choice("skinny", 2)
    if gfx == "gfx1250" and not key.scaleAB and key.dtype in _HALF:
        return Choice("triton")
    return Choice("torch")


def _is_skinny(key: GemmKey) -> bool:
    m, n, k, cu = key.M, key.N, key.K, key.cu_num
    if key.dtype not in _HALF or k % 8:
        return False
    if m <= 4:
        return n <= (2 * cu if m == 1 else cu) and k <= 9216
    return n <= cu and ((m <= 8 and k <= 5120) or (8 < m <= 16 and k <= 256))


def is_installed() -> bool:
    """Whether AITER itself can be imported here: not our shim, and on a ROCm build of torch."""
    try:
        spec = find_spec("aiter")
    except ValueError:  # our shim, or another module made by hand, has no spec
        return False
    return spec is not None and spec.origin is not None and torch.version.hip is not None


@lru_cache(1)
def calls() -> Mapping[str, Call]:
    """How to call each library, by its name. Empty without AITER; libraries that this AITER lacks are left out."""
    if not is_installed():
        return {}
    aiter: Any = importlib.import_module("aiter")
    needs = {"hipblaslt": ("hipb_mm", "hipb_create_extension"), "asm": ("gemm_a16w16_asm",)}
    found: dict[str, Call] = {
        name: call
        for name, call in (("hipblaslt", _HipBlasLt(aiter)), ("asm", _asm(aiter)))
        if all(hasattr(aiter, needed) for needed in needs[name])
    }
    if hasattr(aiter, "wv_splitk_small_fp16_bf16"):
        found["skinny"] = _skinny(aiter)
    triton = _triton_kernel()
    if triton is not None:
        found["triton"] = _triton(triton)
    return found


class _HipBlasLt:
    """hipBLASLt through AITER's binding, which wants to be set up once."""

    def __init__(self, aiter: Any) -> None:
        self._aiter, self._ready = aiter, False

    def __call__(self, o: Operands, choice: Choice) -> Tensor:
        if not self._ready:
            self._aiter.hipb_create_extension()
            self._ready = True
        y: Tensor = self._aiter.hipb_mm(
            o.x, o.weight.t(), choice.solidx, o.bias, o.otype, o.scale_a, o.scale_b, o.scale_c, o.bpreshuffle
        )
        return y


def _asm(aiter: Any) -> Call:
    def call(o: Operands, choice: Choice) -> Tensor:
        y = o.x.new_empty((o.x.shape[0], o.weight.shape[0]), dtype=o.otype)
        name = choice.kernelName or None
        found: Tensor = aiter.gemm_a16w16_asm(o.x, o.weight, y, o.bias, choice.splitK, name, o.bpreshuffle)
        return found

    return call


def _skinny(aiter: Any) -> Call:
    def call(o: Operands, choice: Choice) -> Tensor:
        y = o.x.new_empty((o.x.shape[0], o.weight.shape[0]))
        if choice.solidx == 0:
            aiter.wvSpltK(o.weight, o.x, y, o.x.shape[0], o.cu_num)
        elif choice.solidx == 1:
            aiter.LLMM1(o.weight, o.x, y, 4)
        else:
            aiter.wv_splitk_small_fp16_bf16(o.weight, o.x, y, o.x.shape[0], o.cu_num)
        return y if o.bias is None else y.add_(o.bias)

    return call


def _triton(kernel: Any) -> Call:
    def call(o: Operands, choice: Choice) -> Tensor:
        y: Tensor = kernel(o.x, o.weight, bias=o.bias, dtype=o.otype)
        return y

    return call


def _triton_kernel() -> Any:
    newer, older = "aiter.ops.triton.gemm.basic.gemm_a16w16", "aiter.ops.triton.gemm_a16w16"
    return _imported(newer) or _imported(older)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name).gemm_a16w16
    except (ImportError, AttributeError):
        return None
