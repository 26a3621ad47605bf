"""Problems out of AITER's untuned tables.

Read: header M,N,K, then any of B, bias, dtype, outdtype, scaleAB, bpreshuffle (AITER's bf16 and batched families);
further columns are ignored, except q_dtype_w, which marks a quantised family.  As AITER's own readers must: spaces and
tabs around values, blank or comma-only rows, bools as True/False or 1/0, dtypes as `torch.bfloat16`, `dtypes.bf16` or
`bf16`.  AITER evaluates dtype text as Python; here it is looked up.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from gemmtuned.configs.errors import ProblemError, TableError
from gemmtuned.configs.problem import DTYPES, Problem

# AITER's and torch's names for ours, lower case, without "torch." or "dtypes."
DTYPE_NAMES: Final = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "float64": "fp64",
    "int8": "i8", "uint8": "u8", "float8_e4m3fn": "fp8_e4m3", "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "float8_e5m2": "fp8_e5m2", "float8_e5m2fnuz": "fp8_e5m2fnuz", "float4_e2m1fn_x2": "fp4_e2m1", "fp4x2": "fp4_e2m1",
    "f32": "fp32", "f16": "fp16",
}  # fmt: skip
_BOOLS: Final = {"true": True, "1": True, "false": False, "0": False, "": False, "none": False, "null": False}


@dataclass(frozen=True, slots=True)
class Untuned:
    """What a table holds: its problems, each once and in order, and one complaint for each bad row."""

    problems: tuple[Problem, ...]
    complaints: tuple[str, ...]


def is_header(line: str) -> bool:
    """True when this line begins a table of GEMMs: it names the columns M, N and K."""
    return {"M", "N", "K"} <= {name.strip() for name in line.split(",")}


def read_untuned(lines: Iterable[str], *, name: str, dtype: str, threads: int) -> Untuned:
    """Read an untuned table; `name` stands in complaints ("name line 7, column M: ...").

    dtype serves rows without one; threads is what AITER does not say (0 for devices other than CPUs).
    Raises TableError when the header is not one of the families above.
    """
    reader = csv.reader(lines)
    header = [column.strip() for column in next((row for row in reader if any(row)), [])]
    if not is_header(",".join(header)):
        raise TableError(
            f"{name} line {reader.line_num}: the header is {','.join(header)!r}, expected M,N,K[,bias,dtype,...]"
        )
    if "dtype" not in header and re.search("a8w8|a4w4", name):  # their header is M,N,K as well: only the name tells
        raise TableError(f"{name}: by its name a quantised family, which is not tuned yet, only bf16 and fp32")
    if "q_dtype_w" in header:
        raise TableError(
            f"{name} line {reader.line_num}: column q_dtype_w: quantised families are not tuned yet, only bf16 and fp32"
        )
    problems: dict[Problem, None] = {}
    complaints: list[str] = []
    try:
        for values in reader:
            if not any(value.strip() for value in values):
                continue
            row = {column: value.strip() for column, value in zip(header, values, strict=False)}
            try:
                problems[_problem(row, dtype, threads)] = None
            except ProblemError as err:
                complaints.append(f"{name} line {reader.line_num}, {err}")
    except csv.Error as err:
        complaints.append(f"{name} line {reader.line_num}: {err}")
    return Untuned(tuple(problems), tuple(complaints))


def _problem(row: dict[str, str], dtype: str, threads: int) -> Problem:
    values: dict[str, Any] = {"threads": threads}
    for column in ("M", "N", "K", "B"):
        if column in row or column != "B":
            values[{"B": "batch"}.get(column, column.lower())] = _integer(row, column)
    if "B" in row:
        values["family"] = "batched"
    values["bias"] = _bool(row, "bias")
    values["dtype"] = _dtype(row, "dtype") or dtype
    values["out_dtype"] = _dtype(row, "outdtype") or ""
    if _bool(row, "scaleAB"):
        values |= {"family": "scaled", "scale": "tensor"}
    if _bool(row, "bpreshuffle"):
        values["weight_state"] = "shuffled"
    try:
        return Problem(**values)
    except ProblemError as err:
        name = str(err).split(" ", 1)[0]
        raise ProblemError(f"column {_COLUMN.get(name, name)}: {err}") from err


_COLUMN: Final = {"m": "M", "n": "N", "k": "K", "batch": "B"}


def _integer(row: dict[str, str], column: str) -> int:
    text = row.get(column, "")
    if not text.isascii() or not text.isdigit() or len(text) > 10:
        raise ProblemError(f"column {column}: {text!r} is not a whole number")
    return int(text)


def _bool(row: dict[str, str], column: str) -> bool:
    text = row.get(column, "").lower()
    if text not in _BOOLS:
        raise ProblemError(f"column {column}: {text!r} is neither True nor False")
    return _BOOLS[text]


def _dtype(row: dict[str, str], column: str) -> str | None:
    text = row.get(column, "")
    if text.lower() in ("", "none", "null"):
        return None
    short = text.lower().removeprefix("torch.").removeprefix("dtypes.")
    found = DTYPE_NAMES.get(short, short)
    if found not in DTYPES:
        raise ProblemError(f"column {column}: {text!r} is no dtype we know")
    return found
