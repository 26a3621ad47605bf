"""Tensor maps among the arguments of a launch record: `x.map64`, for copies by the tensor memory accelerator (TMA).

`<slot>.map<rows>` is the map (CUtensorMap, 128 bytes, passed by value) of an operand [rows, columns] as a matrix of
bytes, for boxes of 128 bytes of so many rows, swizzled by 128 bytes, with zeros outside of the matrix.  It holds the
operand's address, so each launch makes it anew (cuTensorMapEncodeTiled; CUDA driver API, tensor map object management).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

from gemmtuned.configs.errors import TableError

MAX_ROWS: Final = 256  # rows per box, a limit of the driver
BOX_BYTES: Final = 128  # bytes per row of a box: the width of the swizzle
STRIDE_MULTIPLE: Final = 16  # bytes
_WORD: Final = r"(x|w)\.map([1-9]\d{0,2})"


class TensorMap(NamedTuple):
    """A map among the arguments. rows: of a box."""

    slot: str
    rows: int


class ByteMatrix(NamedTuple):
    """What a map is made of. stride, from a row to the next, in bytes; columns: bytes of a row."""

    address: Any
    rows: int
    columns: int
    stride: int
    box_rows: int


@cache
def tensor_map(argument: str) -> TensorMap | None:
    """The map that this argument is; None for any other argument. Raises TableError for boxes that no map has."""
    match = re.fullmatch(_WORD, argument)
    if match is None:
        return None
    rows = int(match[2])
    if rows > MAX_ROWS or rows % 8:
        raise TableError(f"launch has {argument}, expected a multiple of 8 rows up to {MAX_ROWS}")
    return TensorMap(match[1], rows)


def byte_matrix(operand: Any, box_rows: int, pointer: Callable[[Any], Any]) -> ByteMatrix:
    """A torch tensor [rows, columns] whose rows have no gaps within them; of a single row the stride may be any.

    pointer: what stands for the address of an operand.
    """
    rows, columns = operand.shape
    size = operand.element_size()
    stride = operand.stride(0) * size if rows > 1 else -(-columns * size // STRIDE_MULTIPLE) * STRIDE_MULTIPLE
    return ByteMatrix(pointer(operand), rows, columns * size, stride, box_rows)
