"""The native hook, bound with ctypes. The only file that calls into capture.cpp.

`Native` mirrors its C interface; `pack` and `unpack` turn a Problem into the packed key and back.  Loading it needs
torch imported first (it links against torch's libraries) and takes a millisecond.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from gemmtuned.configs.errors import GemmtunedError, ProblemError
from gemmtuned.configs.padding import COVERS
from gemmtuned.configs.problem import DTYPES, FAMILIES, LAYOUTS, MATH_MODES, Problem
from gemmtuned.configs.sighting import OUTCOMES, Sighting

OFF: Final = 0
CAPTURE: Final = 1
DISPATCH: Final = 2
_BIAS, _DETERMINISTIC, _GRAPH, _PACKED = 1, 2, 4, 8
_NAMES: Final = {number: name for name, number in DTYPES.items()}


class _Problem(ctypes.Structure):
    _fields_ = (
        ("m", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("batch", ctypes.c_int32),
        ("threads", ctypes.c_uint16),
        ("family", ctypes.c_uint8),
        ("dtype", ctypes.c_uint8),
        ("wdtype", ctypes.c_uint8),
        ("out_dtype", ctypes.c_uint8),
        ("layout", ctypes.c_uint8),
        ("math", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("device_type", ctypes.c_uint8),
        ("device_index", ctypes.c_uint8),
        ("covers", ctypes.c_uint8),
    )


class _Record(ctypes.Structure):
    _fields_ = (
        ("key", _Problem),
        ("calls", ctypes.c_uint64 * 3),
        ("sampled_calls", ctypes.c_uint64),
        ("sampled_ns", ctypes.c_uint64),
    )


class _Row(ctypes.Structure):
    _fields_ = (("key", _Problem), ("id", ctypes.c_int32), ("code", ctypes.c_int32))


class _Failure(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int32), ("reason", ctypes.c_char * 252))


_LAYOUT: Final = ctypes.sizeof(_Problem) << 32 | ctypes.sizeof(_Record) << 16 | ctypes.sizeof(_Row)


class NativeError(GemmtunedError):
    """The native hook cannot be loaded or installed."""


class Native:
    """The loaded library. One per process; every method may be called from any thread."""

    def __init__(self, path: Path) -> None:
        try:
            lib = ctypes.CDLL(str(path))
        except OSError as err:
            raise NativeError(f"{path} does not load ({err}). Delete it, it is built anew") from err
        for name, result, *arguments in _SIGNATURES:
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        if lib.gt_layout() != _LAYOUT:
            raise NativeError(f"{path} was built from other sources. Delete it, it is built anew")
        self._lib = lib
        self._records = (_Record * 1024)()

    def install(self) -> None:
        """Put our operators in front of torch's. Raises NativeError."""
        error = ctypes.create_string_buffer(500)
        if self._lib.gt_install(error, len(error)) != 0:
            raise NativeError(f"torch refused the native hook: {error.value.decode(errors='replace')}")

    def remove(self) -> None:
        """Take them away again; calls on their way finish."""
        self._lib.gt_remove()

    def set_mode(self, mode: int) -> None:
        """OFF, or CAPTURE and DISPATCH or-ed together."""
        self._lib.gt_set_mode(mode)

    def load(self, rows: Iterable[tuple[Problem, str, str, int, int]], generation: int) -> None:
        """Swap in a new table. A row is (problem with padded m, covers, mode, route id, route code)."""
        packed = [
            _Row(pack(p, covers=covers, graph=mode == "graph"), ident, code) for p, covers, mode, ident, code in rows
        ]
        self._lib.gt_load((_Row * len(packed))(*packed), len(packed), generation)

    def find(self, problem: Problem, *, graph: bool = False) -> tuple[str, int | None]:
        """(outcome, route id) that a call with this problem would get now."""
        found = self._lib.gt_find(ctypes.byref(pack(problem, graph=graph)))
        return OUTCOMES[found & 0xFF], (found >> 8) - 1 if found >> 8 else None

    def drain(self) -> Iterator[Sighting]:
        """All calls counted since the last drain. One thread at a time."""
        room = len(self._records)
        count = room
        while count == room:
            count = self._lib.gt_drain(self._records, room)
            for record in self._records[:count]:
                yield from _sightings(record)

    def failures(self) -> list[tuple[int, str]]:
        """(route id, reason) of routes that failed since the last time."""
        found = (_Failure * 64)()
        count = self._lib.gt_take_failures(found, len(found))
        return [(f.id, f.reason.decode(errors="replace")) for f in found[:count]]

    @property
    def generation(self) -> int:
        """Generation of the table in use."""
        return int(self._lib.gt_generation())

    @property
    def dropped(self) -> int:
        """Calls not counted because a thread saw more distinct problems than it may keep."""
        return int(self._lib.gt_dropped())

    def padded_m(self, m: int, n: int, covers: str) -> int:
        """The C++ twin of configs.padding.padded_m."""
        return int(self._lib.gt_padded_m(m, n, COVERS.index(covers)))


