"""The native hook: C++ operators in front of aten's, what builds them and what binds them.

c_api.cpp     what is compiled, with the C interface; each header says what it is of
build.py      compiles it, with the user's own torch and compiler
records.py    what it has counted
table_rows.py what it takes of a table; structures.py: of routes, which launches.py fills from launch records
library.py    calls into it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemmtuned.hooks.native.library import CAPTURE, DISPATCH, INVARIANT, OFF, Native, NativeError
from gemmtuned.hooks.native.records import (
    HOW,
    LAYOUT,
    PackedProblem,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from gemmtuned.hooks.native.table_rows import Row as Row

__all__ = (
    "CAPTURE",
    "DISPATCH",
    "HOW",
    "INVARIANT",
    "LAYOUT",
    "OFF",
    "Native",
    "NativeError",
    "PackedProblem",
    "pack",
    "unpack",
)


def __getattr__(name: str) -> Any:
    """`Row`, of table_rows.py, which programs without a table never import."""
    if name != "Row":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gemmtuned.hooks.native.table_rows import Row

    return Row
