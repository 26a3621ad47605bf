"""What the native hook has counted, as ctypes has it, and a Problem as its packed key and back.

Each structure mirrors one of C++; `LAYOUT` is compared with the library's own when that is loaded.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

from gemmtuned.configs import key
from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import OUTCOMES, Sighting
from gemmtuned.configs.unpatched import builtins

__builtins__ = builtins

_ROOM: Final = 128  # records that are read at once
_MOST_ASIDE: Final = 2048  # batches of phases that are over, and
_MOST_RECORDS: Final = 16_384  # in all of them: a last flush has half a second
_UNSIGNED: Final[dict[int, Any]] = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32}


class PackedProblem(ctypes.Structure):
    """The packed key of a problem: `Problem` of problem.h, from the table in configs/key.py."""

    _fields_ = tuple((f.name, _UNSIGNED[f.size] * f.times if f.times > 1 else _UNSIGNED[f.size]) for f in key.FIELDS)


class Record(ctypes.Structure):
    """What one cell counted since the last drain: calls by outcome, and the calls that were timed."""

    _fields_ = (
        ("key", PackedProblem),
        ("calls", ctypes.c_uint64 * 3),
        ("sampled_calls", ctypes.c_uint64),
        ("sampled_ns", ctypes.c_uint64),
        ("unserved", ctypes.c_uint64),
    )


class GtFailure(ctypes.Structure):
    """A route that was switched off, and why."""

    _fields_ = (("id", ctypes.c_int32), ("how", ctypes.c_int32), ("reason", ctypes.c_char * 248))


MOST_KNOWN: Final = 1024  # problems: more than most programs have, and few for the garbage collector to look at
_known: dict[bytes, tuple[Problem, str, bool]] = {}  # problem, place, graph
_COUNTS: Final = struct.Struct("=6Q")  # a Record from its calls on
_COUNTS_AT: Final = Record.calls.offset

HOW: Final = ("failed", "wrong")  # index: Failing of routes.h


def layout_of(*mirrored: tuple[str, type[Any]]) -> str:
    """Where the members of these structures lie, (name in C++, ours) each, a line a member, as `gt_fields` says it."""
    return "".join(
        f"{name}.{field[0]}:{getattr(kind, field[0]).offset}:{getattr(kind, field[0]).size}\n"
        for name, kind in mirrored
        for field in kind._fields_
    )


LAYOUT: Final = layout_of(("ProblemFields", PackedProblem), ("Record", Record), ("GtFailure", GtFailure))


def lies_so(layout: str, fields: str) -> bool:
    """Whether all structures of `layout` lie as it says in `fields`, which may have others as well."""
    lines = layout.splitlines()
    names = {line.partition(".")[0] for line in lines}
    return [line for line in fields.splitlines() if line.partition(".")[0] in names] == lines


def pack(problem: Problem, *, covers: str = "exact", graph: bool = False, place: str = "cpu") -> PackedProblem:
    """The packed key of a problem. Raises ProblemError for fields the native table does not know."""
    return PackedProblem(**key.values_of(problem, covers=covers, graph=graph, place=place))


def unpack(packed: PackedProblem) -> Problem:
    """The problem of a packed key. Raises ProblemError for a dtype we have no name for."""
    return key.problem_of({f.name: getattr(packed, f.name) for f in key.FIELDS if f.times == 1})


def _named(record: Record, data: bytes) -> tuple[Problem, str, bool]:
    """Problem, place and graph of a record whose key has these bytes; the first of a process are kept.

    Raises ProblemError for a dtype we have no name for.
    """
    packed = record.key
    kind = key.DEVICE_TYPES[packed.device_type]
    place = kind if kind == "cpu" else f"{kind}:{packed.device_index}"
    named = unpack(packed), place, bool(packed.flags & key.FLAGS["GRAPH"])
    if len(_known) < MOST_KNOWN:
        _known[data] = named
    return named


def sightings(record: Record, phase: str = "") -> Iterator[Sighting]:
    """What a record says, one sighting per outcome that was counted. phase: of a Sighting."""
    data = bytes(record)  # once: each member that ctypes is asked for is an object
    try:
        problem, place, graph = _known.get(data[:_COUNTS_AT]) or _named(record, data[:_COUNTS_AT])
    except ProblemError:
        return  # a dtype newer than we are: not counted rather than counted wrongly
    *counts, sampled, sampled_ns, unserved = _COUNTS.unpack_from(data, _COUNTS_AT)
    # samples belong to the problem, not to an outcome: they go with the first outcome that has calls
    samples = sampled, sampled_ns / 1000
    for outcome, calls in zip(OUTCOMES, counts, strict=True):
        if calls or samples[0]:
            yield Sighting(problem, outcome, calls, graph, *samples, place, phase, unserved)
            samples, unserved = (0, 0.0), 0


@cache
def _array_of(count: int) -> type[ctypes.Array[Record]]:
    """The type, made once: see library.py."""
    return Record * count


class _Batch:
    """Records that were fetched and not given out yet.

    phase: the phase in which their calls were made.  was_given: whether any sighting of them was given out.
    """

    def __init__(self, phase: str) -> None:
        self.phase, self.was_given = phase, False
        self.records = _array_of(_ROOM)()
        self.count, self._at = _ROOM, 0  # records without calls give no sighting
        self._made: list[Sighting] = []  # from the record before, and not given yet

    def keep(self, count: int) -> None:
        """Hold no more room than for this many."""
        self.begin(count)
        self.records = _array_of(1 << (count - 1).bit_length() if count else 0).from_buffer_copy(self.records)

    def begin(self, count: int) -> None:
        """The batch holds `count` records, of which none was given out."""
        self.count, self._at = count, 0

    def left(self) -> Iterator[Sighting]:
        """The sightings that are left. An exception until all sightings of a record were made loses none of them.

        One by one: the objects of a slice would start the garbage collector.  A signal's handler may take some
        meanwhile.
        """
        while self._made or self._at < self.count:
            if not self._made:
                at = self._at
                made = [*sightings(self.records[at], self.phase)]
                if at == self._at:
                    self._made, self._at = made, at + 1
            if self._made:
                yield self._made.pop(0)


class Unread:
    """Counts of the native hook that were not given to the flusher yet. fetch: `gt_drain`."""

    def __init__(self, fetch: Callable[[Any, int, int], int]) -> None:
        self._fetch = fetch
        self._batches: list[_Batch] = []

    def set_aside(self, phase: str) -> None:
        """Note for the next drain that all calls until now were made in this phase. One thread at a time.

        Where the exception of a signal's handler cuts this off, none is lost, but some may be given out with a later
        phase.  The same happens where too many are set aside already, because nobody drains.
        """
        if len(self._batches) >= _MOST_ASIDE or sum(len(batch.records) for batch in self._batches) >= _MOST_RECORDS:
            return
        count, anew = _ROOM, True
        while count == _ROOM:
            batch, count = self._filled(phase, anew=anew)
            anew = False
            batch.keep(count)
        if not count and batch in self._batches:
            self._batches.remove(batch)

    def drain(self, phase: str = "") -> Iterator[Sighting]:
        """All calls counted since the last drain, without those that come meanwhile. One thread at a time.

        phase: that of the calls that were not set aside.  What a drain has not given out, because an exception has
        ended it, the next one gives, also that of a signal's handler.
        """
        count, anew = _ROOM, True
        while self._batches or count == _ROOM:
            if not self._batches:
                batch, count = self._filled(phase, anew=anew)
                batch.begin(count)
                anew = False
            for batch in self._batches[:1]:
                for sighting in batch.left():
                    batch.was_given = True
                    yield sighting
                if batch in self._batches:
                    self._batches.remove(batch)

    def _filled(self, phase: str, *, anew: bool) -> tuple[_Batch, int]:
        """A batch of the calls that come next, and how many records it has."""
        batch = _Batch(phase)
        self._batches.append(batch)  # first: an exception behind the fetch must not lose it
        count = self._fetch(batch.records, _ROOM, anew)
        if not batch.was_given and batch not in self._batches:  # a signal's handler has drained it before it was filled
            self._batches.append(batch)
        return batch, count

    def forget(self) -> None:
        """In a forked child: it is the parent's."""
        self._batches.clear()
