"""CUDA's driver, bound with ctypes: load a binary and launch it from Python, to measure and check it.

The only Python file that calls it.  Programs that serve launch the same binary from hooks/native/cuda_launch.h.  The
structures are CUlaunchConfig and CUlaunchAttribute of cuda.h (CUDA driver API, execution control).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any, Final

from gemmtuned.configs.errors import CandidateFailed, Declined
from gemmtuned.configs.launch import PORTABLE_CLUSTER, is_number
from gemmtuned.configs.tensor_maps import BOX_BYTES, ByteMatrix

_CLUSTER: Final = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_EARLY: Final = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_DYNAMIC_SHARED, _LARGE_CLUSTERS = 8, 14  # CUfunction_attribute
_SWIZZLE_128: Final = 3  # CU_TENSOR_MAP_SWIZZLE_128B
_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
# CUresult: no memory; then what tells of the process, its device, a stream or a capture (hooks/native/driver.h has why)
_NOT_OURS: Final = frozenset(
    (2, 3, 4, 46, 100, 101, 201, 214, 220, 400, 700, 702, 709, 710, *range(714, 721), *range(900, 910))
)


class _Attribute(ctypes.Structure):
    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)), ("count", c_uint),
    )  # fmt: skip


class OnDevice:
    """The primary context of a device, which is torch's, is current in this thread for a scope.

    A thread that has not used CUDA yet has none, and keeps this one; any other context comes back.
    """

    def __init__(self, device: int) -> None:
        self._device, self._before = device, c_void_p()

    def __enter__(self) -> None:
        driver, context = _driver(), _primary_context(self._device)
        _check(driver.cuCtxGetCurrent(byref(self._before)), "there is no current context")
        if self._before.value != context:
            _check(driver.cuCtxSetCurrent(c_void_p(context)), f"the context of device {self._device} is not to be had")
        else:
            self._before.value = None

    def __exit__(self, *error: object) -> None:
        if self._before.value is not None:
            _driver().cuCtxSetCurrent(self._before)


class RelaxedCapture:
    """For a scope this thread may load binaries while some stream of the process is being captured."""

    def __init__(self) -> None:
        self._mode = c_int(_RELAXED)

    def __enter__(self) -> None:
        _driver().cuThreadExchangeStreamCaptureMode(byref(self._mode))

    def __exit__(self, *error: object) -> None:
        _driver().cuThreadExchangeStreamCaptureMode(byref(self._mode))


class Kernel:
    """One kernel of a binary, loaded in the current context for the life of the process.

    shared: bytes of dynamic shared memory per thread block.  early: it may begin once the launch before lets it
    (griddepcontrol), and waits for it by itself.  Raises CandidateFailed when the driver refuses, Declined when that
    says nothing about the kernel.
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
        values = [_passed(a, v) for a, v in zip(arguments, values, strict=True)]
        addresses = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._config.stream = stream
        self._config.grid[:] = (grid[0] * self._cluster, *grid[1:])
        _check(_driver().cuLaunchKernelEx(byref(self._config), self._function, addresses, None), "it is not launched")


class _TensorMap(ctypes.Structure):
    """CUtensorMap of cuda.h, which the driver wants aligned to 64 bytes."""

    _fields_ = (("opaque", c_uint64 * 16),)


def _passed(argument: str, value: Any) -> Any:
    """What a launch passes for an argument of its record."""
    if isinstance(value, ByteMatrix):
        return _map_of(value)
    return c_int(value) if is_number(argument) else c_void_p(value)


def _map_of(of: ByteMatrix) -> _TensorMap:
    """The map of a matrix of bytes, swizzled by 128 bytes, zeros outside; the constants are 0 but the swizzle's."""
    room = ctypes.create_string_buffer(ctypes.sizeof(_TensorMap) + 64)
    found = _TensorMap.from_buffer(room, -ctypes.addressof(room) % 64)
    sizes, strides = (c_uint64 * 2)(of.columns, of.rows), (c_uint64 * 1)(of.stride)
    box, steps = (c_uint * 2)(BOX_BYTES, of.box_rows), (c_uint * 2)(1, 1)
    encode = getattr(_driver(), "cuTensorMapEncodeTiled", None)
    if encode is None:
        raise CandidateFailed("the CUDA driver is older than 12.0 and makes no tensor maps")
    error = encode(byref(found), 0, c_uint(2), c_void_p(of.address), sizes, strides, box, steps, 0, _SWIZZLE_128, 0, 0)
    _check(error, f"there is no tensor map of {of}")
    return found


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as err:
        raise CandidateFailed(f"there is no CUDA driver here: {err}") from err


@cache
def _primary_context(device: int) -> int | None:
    context = c_void_p()
    _check(_driver().cuDevicePrimaryCtxRetain(byref(context), device), f"device {device} has no context")
    return context.value


def _check(error: int, what: str) -> None:
    if error:
        name = c_char_p()
        _driver().cuGetErrorName(error, byref(name))
        said = f"{what}: {name.value.decode() if name.value else f'CUDA error {error}'}"
        raise Declined(said) if error in _NOT_OURS else CandidateFailed(said)
