"""Files that people hand over and that are no table of ours: what each is, by how it begins, and the way out."""

from __future__ import annotations

import re
from typing import Final

_RECORD: Final = "record the shapes with GEMMTUNED=1"
_BLAS: Final = f"whose M and N are BLAS's, column by column, and which is not read: {_RECORD}"
# How a file begins, and what it is
_BEGINS: Final = (
    ("version https://git-lfs", "a pointer of Git LFS and not the file itself: `git lfs pull` gets that"),
    ("PK\x03\x04", "a zip archive or a spreadsheet (.xlsx): unpack it, or save it as CSV"),
    ("SQLite format 3", "an SQLite database: import the tables that it was made from"),
    ("PAR1", "a Parquet file: save it as CSV"),
    ("\x89HDF", "an HDF5 file: save it as CSV"),
    ("<!doctype html", "a web page: download the file itself"),
    ("<html", "a web page: download the file itself"),
    ("<?xml", "XML, which is not read"),
    ("git version:", f"a tuning file of hipBLASLt, {_BLAS}"),
    ("- {", f"a log of calls of rocBLAS or hipBLASLt (YAML), {_BLAS}"),
    ("- rocblas", f"a log of calls of rocBLAS (YAML), {_BLAS}"),
    ("sep=", "a spreadsheet's CSV, whose first line names its separator: take that line out"),
)  # fmt: skip
_COLUMNS: Final = (
    (frozenset({"transA", "transB"}), f"a list of rocBLAS or hipBLASLt, {_BLAS}"),
    (frozenset({"OperationKind", "gemm_kind"}), f"of CUTLASS's profiler, which is not read: {_RECORD}"),
    (frozenset({"Name", "Calls"}), f"a profile and no list of products: {_RECORD}"),
    (frozenset({"Kernel_Name", "Dispatch_ID"}), f"a profile and no list of products: {_RECORD}"),
)  # fmt: skip
_NUMBERS: Final = re.compile(r"\d+([,; \t|]+\d+){2,3}\s*")


def what_it_is(start: str) -> str:
    """What a file that begins so is, where it is known and none of ours; "" where it may be a table."""
    low = start.lstrip("\ufeff \r\n\t").lower()
    for begin, said in _BEGINS:
        if low.startswith(begin.lower()):
            return said
    first = start.lstrip("\ufeff").split("\n", 1)[0]
    has = {cell.strip() for cell in first.split(",")}
    for columns, said in _COLUMNS:
        if columns <= has:
            return said
    if _NUMBERS.fullmatch(first):
        return "a list without a header: its first line is to name the columns, such as M,N,K"
    return ""
