"""Rows of a table as the native hook takes them. Imported with the first table alone: most programs have none.

Each structure mirrors one of C++; `LAYOUT` is compared with the library's own with the first table that it gets.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.unpatched import builtins
from gemmtuned.hooks.native.records import PackedProblem, layout_of, pack
from gemmtuned.hooks.native.structures import MIRRORED, Cond, Packed

__builtins__ = builtins

_ALIGN: Final = 16  # what the structures of a launch need
_POINTER: Final = struct.Struct("P")


class GtRow(ctypes.Structure):
    """One row of a table, as gt_load takes it."""

    _fields_ = (
        ("key", PackedProblem),
        ("id", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("launch", ctypes.c_void_p),
        ("conditions", ctypes.POINTER(Cond)),
        ("condition_count", ctypes.c_int32),
        ("scales_sums", ctypes.c_int32),
        ("chain_rows", ctypes.c_int64),
        ("engines", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


LAYOUT: Final = layout_of(*MIRRORED, ("GtRow", GtRow))


class Row(NamedTuple):
    """One row of a table: a problem with padded m, what it covers, its mode, and the route that serves it."""

    problem: Problem
    covers: str
    mode: str
    ident: int
    code: int
    place: str = "cpu"
    launch: Packed | None = None  # what some codes need
    conditions: Sequence[Cond] = ()
    scales_sums: bool = False  # takes any alpha and beta
    chain_rows: int = 0  # for a batch-invariant problem: rows of X at a time
    engines: int = 0  # bits of `Engines` of routes.h

    def but(self, **changes: Any) -> Row:
        """The same with these values. `_replace` makes the collector count one object more for a tuple above 10."""
        return Row(**{**self._asdict(), **changes})


class PackedRows:
    """Rows as the library takes them, in three pieces of memory: no object for each, which the collector would count.

    A row that the native table cannot hold is left out.  refused: how many, and what is said of the first.

    While they grow they may move, so a row has the offset of what it points at, plus one, until all are there; then
    ctypes holds the pieces and they stay where they are.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows, self._launches, self._conditions = bytearray(), bytearray(), bytearray()
        self.refused, self.why = 0, ""
        for row in rows:
            try:
                self._add(row)
            except ProblemError as err:  # noqa: PERF203  it costs that row
                self.refused, self.why = self.refused + 1, self.why or str(err)
        self.count = len(self._rows) // ctypes.sizeof(GtRow)
        self.array = (GtRow * self.count).from_buffer(self._rows)
        self._held = [(ctypes.c_char * len(p)).from_buffer(p) for p in (self._launches, self._conditions)]
        for field, pieces in zip((GtRow.launch, GtRow.conditions), self._held, strict=True):
            self._point(field.offset, ctypes.addressof(pieces) - 1)

    def _add(self, row: Row) -> None:
        key = pack(row.problem, covers=row.covers, graph=row.mode == "graph", place=row.place)
        packed = GtRow(
            key, row.ident, row.code, scales_sums=row.scales_sums, chain_rows=row.chain_rows, engines=row.engines
        )
        packed.condition_count = len(row.conditions)
        if row.launch is not None:
            packed.launch = len(self._launches) + 1
            self._launches += bytes(row.launch)
            self._launches += bytes(-len(self._launches) % _ALIGN)
        data = bytearray(bytes(packed))
        _POINTER.pack_into(data, GtRow.conditions.offset, len(self._conditions) + 1)
        self._conditions += b"".join(map(bytes, row.conditions))
        self._rows += data

    def _point(self, offset: int, base: int) -> None:
        for at in range(offset, len(self._rows), ctypes.sizeof(GtRow)):
            (beyond,) = _POINTER.unpack_from(self._rows, at)
            _POINTER.pack_into(self._rows, at, base + beyond if beyond else 0)
