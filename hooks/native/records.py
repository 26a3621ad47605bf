"""The structures of the native hook as ctypes has them, and a Problem as its packed key and back.

Each mirrors one of C++; `LAYOUT` is compared with the library's own when that is loaded.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

from gemmtuned.configs import key
from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import OUTCOMES, Sighting
from gemmtuned.configs.unpatched import builtins
from gemmtuned.hooks.native.structures import MIRRORED, Cond, Packed

__builtins__ = builtins

_ALIGN: Final = 16  # what the structures of a launch need
_ROOM: Final = 128  # records that are read at once
_MOST_ASIDE: Final = 2048  # batches of phases that are over, and
_MOST_RECORDS: Final = 16_384  # in all of them: a last flush has half a second
_POINTER: Final = struct.Struct("P")
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


class GtRow(ctypes.Structure):
    """One row of a table, as gt_load takes it."""

    _fields_ = (
        ("key", PackedProblem),
        ("id", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("launch", ctypes.c_void_p),
        ("conditions", ctypes.POINTER(Cond)),
        ("condition_count", ctypes.c_int32),
        ("scales_sums", ctypes.c_int32),
        ("chain_rows", ctypes.c_int64),
        ("engines", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


class GtFailure(ctypes.Structure):
    """A route that was switched off, and why."""

    _fields_ = (("id", ctypes.c_int32), ("how", ctypes.c_int32), ("reason", ctypes.c_char * 248))


MOST_KNOWN: Final = 1024  # problems: more than most programs have, and few for the garbage collector to look at
_known: dict[bytes, Problem] = {}

HOW: Final = ("failed", "wrong")  # index: Failing of routes.h


_MIRRORED: Final = (
    ("ProblemFields", PackedProblem), ("Record", Record), *MIRRORED, ("GtRow", GtRow), ("GtFailure", GtFailure),
)  # fmt: skip
LAYOUT: Final = "".join(
    f"{name}.{field[0]}:{getattr(kind, field[0]).offset}:{getattr(kind, field[0]).size}\n"
    for name, kind in _MIRRORED
    for field in kind._fields_
)


class Row(NamedTuple):
    """One row of a table: a problem with padded m, what it covers, its mode, and the route that serves it."""

    problem: Problem
    covers: str
    mode: str
    ident: int
    code: int
    place: str = "cpu"
    launch: Packed | None = None  # what some codes need
    conditions: Sequence[Cond] = ()
    scales_sums: bool = False  # takes any alpha and beta
    chain_rows: int = 0  # of a batch-invariant problem: rows of X at a time
    engines: int = 0  # bits of `Engines` of routes.h

    def but(self, **changes: Any) -> Row:
        """The same with these values. `_replace` makes the collector count one object more for a tuple above 10."""
        return Row(**{**self._asdict(), **changes})


def pack(problem: Problem, *, covers: str = "exact", graph: bool = False, place: str = "cpu") -> PackedProblem:
    """The packed key of a problem. Raises ProblemError for fields the native table does not know."""
    return PackedProblem(**key.values_of(problem, covers=covers, graph=graph, place=place))


class PackedRows:
    """Rows as the library takes them, in three pieces of memory: no object for each, which the collector would count.

    A row that the native table has no place for is left out.  refused: how many, and what is said of the first.

    While they grow they may move, so a row has the place of what it points at, plus one, until all are there; then
    ctypes holds the pieces and they stay where they are.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows, self._launches, self._conditions = bytearray(), bytearray(), bytearray()
        self.refused, self.why = 0, ""
        for row in rows:
            try:
                self._add(row)
            except ProblemError as err:  # noqa: PERF203  it costs that row
                self.refused, self.why = self.refused + 1, self.why or str(err)
        self.count = len(self._rows) // ctypes.sizeof(GtRow)
        self.array = (GtRow * self.count).from_buffer(self._rows)
        self._held = [(ctypes.c_char * len(p)).from_buffer(p) for p in (self._launches, self._conditions)]
        for field, pieces in zip((GtRow.launch, GtRow.conditions), self._held, strict=True):
            self._point(field.offset, ctypes.addressof(pieces) - 1)

    def _add(self, row: Row) -> None:
        key = pack(row.problem, covers=row.covers, graph=row.mode == "graph", place=row.place)
        packed = GtRow(
            key, row.ident, row.code, scales_sums=row.scales_sums, chain_rows=row.chain_rows, engines=row.engines
        )
        packed.condition_count = len(row.conditions)
        if row.launch is not None:
            packed.launch = len(self._launches) + 1
            self._launches += bytes(row.launch)
            self._launches += bytes(-len(self._launches) % _ALIGN)
        data = bytearray(bytes(packed))
        _POINTER.pack_into(data, GtRow.conditions.offset, len(self._conditions) + 1)
        self._conditions += b"".join(map(bytes, row.conditions))
        self._rows += data

    def _point(self, offset: int, base: int) -> None:
        for at in range(offset, len(self._rows), ctypes.sizeof(GtRow)):
            (place,) = _POINTER.unpack_from(self._rows, at)
            _POINTER.pack_into(self._rows, at, base + place if place else 0)


