"""The structures of the native hook as ctypes has them, and a Problem as its packed key and back.

Each mirrors one of C++; `LAYOUT` is compared with the library's own when that is loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from gemmtuned.configs import key
from gemmtuned.configs import launch as launch_records
from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import OUTCOMES, Sighting

_UNSIGNED: Final[dict[int, Any]] = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32}
MAX_OPERATOR_ARGUMENTS: Final = launch_records.MAX_OPERATOR_ARGUMENTS


class PackedProblem(ctypes.Structure):
    """The packed key of a problem: `Problem` of problem.h, from the table in configs/key.py."""

    _fields_ = tuple((f.name, _UNSIGNED[f.size] * f.times if f.times > 1 else _UNSIGNED[f.size]) for f in key.FIELDS)


class Record(ctypes.Structure):
    _fields_ = (
        ("key", PackedProblem),
        ("calls", ctypes.c_uint64 * 3),
        ("sampled_calls", ctypes.c_uint64),
        ("sampled_ns", ctypes.c_uint64),
    )


class Launch(ctypes.Structure):
    """How the native hook launches one kernel: `cuda::Launch` of cuda_launch.h."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("max_m", ctypes.c_int64),
        ("partials_offset", ctypes.c_int64),
        ("workspace_bytes", ctypes.c_int64),
        ("pointer_align", ctypes.c_int64),
        ("device", ctypes.c_int32),
        ("warps", ctypes.c_int32),
        ("warp_size", ctypes.c_int32),
        ("shared", ctypes.c_int32),
        ("ld_multiple", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("cluster", ctypes.c_int32),
        ("block", ctypes.c_int32 * 3),
        ("over", ctypes.c_uint8 * 3),
        ("argument_count", ctypes.c_uint8),
        ("null_pointers", ctypes.c_uint8),
        ("arguments", ctypes.c_uint8 * 15),
    )


class LtLaunch(ctypes.Structure):
    """How the native hook has cuBLASLt run one algorithm: `cuda::LtLaunch` of cublaslt.h."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("max_m", ctypes.c_int64),
        ("workspace_bytes", ctypes.c_int64),
        ("pointer_align", ctypes.c_int64),
        ("device", ctypes.c_int32),
        ("ld_multiple", ctypes.c_int32),
        ("data_type", ctypes.c_int32),
        ("compute_type", ctypes.c_int32),
        ("x_turned", ctypes.c_uint8),
        ("w_turned", ctypes.c_uint8),
    )


class OperatorLaunch(ctypes.Structure):
    """How the native hook calls a registered operator: `OperatorLaunch` of operator_call.h."""

    _fields_ = (
        ("max_m", ctypes.c_int64),
        ("integer", ctypes.c_int64 * MAX_OPERATOR_ARGUMENTS),
        ("real", ctypes.c_double * MAX_OPERATOR_ARGUMENTS),
        ("kind", ctypes.c_uint8 * MAX_OPERATOR_ARGUMENTS),
        ("count", ctypes.c_uint8),
        ("contiguous", ctypes.c_uint8),
        ("name", ctypes.c_char * 256),
        ("overload", ctypes.c_char * 128),
        ("schema", ctypes.c_char * 2048),
    )


class RowBlocks(ctypes.Structure):
    """How the native hook cuts a product into blocks of rows: `RowBlocks` of routes.h."""

    _fields_ = (("kernel", ctypes.c_int32), ("block", ctypes.c_int32), ("grain", ctypes.c_int32))


class GtRow(ctypes.Structure):
    _fields_ = (
        ("key", PackedProblem),
        ("id", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("launch", ctypes.c_void_p),
    )


class GtFailure(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int32), ("how", ctypes.c_int32), ("reason", ctypes.c_char * 248))


HOW: Final = ("failed", "wrong")  # index: Failing of routes.h


_MIRRORED: Final = (
    ("ProblemFields", PackedProblem), ("Record", Record), ("Launch", Launch), ("LtLaunch", LtLaunch),
    ("OperatorLaunch", OperatorLaunch), ("RowBlocks", RowBlocks), ("GtRow", GtRow), ("GtFailure", GtFailure),
)  # fmt: skip
LAYOUT: Final = "".join(
    f"{name}.{field[0]}:{getattr(kind, field[0]).offset}:{getattr(kind, field[0]).size}\n"
    for name, kind in _MIRRORED
    for field in kind._fields_
)


class Row(NamedTuple):
    """One row of a table: a problem with padded m, what it covers, its mode, and the route that serves it."""

    problem: Problem
    covers: str
    mode: str
    ident: int
    code: int
    place: str = "cpu"
    launch: Launch | LtLaunch | OperatorLaunch | RowBlocks | None = None  # what some codes need


def pack(problem: Problem, *, covers: str = "exact", graph: bool = False, place: str = "cpu") -> PackedProblem:
    """The packed key of a problem. Raises ProblemError for fields the native table does not know."""
    return PackedProblem(**key.values_of(problem, covers=covers, graph=graph, place=place))


def unpack(packed: PackedProblem) -> Problem:
    """The problem of a packed key. Raises ProblemError for a dtype we have no name for."""
    return key.problem_of({f.name: getattr(packed, f.name) for f in key.FIELDS if f.times == 1})


def sightings(record: Record) -> Iterator[Sighting]:
    try:
        problem = unpack(record.key)
    except ProblemError:
        return  # a dtype newer than we are: not counted rather than counted wrongly
    kind = key.PLACES[record.key.device_type]
    place = kind if kind == "cpu" else f"{kind}:{record.key.device_index}"
    # samples belong to the problem, not to an outcome: they go with the first outcome that has calls
    samples = (record.sampled_calls, record.sampled_ns / 1000)
    for outcome, calls in zip(OUTCOMES, record.calls, strict=True):
        if calls or samples[0]:
            yield Sighting(problem, outcome, calls, bool(record.key.flags & key.FLAGS["GRAPH"]), *samples, place)
            samples = (0, 0.0)
