"""Run labels are bounded: jobs that each have one of their own would leave a row for every job, shape and month.

The labels that were seen last stay, and all that were seen in the last four weeks.  The calls of older ones go on
under `(earlier runs)`, in the same hour, so that every sum stays as it was.  As in the roll-up everything happens in
small transactions, the newest hours first; a kill between two loses nothing, and the next pass begins anew.  Rows are
looked for without the lock, and by their keys within it: no program waits for a look at a million rows.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple

from gemmtuned.db.row_ids import Part, Rows
from gemmtuned.db.sightings import run_id_of

KEEP_RUNS: Final = 256
SLACK: Final = 64  # labels above that before a pass is worth it: it reads all sightings
RECENT_HOURS: Final = 28 * 24
AGAIN_US: Final = 86_400_000_000  # between two passes
PIECE: Final = 400  # rows of a transaction: some 3 ms
SCAN: Final = 20_000  # rows of a look without the lock: some 5 ms
EARLIER: Final = "(earlier runs)"  # whose calls are those of labels that were dropped

_REST: Final = "problem_id, environment_id, run_id, outcome, graph"  # the columns of the key after the hour
_BEFORE: Final = "SELECT max(hour) FROM {} WHERE hour < ?"
_END: Final = (
    f"SELECT {_REST} FROM sighting WHERE hour = ? AND ({_REST}) > (?, ?, ?, ?, ?) ORDER BY {_REST} LIMIT 1 OFFSET ?"  # noqa: S608
)
_WITHIN: Final = f"FROM sighting WHERE hour = ? AND ({_REST}) > (?, ?, ?, ?, ?) AND ({_REST}) <= (?, ?, ?, ?, ?)"
_LABELS: Final = f"SELECT DISTINCT run_id {_WITHIN}"
_OF_LABELS: Final = f"SELECT hour, {_REST} {_WITHIN} AND run_id IN (SELECT value FROM json_each(?))"  # noqa: S608
_SUMS: Final = "calls, sampled_calls, sampled_us, last_seen_us"
_TAKE: Final = f"DELETE FROM sighting WHERE (hour, {_REST}) = (?, ?, ?, ?, ?, ?) RETURNING {_SUMS}"  # noqa: S608
_ADD: Final = f"""
INSERT INTO sighting (hour, {_REST}, {_SUMS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET calls = calls + excluded.calls, sampled_calls = sampled_calls + excluded.sampled_calls,
    sampled_us = sampled_us + excluded.sampled_us, last_seen_us = max(last_seen_us, excluded.last_seen_us)
"""  # noqa: S608
# Labels that may have no sightings: of warm-ups, all of which are of the last four weeks, and of what was only compiled
_WARM: Final = "SELECT DISTINCT run_id FROM phase_call WHERE hour = ?"
_ONLY_COMPILED: Final = "SELECT DISTINCT run_id FROM compiled_gemm WHERE last_seen_us >= ?"
_PHASE_KEY: Final = "hour, phase, problem_id, environment_id, run_id"
_PHASES: Final = f"SELECT {_PHASE_KEY} FROM phase_call WHERE hour = ? AND run_id IN (SELECT value FROM json_each(?))"  # noqa: S608
_TAKE_PHASE: Final = f"DELETE FROM phase_call WHERE ({_PHASE_KEY}) = (?, ?, ?, ?, ?) RETURNING calls, last_seen_us"  # noqa: S608
_ADD_PHASE: Final = f"""
INSERT INTO phase_call ({_PHASE_KEY}, calls, last_seen_us) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET calls = calls + excluded.calls, last_seen_us = max(last_seen_us, excluded.last_seen_us)
"""  # noqa: S608
_COMPILED_KEY: Final = "problem_id, environment_id, run_id, kernel"
_COMPILED: Final = f"""
SELECT {_COMPILED_KEY} FROM compiled_gemm WHERE ({_COMPILED_KEY}) > (?, ?, ?, ?)
    AND run_id IN (SELECT value FROM json_each(?)) ORDER BY {_COMPILED_KEY} LIMIT ?
"""  # noqa: S608
_PUT_COMPILED: Final = f"UPDATE OR REPLACE compiled_gemm SET run_id = ? WHERE ({_COMPILED_KEY}) = (?, ?, ?, ?)"  # noqa: S608
# A label that goes gets a name that no program asks for: none can count anything more under its number
_GOING: Final = "'(dropped ' || id || ') '"
_MARK: Final = f"UPDATE run SET name = substr({_GOING} || name, 1, 512) WHERE id IN (SELECT value FROM json_each(?))"  # noqa: S608
_MARKED: Final = (
    f"SELECT id, substr(name, length({_GOING}) + 1) FROM run WHERE name GLOB '(dropped *' AND instr(name, {_GOING}) = 1"  # noqa: S608
)
NOT_GOING: Final = f"instr(name, {_GOING}) != 1"

_START: Final = (-1, -1, -1, "", -1)
_LAST: Final = (1 << 62, 0, 0, "", 0)
Key = tuple[int, int, int, str, int]  # _REST
_Range = tuple[int, Key, Key]  # an hour; the key before the first row, that of the last one


class _Step(NamedTuple):
    """One small piece of a pass. writes: one transaction, else a look without the lock."""

    work: Callable[[sqlite3.Connection], Any]
    writes: bool = False
    unchecked: bool = False  # what SQLite would look for in all rows was looked for before


_Steps = Generator[_Step, Any, None]


class _Pass:
    """One pass: its steps one after another, each of which is done once, and tried again where it has failed."""

    def __init__(self, opened: int, steps: _Steps) -> None:
        self.opened = opened  # which file it is about
        self._steps = steps
        self._next: _Step | None = next(steps, None)

    def step(self, rows: Rows) -> bool:
        """Do the next one; False when none is left, or when another file lies there by now."""
        step = self._next
        if step is None or rows.db.opened != self.opened:
            return False

        def work(conn: sqlite3.Connection) -> Any:
            return step.work(conn) if rows.db.opened == self.opened else None

        done = rows.write(work, unchecked=step.unchecked) if step.writes else rows.db.read(work)
        if rows.db.opened != self.opened:
            return False
        try:
            self._next = self._steps.send(done)
        except StopIteration:
            self._next = None
        return True


class Labels(Part):
    """The part of the store that keeps the number of run labels bounded."""

    def __init__(self, shared: Rows) -> None:
        super().__init__(shared)
        self._pass: _Pass | None = None
        self._again_us = 0

    def prune(self, now_us: int) -> bool:
        """One small step; False when there is nothing to do."""
        if self._pass is None:
            return self._begin(now_us)
        if not self._pass.step(self._rows):
            if self._pass.opened == self._db.opened:
                self._again_us = now_us + AGAIN_US
            self._pass = None
        return True

    def _begin(self, now_us: int) -> bool:
        if self._again_us - 2 * AGAIN_US < now_us < self._again_us:
            return False
        many, left = self._db.read(lambda conn: (_count(conn) > KEEP_RUNS + SLACK, _marked(conn)))
        if many or left:
            self._pass = _Pass(self._db.opened, _steps(now_us, left, many=many))
        return many or bool(left)


def _steps(now_us: int, left: dict[int, str], *, many: bool) -> _Steps:
    """All of a pass. left: what one that was cut off had begun to drop."""
    earlier = yield _Step(lambda conn: run_id_of(conn, EARLIER), writes=True)
    yield from _drop(left, earlier)
    if not many:
        return
    newest = yield _Step(lambda conn: conn.execute("SELECT max(id) FROM run").fetchone()[0])
    recent_us = now_us - RECENT_HOURS * 3_600_000_000
    kept: set[int] = {earlier}
    kept |= yield _Step(lambda conn: {label for (label,) in conn.execute(_ONLY_COMPILED, (recent_us,)).fetchall()})
    hour = yield from _hour_before("phase_call", 1 << 62)
    while hour is not None:
        at = (hour,)
        kept |= yield _Step(lambda conn, at=at: {label for (label,) in conn.execute(_WARM, at).fetchall()})  # type: ignore[misc]
        hour = yield from _hour_before("phase_call", hour)
    yield from _empty(kept, earlier, now_us // 3_600_000_000)
    # those that nothing was counted under, too
    every = yield _Step(lambda conn: conn.execute("SELECT id FROM run WHERE id <= ?", (newest,)).fetchall())
    gone = sorted({label for (label,) in every} - kept)
    for first in range(0, len(gone), PIECE):
        some = (json.dumps(gone[first : first + PIECE]),)
        yield _Step(lambda conn, some=some: conn.execute(_MARK, some), writes=True)  # type: ignore[misc]
    marked = yield _Step(_marked)
    yield from _drop(marked, earlier)


def _empty(kept: set[int], earlier: int, now_hour: int) -> _Steps:
    """Put what was counted under labels that go under that of all earlier runs; adds to `kept` those that stay."""
    dropped: set[int] = set()
    hour = yield from _hour_before("sighting", 1 << 62)
    while hour is not None:
        ranges = yield from _ranges(hour)
        there: set[int] = set()
        for part in ranges:
            there |= yield _Step(lambda conn, part=part: _labels(conn, part))  # type: ignore[misc]
        for label in sorted(there - kept, reverse=True):
            if hour > now_hour - RECENT_HOURS or (len(kept) < KEEP_RUNS and label not in dropped):
                kept.add(label)
        gone = there - kept
        dropped |= gone
        if gone:
            yield from _move(ranges, gone, lambda conn, label: earlier)
        hour = yield from _hour_before("sighting", hour)


def _drop(marked: dict[int, str], earlier: int) -> _Steps:
    """Drop these labels, given with their names; what came in under them before they were marked goes on under these.

    Nothing more comes in under a label that is marked, and the roll-up moves rows to earlier hours alone: after a
    look at all hours, the newest first, no row names it, and SQLite need not look through all of them for each label.
    """
    if not marked or (yield _Step(lambda conn: conn.execute("SELECT 1 FROM sighting_before LIMIT 1").fetchone())):
        return

    def by_name(conn: sqlite3.Connection, label: int) -> int:
        return run_id_of(conn, marked[label])

    hour = yield from _hour_before("sighting", 1 << 62)
    while hour is not None:
        ranges = yield from _ranges(hour)
        yield from _move(ranges, set(marked), by_name)
        hour = yield from _hour_before("sighting", hour)
    yield from _move_phases(set(marked), by_name)
    yield from _move_compiled(set(marked), earlier)
    labels = sorted(marked)
    for first in range(0, len(labels), PIECE):
        some = json.dumps(labels[first : first + PIECE])
        yield _Step(lambda conn, some=some: _delete(conn, some), writes=True, unchecked=True)  # type: ignore[misc]


def _hour_before(table: str, hour: int) -> Generator[_Step, Any, int | None]:
    """The next older hour that has rows; None: there is none."""
    found = yield _Step(lambda conn: conn.execute(_BEFORE.format(table), (hour,)).fetchone()[0])
    return None if found is None else int(found)


def _ranges(hour: int) -> Generator[_Step, Any, list[_Range]]:
    """The rows of an hour in parts of SCAN."""
    found: list[_Range] = []
    after: Key = _START
    while after != _LAST:
        at = (hour, *after, SCAN - 1)
        end = (yield _Step(lambda conn, at=at: conn.execute(_END, at).fetchone())) or _LAST  # type: ignore[misc]
        found.append((hour, after, end))
        after = end
    return found


def _labels(conn: sqlite3.Connection, part: _Range) -> set[int]:
    hour, after, end = part
    return {int(label) for (label,) in conn.execute(_LABELS, (hour, *after, *end)).fetchall()}


def _move(ranges: list[_Range], gone: set[int], to: Callable[[sqlite3.Connection, int], int]) -> _Steps:
    """Put the rows of these labels under others. to: under which, within the transaction."""
    labels = json.dumps(sorted(gone))
    for hour, after, end in ranges:
        at = (hour, *after, *end, labels)
        keys = yield _Step(lambda conn, at=at: conn.execute(_OF_LABELS, at).fetchall())  # type: ignore[misc]
        for first in range(0, len(keys), PIECE):
            some = keys[first : first + PIECE]
            yield _Step(lambda conn, some=some: _put(conn, some, to), writes=True)  # type: ignore[misc]


def _put(
    conn: sqlite3.Connection,
    keys: list[tuple[int, int, int, int, str, int]],
    to: Callable[[sqlite3.Connection, int], int],
) -> None:
    """What is done twice, or of a row that the roll-up has moved since, changes nothing."""
    for key in keys:
        hour, problem, environment, label, outcome, graph = key
        for sums in conn.execute(_TAKE, key).fetchall():
            conn.execute(_ADD, (hour, problem, environment, to(conn, label), outcome, graph, *sums))


def _move_phases(gone: set[int], to: Callable[[sqlite3.Connection, int], int]) -> _Steps:
    labels = json.dumps(sorted(gone))

    def put(conn: sqlite3.Connection, keys: list[tuple[int, str, int, int, int]]) -> None:
        for key in keys:
            for sums in conn.execute(_TAKE_PHASE, key).fetchall():
                conn.execute(_ADD_PHASE, (*key[:4], to(conn, key[4]), *sums))

    hour = yield from _hour_before("phase_call", 1 << 62)
    while hour is not None:
        at = (hour, labels)
        keys = yield _Step(lambda conn, at=at: conn.execute(_PHASES, at).fetchall())  # type: ignore[misc]
        for first in range(0, len(keys), PIECE):
            some = keys[first : first + PIECE]
            yield _Step(lambda conn, some=some: put(conn, some), writes=True)  # type: ignore[misc]
        hour = yield from _hour_before("phase_call", hour)


def _move_compiled(gone: set[int], earlier: int) -> _Steps:
    labels = json.dumps(sorted(gone))
    after: tuple[int, int, int, str] | None = (-1, -1, -1, "")
    while after is not None:
        at = (*after, labels, PIECE)
        keys = yield _Step(lambda conn, at=at: conn.execute(_COMPILED, at).fetchall())  # type: ignore[misc]
        put = [(earlier, *key) for key in keys]
        if put:
            yield _Step(lambda conn, put=put: conn.executemany(_PUT_COMPILED, put), writes=True)  # type: ignore[misc]
        after = keys[-1] if len(keys) == PIECE else None


def _marked(conn: sqlite3.Connection) -> dict[int, str]:
    """The labels that are about to go, with the names that they had."""
    return {int(label): str(name) for label, name in conn.execute(_MARKED).fetchall()}


def _delete(conn: sqlite3.Connection, labels: str) -> None:
    there = f"DELETE FROM run WHERE id IN (SELECT value FROM json_each(?)) AND instr(name, {_GOING}) = 1"  # noqa: S608
    conn.execute(there, (labels,))


def _count(conn: sqlite3.Connection) -> int:
    return int(conn.execute("SELECT count(*) FROM run").fetchone()[0])
