"""The structures of a route in the native hook, as ctypes has them; launches.py fills them."""

from __future__ import annotations

import ctypes
from typing import Final

from gemmtuned.configs.launch_sizes import MAX_ARGUMENTS, MAX_INTEGERS, MAX_OPERATOR_ARGUMENTS, MAX_TEXT


class Cond(ctypes.Structure):
    """`Cond` of slots.h."""

    _fields_ = (
        *((name, ctypes.c_uint8) for name in ("slot", "what", "dim", "op", "of_slot", "of_dim")),
        ("spare", ctypes.c_uint16), ("value", ctypes.c_int32),
    )  # fmt: skip


class Argument(ctypes.Structure):
    """`cuda::Argument` of cuda_launch.h."""

    _fields_ = tuple((name, ctypes.c_uint8) for name in ("kind", "slot", "what", "dim"))


class GridAxis(ctypes.Structure):
    """`cuda::Axis` of cuda_launch.h."""

    _fields_ = (
        ("block", ctypes.c_int32),
        ("slot", ctypes.c_uint8),
        ("dim", ctypes.c_uint8),
        ("spare", ctypes.c_uint16),
    )


class Launch(ctypes.Structure):
    """How the native hook launches one kernel: `cuda::Launch` of cuda_launch.h."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("partials_offset", ctypes.c_int64), ("workspace_bytes", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("threads", "shared", "cluster", "count")),
        ("grid", GridAxis * 3), ("arguments", Argument * MAX_ARGUMENTS),
    )  # fmt: skip


class LtLaunch(ctypes.Structure):
    """How the native hook has cuBLASLt run one algorithm: `cuda::LtLaunch` of cublaslt.h."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8), ("workspace_bytes", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("compute_type", "type_x", "type_w", "type_y", "type_bias")),
        *((name, ctypes.c_int32) for name in ("scale_x", "scale_w")),
        *((name, ctypes.c_uint8) for name in ("x_turned", "w_turned", "fast")),
    )  # fmt: skip


class OperatorCall(ctypes.Structure):
    """How the native hook calls a registered operator: `OperatorLaunch` of operator_call.h."""

    _fields_ = (
        ("integer", ctypes.c_int64 * MAX_OPERATOR_ARGUMENTS),
        ("integers", ctypes.c_int64 * MAX_INTEGERS * MAX_OPERATOR_ARGUMENTS),
        ("real", ctypes.c_double * MAX_OPERATOR_ARGUMENTS),
        ("kind", ctypes.c_uint8 * MAX_OPERATOR_ARGUMENTS), ("count", ctypes.c_uint8),
        ("text", ctypes.c_char * (MAX_TEXT + 1) * MAX_OPERATOR_ARGUMENTS),
        ("name", ctypes.c_char * 256), ("overload", ctypes.c_char * 128), ("schema", ctypes.c_char * 2048),
    )  # fmt: skip


class RowBlocks(ctypes.Structure):
    """How the native hook cuts a product into blocks of rows: `RowBlocks` of routes.h."""

    _fields_ = (("kernel", ctypes.c_int32), ("block", ctypes.c_int32), ("grain", ctypes.c_int32))


MIRRORED: Final = (
    ("Cond", Cond), ("Argument", Argument), ("Axis", GridAxis), ("Launch", Launch), ("LtLaunch", LtLaunch),
    ("OperatorLaunch", OperatorCall), ("RowBlocks", RowBlocks),
)  # fmt: skip
Packed = Launch | LtLaunch | OperatorCall | RowBlocks