def unpack(packed: PackedProblem) -> Problem:
    """The problem of a packed key. Raises ProblemError for a dtype we have no name for."""
    return key.problem_of({f.name: getattr(packed, f.name) for f in key.FIELDS if f.times == 1})


def _problem_of(packed: PackedProblem) -> Problem:
    """As `unpack`; the first problems of a process are kept, for each flush names them again."""
    data = bytes(packed)
    problem = _known.get(data)
    if problem is None:
        problem = unpack(packed)
        if len(_known) < MOST_KNOWN:
            _known[data] = problem
    return problem


def sightings(record: Record, phase: str = "") -> Iterator[Sighting]:
    """What a record says, one sighting per outcome that was counted. phase: of a Sighting."""
    try:
        problem = _problem_of(record.key)
    except ProblemError:
        return  # a dtype newer than we are: not counted rather than counted wrongly
    kind = key.PLACES[record.key.device_type]
    place = kind if kind == "cpu" else f"{kind}:{record.key.device_index}"
    # samples belong to the problem, not to an outcome: they go with the first outcome that has calls
    samples, unserved = (record.sampled_calls, record.sampled_ns / 1000), record.unserved
    for outcome, calls in zip(OUTCOMES, record.calls, strict=True):
        if calls or samples[0]:
            graph = bool(record.key.flags & key.FLAGS["GRAPH"])
            yield Sighting(problem, outcome, calls, graph, *samples, place, phase, unserved)
            samples, unserved = (0, 0.0), 0


@cache
def _array_of(count: int) -> type[ctypes.Array[Record]]:
    """The type, made once: see library.py."""
    return Record * count


class _Batch:
    """Records that were fetched and not told yet. phase: of their calls. was_told: whether any was."""

    def __init__(self, phase: str) -> None:
        self.phase, self.was_told = phase, False
        self.records = _array_of(_ROOM)()
        self.count, self._at = _ROOM, 0  # those without calls say nothing
        self._made: list[Sighting] = []  # of the record before, and not told yet

    def keep(self, count: int) -> None:
        """Hold no more room than for this many."""
        self.begin(count)
        self.records = _array_of(1 << (count - 1).bit_length() if count else 0).from_buffer_copy(self.records)

    def begin(self, count: int) -> None:
        """So many are there, and none was told."""
        self.count, self._at = count, 0

    def telling(self) -> Iterator[Sighting]:
        """What is left. A record counts as told once all that it says was made: an exception until then loses nothing.

        One by one: the objects of a slice would start the garbage collector.  A signal's handler may tell meanwhile.
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
    """fetch: `gt_drain`."""

    def __init__(self, fetch: Callable[[Any, int, int], int]) -> None:
        self._fetch = fetch
        self._batches: list[_Batch] = []

    def set_aside(self, phase: str) -> None:
        """Note that all calls until now, for the next drain, were made in this phase. One thread at a time.

        An exception that cuts this off, of a signal's handler, loses none: some may then be told with a later phase's.
        So they are where there are too many already, because nobody drains.
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

        phase: of those that are not set aside.  What a drain has not told, because an exception has ended it, the next
        one tells; so does a signal handler's.
        """
        count, anew = _ROOM, True
        while self._batches or count == _ROOM:
            if not self._batches:
                batch, count = self._filled(phase, anew=anew)
                batch.begin(count)
                anew = False
            for batch in self._batches[:1]:
                for sighting in batch.telling():
                    batch.was_told = True
                    yield sighting
                if batch in self._batches:
                    self._batches.remove(batch)

    def _filled(self, phase: str, *, anew: bool) -> tuple[_Batch, int]:
        """A batch of the calls that come next, and how many records it has."""
        batch = _Batch(phase)
        self._batches.append(batch)  # first: an exception behind the fetch must not lose it
        count = self._fetch(batch.records, _ROOM, anew)
        if not batch.was_told and batch not in self._batches:  # a signal's handler has drained it before it was filled
            self._batches.append(batch)
        return batch, count

    def forget(self) -> None:
        """In a forked child: it is the parent's."""
        self._batches.clear()