_SIGNATURES: Final = (
    ("gt_layout", ctypes.c_uint64),
    ("gt_install", ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t),
    ("gt_remove", None),
    ("gt_set_mode", None, ctypes.c_int),
    ("gt_generation", ctypes.c_uint64),
    ("gt_dropped", ctypes.c_uint64),
    ("gt_drain", ctypes.c_size_t, ctypes.POINTER(_Record), ctypes.c_size_t),
    ("gt_load", None, ctypes.POINTER(_Row), ctypes.c_size_t, ctypes.c_uint64),
    ("gt_find", ctypes.c_uint64, ctypes.POINTER(_Problem)),
    ("gt_padded_m", ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int),
    ("gt_take_failures", ctypes.c_size_t, ctypes.POINTER(_Failure), ctypes.c_size_t),
)


def pack(problem: Problem, *, covers: str = "exact", graph: bool = False) -> _Problem:
    """The packed key of a problem. Raises ProblemError for fields the native table does not know."""
    if problem.scale != "none" or problem.experts is not None or problem.weight_state == "shuffled":
        raise ProblemError(f"{problem}: the native table has no scales, experts or shuffled weights")
    flags = (
        problem.bias * _BIAS
        | problem.deterministic * _DETERMINISTIC
        | graph * _GRAPH
        | (problem.weight_state == "packed") * _PACKED
    )
    return _Problem(
        m=problem.m,
        n=problem.n,
        k=problem.k,
        batch=problem.batch,
        threads=problem.threads,
        family=FAMILIES.index(problem.family),
        dtype=DTYPES[problem.dtype],
        wdtype=DTYPES[problem.wdtype],
        out_dtype=DTYPES[problem.out_dtype],
        layout=LAYOUTS.index(problem.layout),
        math=MATH_MODES.index(problem.math_mode),
        flags=flags,
        covers=COVERS.index(covers),
    )


def unpack(key: _Problem) -> Problem:
    """The problem of a packed key. Raises ProblemError for a dtype we have no name for."""
    try:
        dtype, wdtype, out_dtype = (_NAMES[code] for code in (key.dtype, key.wdtype, key.out_dtype))
    except KeyError as err:
        raise ProblemError(f"torch dtype number {err} has no name here") from err
    return Problem(
        family=FAMILIES[key.family],
        batch=key.batch,
        m=key.m,
        n=key.n,
        k=key.k,
        bias=bool(key.flags & _BIAS),
        dtype=dtype,
        wdtype=wdtype,
        out_dtype=out_dtype,
        layout=LAYOUTS[key.layout],
        weight_state="packed" if key.flags & _PACKED else "plain",
        math_mode=MATH_MODES[key.math],
        deterministic=bool(key.flags & _DETERMINISTIC),
        threads=key.threads,
    )


def _sightings(record: _Record) -> Iterator[Sighting]:
    try:
        problem = unpack(record.key)
    except ProblemError:
        return  # a dtype newer than we are: not counted rather than counted wrongly
    # samples belong to the problem, not to an outcome: they go with the first outcome that has calls
    samples = (record.sampled_calls, record.sampled_ns / 1000)
    for outcome, calls in zip(OUTCOMES, record.calls, strict=True):
        if calls or samples[0]:
            yield Sighting(problem, outcome, calls, bool(record.key.flags & _GRAPH), *samples)
            samples = (0, 0.0)
