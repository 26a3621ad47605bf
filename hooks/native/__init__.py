"""The native hook: C++ operators in front of aten's, what builds them and what binds them.

c_api.cpp     what is compiled, with the C interface; each header says what it is of
build.py      compiles it, with the user's own torch and compiler
records.py    its structures, mirrored; structures.py: those of routes, which launches.py fills from launch records
library.py    calls into it
"""

from gemmtuned.hooks.native.library import CAPTURE, DISPATCH, INVARIANT, OFF, Native, NativeError
from gemmtuned.hooks.native.records import (
    HOW,
    LAYOUT,
    PackedProblem,
    Row,
    pack,
    unpack,
)

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
    "Row",
    "pack",
    "unpack",
)
