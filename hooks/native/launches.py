"""What the native hook is given of a launch record: configs/launch.py's words as the structures of its headers.

W and its scale lie in the hook as torch takes them, [K, N], so dimensions of `w` and `scale_w` are exchanged here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, Final

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.launch import (
    OPS,
    PLAIN,
    SLOTS,
    TURNED,
    WHATS,
    Axis,
    Condition,
    KernelLaunch,
    LibraryLaunch,
    OperatorLaunch,
    quantity,
)
from gemmtuned.configs.operator_arguments import TEXT
from gemmtuned.configs.tensor_maps import tensor_map
from gemmtuned.hooks.native.structures import Argument, Cond, GridAxis, Launch, LtLaunch, OperatorCall
from gemmtuned.kernels.cublaslt import COMPUTES, DATA_TYPES, SCALE_MODES

_NO_SLOT: Final = len(SLOTS)
_OPERAND, _TENSOR_MAP = 0, 1 + len(PLAIN)  # ArgumentKind
_AS_TORCH, _ALPHA, _BETA, _NOTHING, _INTEGER, _REAL, _TRUTH, _TEXT, _INTEGERS = 16, *range(32, 40)  # OperandKind


def conditions(given: Iterable[Condition], rank: int) -> list[Cond]:
    """rank: of W, 3 with a batch or with groups."""
    found = []
    for of, op, value in given:
        slot, what, dim = quantity(of)
        packed = Cond(_slot(slot), _what(slot, what), _dim(slot, dim, rank), OPS.index(op), _NO_SLOT)
        if isinstance(value, int):
            packed.value = value
        else:
            other = quantity(value)
            packed.of_slot, packed.of_dim = _slot(other.slot), _dim(other.slot, other.dim, rank)
        found.append(packed)
    return found


def kernel_launch(record: KernelLaunch, function: int, rank: int) -> Launch:
    """function: the handle of the loaded kernel. Raises TableError for maps of batches."""
    if rank != 2 and any(tensor_map(argument) for argument in record.arguments):
        raise TableError("its launch record takes tensor maps, which are of operands without a batch")
    launch = Launch(
        function=function, partials_offset=record.partials_offset, workspace_bytes=record.workspace_bytes,
        threads=record.threads, shared=record.shared, cluster=record.cluster, count=len(record.arguments),
    )  # fmt: skip
    for i, axis in enumerate(record.grid):
        launch.grid[i] = _axis(axis, rank)
    for i, argument in enumerate(record.arguments):
        if argument in PLAIN:
            launch.arguments[i] = Argument(1 + PLAIN.index(argument))
        elif mapped := tensor_map(argument):
            launch.arguments[i] = Argument(
                _TENSOR_MAP, _slot(mapped.slot), mapped.rows // 8, _dim(mapped.slot, 0, rank)
            )
        else:
            slot, what, dim = quantity(argument.removesuffix("?"))
            launch.arguments[i] = Argument(_OPERAND, _slot(slot), _what(slot, what), _dim(slot, dim, rank))
    return launch


def library_launch(record: LibraryLaunch) -> LtLaunch:
    """A cuBLASLt algorithm."""
    types = {f"type_{name}": DATA_TYPES[record.types[name]] for name in ("x", "w", "y", "bias")}
    return LtLaunch(
        algo=(ctypes.c_uint64 * 8).from_buffer_copy(bytes.fromhex(record.algo)), **types,
        workspace_bytes=record.workspace_bytes, compute_type=COMPUTES[record.compute],
        scale_x=SCALE_MODES.get(record.scale_x, 0), scale_w=SCALE_MODES.get(record.scale_w, 0),
        x_turned=record.layout[0] == "t", w_turned=record.layout[1] == "t", fast=record.fast,
    )  # fmt: skip


def operator_call(record: OperatorLaunch) -> OperatorCall:
    """An operator; the native hook looks it up when it gets it."""
    name, _, overload = record.operator.partition(".")
    call = OperatorCall(
        count=len(record.arguments), name=name.encode(), overload=overload.encode(), schema=record.schema.encode()
    )
    for i, argument in enumerate(record.arguments):
        call.kind[i] = _operand_kind(argument)
        if isinstance(argument, int):
            call.integer[i] = argument
        elif isinstance(argument, tuple):
            call.integer[i] = len(argument)
            call.integers[i][: len(argument)] = argument
        elif isinstance(argument, float):
            call.real[i] = argument
        elif isinstance(argument, str) and argument.startswith(TEXT):
            call.text[i].value = argument.removeprefix(TEXT).encode()
    return call


def _operand_kind(argument: Any) -> int:
    if argument in ("alpha", "beta"):
        return _ALPHA if argument == "alpha" else _BETA
    if isinstance(argument, str) and argument.startswith(TEXT):
        return _TEXT
    if isinstance(argument, str):
        return _slot(argument) + (_AS_TORCH if argument in TURNED else 0)
    if argument is None or isinstance(argument, tuple):
        return _NOTHING if argument is None else _INTEGERS
    return _TRUTH if isinstance(argument, bool) else _INTEGER if isinstance(argument, int) else _REAL


def _axis(axis: Axis, rank: int) -> GridAxis:
    if not axis.of:
        return GridAxis(axis.block, _NO_SLOT)
    slot, _, dim = quantity(axis.of)
    return GridAxis(axis.block, _slot(slot), _dim(slot, dim, rank))


def _slot(name: str) -> int:
    return SLOTS.index(TURNED.get(name, name))


def _dim(slot: str, dim: int, rank: int) -> int:
    """The number that dimension `dim` of an operand has in the hook's slot, which holds W turned."""
    turns = slot in TURNED.values() and dim < rank and dim >= rank - 2
    return 2 * rank - 3 - dim if turns else dim


def _what(slot: str, what: str) -> int:
    """`contiguous` of w is that of a turned tensor there."""
    return WHATS.index(what) + (what == "contiguous" and slot in TURNED.values())
