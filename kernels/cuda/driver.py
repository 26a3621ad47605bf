"""CUDA's driver, bound with ctypes: load a binary and launch it from Python, to measure and check it.

The only Python file that calls it.  Programs that serve launch the same binary from hooks/native/cuda_launch.h.  The
structures are CUlaunchConfig and CUlaunchAttribute of cuda.h (CUDA driver API, execution control).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
from functools import cache
from typing import Any, Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import PORTABLE_CLUSTER, is_number

_CLUSTER: Final = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_EARLY: Final = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_DYNAMIC_SHARED, _LARGE_CLUSTERS = 8, 14  # CUfunction_attribute


class _Attribute(ctypes.Structure):
    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)), ("count", c_uint),
    )  # fmt: skip


class Kernel:
    """One kernel of a binary, loaded in the current context for the life of the process.

    shared: bytes of dynamic shared memory of a thread block.  early: it may begin once the launch before lets it
    (griddepcontrol), and waits for it by itself.  Raises CandidateFailed when the driver refuses.
    """

    def __init__(
        self, data: bytes, name: str, *, threads: int, shared: int, cluster: int = 1, early: bool = False
    ) -> None:
        module, self._function = c_void_p(), c_void_p()
        _check(_driver().cuModuleLoadData(byref(module), data), "it does not load")
        _check(_driver().cuModuleGetFunction(byref(self._function), module, name.encode()), f"it has no {name}")
        self._allow(_DYNAMIC_SHARED, shared)
        if cluster > PORTABLE_CLUSTER:
            self._allow(_LARGE_CLUSTERS, 1)
        self._cluster = cluster
        chosen = [_Attribute(_CLUSTER, 0, (c_uint * 16)(cluster, 1, 1))] if cluster > 1 else []
        chosen += [_Attribute(_EARLY, 0, (c_uint * 16)(1))] if early else []
        self._attributes = (_Attribute * len(chosen))(*chosen)
        self._config = _Config(
            (c_uint * 3)(1, 1, 1), (c_uint * 3)(threads, 1, 1), shared, None, self._attributes, len(chosen)
        )

    def _allow(self, attribute: int, value: int) -> None:
        _check(_driver().cuFuncSetAttribute(self._function, attribute, value), "more than a kernel may have here")

    def __call__(
        self, stream: int, arguments: Sequence[str], values: Sequence[Any], grid: tuple[int, int, int]
    ) -> None:
        """Launch it with values for the arguments of a launch record; grid: along the first axis clusters."""
        values = [c_int(v) if is_number(a) else c_void_p(v) for a, v in zip(arguments, values, strict=True)]
        addresses = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._config.stream = stream
        self._config.grid[:] = (grid[0] * self._cluster, *grid[1:])
        _check(_driver().cuLaunchKernelEx(byref(self._config), self._function, addresses, None), "it is not launched")


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as err:
        raise CandidateFailed(f"there is no CUDA driver here: {err}") from err


def _check(error: int, what: str) -> None:
    if error:
        name = c_char_p()
        _driver().cuGetErrorName(error, byref(name))
        raise CandidateFailed(f"{what}: {name.value.decode() if name.value else f'CUDA error {error}'}")
