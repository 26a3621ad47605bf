"""The problems of an AITER table that `gemmtuned tune` is given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from gemmtuned.configs.aiter_csv import read_lines
from gemmtuned.configs.aiter_headers import SHAPES
from gemmtuned.configs.aiter_quantised import as_called
from gemmtuned.configs.aiter_rows import TUNABLE, problem_or_reason
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.tunable import can_tune

_PLAIN: Final = ("bf16", "batched_bf16", "guide")  # products of 16-bit operands


@dataclass(frozen=True, slots=True)
class Untuned:
    """What a table holds: its problems, each once and in order, and one complaint for each bad row."""

    problems: tuple[Problem, ...]
    complaints: tuple[str, ...]


def read_untuned(lines: Iterable[str], *, name: str, dtype: str, threads: int) -> Untuned:
    """The problems of a table, tuned or not, of a family that can be tuned here; see problem_of for dtype and threads.

    A list of M, N and K alone is of `dtype`, in plain products.  Raises TableError for another family, or a header that
    is none of AITER's.
    """
    lines = list(lines)
    table = read_lines(lines, name=name)
    if table.family is SHAPES and "q_dtype_w" not in table.header.at:
        table = read_lines(lines, name=name, family="bf16")
    if table.family.name not in TUNABLE:
        if table.family is SHAPES:
            raise TableError(f"{name}: the file's name does not say which of AITER's families with q_dtype_w it is of")
        raise TableError(
            f"{name}: family {table.family.name} cannot be tuned yet, only {', '.join(TUNABLE)}; "
            "gemmtuned import keeps it"
        )
    problems: dict[Problem, None] = {}
    complaints = list(table.complaints)
    for row in table.rows:
        found = problem_or_reason(row, dtype=dtype, threads=threads)
        if isinstance(found, Problem):
            found = as_called(found)
        if isinstance(found, Problem) and (table.family.name in _PLAIN or can_tune(found)):
            problems[found] = None
        elif table.family.name not in _PLAIN:  # there a row that is no problem is for another library alone
            complaints.append(f"{name} line {row.line}, {found if isinstance(found, str) else _why_not(found)}")
    return Untuned(tuple(problems), tuple(complaints))


def _why_not(problem: Problem) -> str:
    on_gpus = problem.threads and can_tune(replace(problem, threads=0))
    return f"{problem} runs on GPUs alone" if on_gpus else f"{problem} cannot be tuned yet"
