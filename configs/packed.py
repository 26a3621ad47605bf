"""Solutions as bytes: what a program holds of tables of thousands of rows is nothing that its garbage collector counts.

The collector runs in whichever thread makes one object too many, and nobody has the interpreter lock until it is
through: of a program with millions of objects that is a tenth of a second.  Bytes are not counted, and a solution that
is made from them to be looked at is gone again before the next one.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Final, overload

from gemmtuned.configs.problem import COLUMNS, Problem
from gemmtuned.configs.solution import Solution

_FORM: Final = 2  # the newest in which equal values always have equal bytes
_OWN: Final = tuple(f.name for f in fields(Solution) if f.name != "problem")
_of_problem: Final = attrgetter(*COLUMNS)
_of_solution: Final = attrgetter(*_OWN)
_PUT_PROBLEM: Final = [getattr(Problem, name).__set__ for name in COLUMNS]  # both are frozen
_PUT_SOLUTION: Final = [getattr(Solution, name).__set__ for name in _OWN]


def pack(solution: Solution) -> bytes:
    """The solution as bytes for `unpack` in this process: those of equal solutions are equal."""
    return marshal.dumps((*_of_problem(solution.problem), *_of_solution(solution)), _FORM)


def unpack(packed: bytes) -> Solution:
    """The solution that `pack` was given; nothing is judged anew."""
    values = marshal.loads(packed)  # noqa: S302  bytes that this process made
    problem, solution = object.__new__(Problem), object.__new__(Solution)
    for put, value in zip(_PUT_PROBLEM, values[: len(COLUMNS)], strict=True):
        put(problem, value)
    for put, value in zip(_PUT_SOLUTION, values[len(COLUMNS) :], strict=True):
        put(solution, value)
    object.__setattr__(solution, "problem", problem)
    return solution


class Solutions(Sequence[Solution]):
    """A list of solutions that holds them packed; each is made anew when it is looked at."""

    __slots__ = ("packed",)

    def __init__(self, solutions: Iterable[Solution] = ()) -> None:
        self.packed = [pack(solution) for solution in solutions]

    @classmethod
    def of(cls, packed: Iterable[bytes]) -> Solutions:
        """Make it from solutions that are packed already."""
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
