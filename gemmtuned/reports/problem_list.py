"""Problems as people hand them over: spelled one by one, in a plain list, or in one of AITER's untuned tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from gemmtuned.configs.aiter_csv import is_header
from gemmtuned.configs.aiter_untuned import Untuned, read_untuned
from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.problem import MAX_DIM, Problem, as_by_default

_NUMBER: Final = re.compile(r"-?[0-9]{1,10}")
_SHAPE: Final = re.compile(r"-?[0-9]{1,10}x-?[0-9]{1,10}x-?[0-9]{1,10}")
_HEADER: Final = re.compile(r"[A-Za-z_]\w*\s*,[^:]*$")  # a problem's spelling has a colon before its first comma


class Shape(NamedTuple):
    """A shape, of whatever problem."""

    m: int
    n: int
    k: int


def spelled(text: str, *, threads: int = 0, gpu: bool = False) -> Problem:
    """The problem of `bf16:8x2048x1024,math=reduced`. Raises ProblemError.

    threads, gpu: where it names no threads it has these, and where it names no math mode it has the one that torch's
    defaults give, on a GPU (gpu, and no threads) or a CPU.
    """
    problem = Problem.parse(text)
    # On a CPU every call has threads; 0 means a GPU, and is the default where there is one
    problem = replace(problem, threads=problem.threads or threads)
    return problem if ",math=" in text else as_by_default(problem, gpu=gpu and not problem.threads)


def shape_or_problem(words: Sequence[str]) -> list[Shape | str]:
    """What a command line names: shapes as `8 2048 512` or `8x2048x512`, and problems, whose spelling is not looked at.

    Raises ProblemError where numbers do not make up shapes of M, N and K, and for sizes below 1.
    """
    found: list[Shape | str] = []
    numbers: list[int] = []
    for word in words:
        if _NUMBER.fullmatch(word):
            numbers.append(int(word))
            if len(numbers) == 3:
                found.append(_shape(numbers))
                numbers.clear()
            continue
        if numbers:
            break
        found.append(_shape([int(size) for size in word.split("x")]) if _SHAPE.fullmatch(word) else word)
    large = next((word for word in words if word.isdecimal() and (len(word) > 10 or int(word) > MAX_DIM)), None)
    if large is not None:
        raise ProblemError(f"{large[:40]}: M, N and K are {MAX_DIM} at most")
    if numbers:
        raise ProblemError(
            f"{' '.join(words)!r}: a shape is three numbers, M N K. Write 8 2048 512, 8x2048x512 or a problem, "
            "for example bf16:8x2048x512,threads=2"
        )
    return found


def is_below_0(word: str) -> bool:
    """Whether this is a size, or begins a shape, with a sign: a command line would take it for an option."""
    return word.startswith("-") and bool(_NUMBER.fullmatch(word) or _SHAPE.fullmatch(word))


def _shape(sizes: Sequence[int]) -> Shape:
    if min(sizes) < 1:
        raise ProblemError(f"{' '.join(map(str, sizes))}: M, N and K are 1 or more")
    return Shape(*sizes)


def read_list(lines: Sequence[str], *, name: str, dtype: str, threads: int, gpu: bool = False) -> Untuned:
    """Problems of a file named `name`; bad rows become complaints with their line and column.

    A first line that names the columns M, N and K makes it an AITER table, whose rows take `dtype`, `threads` and
    the math mode of torch's defaults.  Otherwise one problem a line, as `spelled` reads it; `#` begins a comment.
    Raises TableError for an AITER table of a family we do not tune.
    """
    first = next((line for line in lines if line.strip()), "")
    if is_header(first) or _HEADER.match(first):  # some header: read_untuned says which ones it takes
        found = read_untuned(lines, name=name, dtype=dtype, threads=threads)
        return replace(found, problems=tuple(as_by_default(p, gpu=gpu and not threads) for p in found.problems))
    problems: dict[Problem, None] = {}
    complaints = []
    for number, line in enumerate(lines, 1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        try:
            problems[spelled(text, threads=threads, gpu=gpu)] = None
        except ProblemError as err:
            column = line.index(text[0]) + 1
            complaints.append(f"{name} line {number}, column {column}: {err}")
    return Untuned(tuple(problems), tuple(complaints))
