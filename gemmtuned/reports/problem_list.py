"""Problems out of a file: a plain list, or one of AITER's untuned tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from gemmtuned.configs.aiter_csv import is_header
from gemmtuned.configs.aiter_rows import Untuned, read_untuned
from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.problem import Problem

_HEADER: Final = re.compile(r"[A-Za-z_]\w*\s*,[^:]*$")  # a problem's spelling has a colon before its first comma


def read_list(lines: Sequence[str], *, name: str, dtype: str, threads: int) -> Untuned:
    """Problems of a file named `name`; bad rows become complaints with their line and column.

    A first line that names the columns M, N and K makes it an AITER table, whose rows take `dtype` and `threads`
    where they say nothing.  Otherwise one problem a line, as reports spell it; `#` begins a comment.
    Raises TableError for an AITER table of a family we do not tune.
    """
    first = next((line for line in lines if line.strip()), "")
    if is_header(first) or _HEADER.match(first):  # some header: read_untuned says which ones it takes
        return read_untuned(lines, name=name, dtype=dtype, threads=threads)
    problems: dict[Problem, None] = {}
    complaints = []
    for number, line in enumerate(lines, 1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        try:
            problems[Problem.parse(text)] = None
        except ProblemError as err:
            column = line.index(text[0]) + 1
            complaints.append(f"{name} line {number}, column {column}: {err}")
    return Untuned(tuple(problems), tuple(complaints))
