"""Solutions as bytes, which Python's garbage collector does not track, for programs with tables of thousands of rows.

The collector runs in whichever thread allocates one object too many, and holds the interpreter lock until it is done:
a tenth of a second in a program with millions of objects.  Bytes do not count, and a solution that is unpacked to be
read is freed before the next one.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Final, overload

from gemmtuned.configs.problem import COLUMNS, Problem
from gemmtuned.configs.solution import Solution
from gemmtuned.configs.value_class import names_of

_FORM: Final = 2  # the newest in which equal values always have equal bytes
_OWN: Final = tuple(name for name in names_of(Solution) if name != "problem")
_of_problem: Final = attrgetter(*COLUMNS)
_of_solution: Final = attrgetter(*_OWN)
_PUT_PROBLEM: Final = [getattr(Problem, name).__set__ for name in COLUMNS]  # both are frozen
_PUT_SOLUTION: Final = [getattr(Solution, name).__set__ for name in _OWN]


def pack(solution: Solution) -> bytes:
    """The solution as bytes for `unpack` in this process; equal solutions give equal bytes."""
    return marshal.dumps((*_of_problem(solution.problem), *_of_solution(solution)), _FORM)


def unpack(packed: bytes) -> Solution:
    """The solution that `pack` was given; nothing is validated again."""
    values = marshal.loads(packed)  # noqa: S302  bytes that this process made
    problem, solution = object.__new__(Problem), object.__new__(Solution)
    for put, value in zip(_PUT_PROBLEM, values[: len(COLUMNS)], strict=True):
        put(problem, value)
    for put, value in zip(_PUT_SOLUTION, values[len(COLUMNS) :], strict=True):
        put(solution, value)
    object.__setattr__(solution, "problem", problem)
    return solution


class Solutions(Sequence[Solution]):
    """A list of solutions that holds them packed; each is unpacked when it is read."""

    __slots__ = ("packed",)

    def __init__(self, solutions: Iterable[Solution] = ()) -> None:
        self.packed = [pack(solution) for solution in solutions]

    @classmethod
    def of(cls, packed: Iterable[bytes]) -> Solutions:
        """A list of solutions that are packed already."""
        whole = cls()
        whole.packed += packed
        return whole

    @classmethod
    def joined(cls, parts: Iterable[Solutions]) -> Solutions:
        """All of theirs, one after another."""
        whole = cls()
        for part in parts:
            whole.packed += part.packed
        return whole

    def __len__(self) -> int:
        return len(self.packed)

    def __iter__(self) -> Iterator[Solution]:
        return map(unpack, self.packed)

    @overload
    def __getitem__(self, index: int) -> Solution: ...
    @overload
    def __getitem__(self, index: slice) -> list[Solution]: ...
    def __getitem__(self, index: int | slice) -> Solution | list[Solution]:
        if isinstance(index, slice):
            return [unpack(packed) for packed in self.packed[index]]
        return unpack(self.packed[index])

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]
