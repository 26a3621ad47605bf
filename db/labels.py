"""Run labels are bounded: jobs that each have one of their own would leave a row for every job, shape and month.

The labels that were seen last stay, and all that were seen in the last four weeks.  The calls of older ones go on
under `(earlier runs)`, in the same hour, so that every sum stays as it was.  As in the roll-up everything happens in
small transactions, the newest hours first; a kill between two loses nothing, and the next pass begins anew.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, field
from typing import Final

from gemmtuned.db.rows import Part, Rows
from gemmtuned.db.sightings import HOURS, run_id_of

KEEP_RUNS: Final = 256
SLACK: Final = 64  # labels above that before a pass is worth it: it reads all sightings
RECENT_HOURS: Final = 28 * 24
AGAIN_US: Final = 86_400_000_000  # between two passes
PIECE: Final = 400  # rows of a transaction: some 3 ms
EARLIER: Final = "(earlier runs)"  # whose calls are those of labels that were dropped

_REST: Final = "problem_id, environment_id, run_id, outcome, graph"  # of the key, after the hour
_OF_LABELS: Final = f"""
SELECT {_REST}, calls, last_seen_us FROM sighting
WHERE hour = ? AND ({_REST}) > (?, ?, ?, ?, ?) AND run_id IN (SELECT value FROM json_each(?)) ORDER BY {_REST} LIMIT ?
"""  # noqa: S608
_ADD: Final = """
INSERT INTO sighting (hour, problem_id, environment_id, run_id, outcome, graph, calls, sampled_calls, sampled_us,
    last_seen_us)
VALUES (?, ?, ?, ?, ?, ?, ?, 0, 0.0, ?)
ON CONFLICT DO UPDATE SET calls = calls + excluded.calls, last_seen_us = max(last_seen_us, excluded.last_seen_us)
"""
_TAKE: Final = f"DELETE FROM sighting WHERE hour = ? AND ({_REST}) = (?, ?, ?, ?, ?)"  # noqa: S608
_START: Final = (-1, -1, -1, "", -1)
_Key = tuple[int, int, int, str, int]  # _REST


@dataclass
class _Pass:
    """One pass over all hours. hours: yet to look at, the last one next.  after: what is done of that one."""

    opened: int  # which file it is about
    hours: list[int]
    newest: int  # number of the label that was made last
    kept: set[int]
    dropped: set[int] = field(default_factory=set)
    after: _Key = _START


class Labels(Part):
    """The part of the store that keeps the number of run labels bounded."""

    def __init__(self, shared: Rows) -> None:
        super().__init__(shared)
        self._pass: _Pass | None = None
        self._again_us = 0

    def prune(self, now_us: int) -> bool:
        """One small step; False when there is nothing to do."""
        now = self._pass
        if now is not None and now.opened != self._db.opened:
            now = self._pass = None
        if now is None:
            return self._begin(now_us)
        if now.hours:
            self._look_at(now, now_us // 3_600_000_000)
        elif now.dropped:
            label = next(iter(now.dropped))
            self._rows.write(lambda conn: _forget(conn, label) if now.opened == self._db.opened else None)
            now.dropped.discard(label)
        else:
            self._pass, self._again_us = None, now_us + AGAIN_US
        return True

    def _begin(self, now_us: int) -> bool:
        if self._again_us - 2 * AGAIN_US < now_us < self._again_us:
            return False
        if self._db.read(lambda conn: _count(conn)) <= KEEP_RUNS + SLACK:
            return False
        earlier = self._rows.write(lambda conn: run_id_of(conn, EARLIER))
        hours, newest = self._db.read(
            lambda conn: (
                [hour for (hour,) in conn.execute(HOURS).fetchall()],
                int(conn.execute("SELECT max(id) FROM run").fetchone()[0]),
            )
        )
        self._pass = _Pass(self._db.opened, sorted(hours), newest, {earlier})
        return True

    def _look_at(self, now: _Pass, now_hour: int) -> None:
        """The newest hour that was not looked at: which labels it has, and the rows of those that go."""
        hour = now.hours[-1]
        found = "SELECT DISTINCT run_id FROM sighting WHERE hour = ?"
        there = self._db.read(lambda conn: {int(label) for (label,) in conn.execute(found, (hour,)).fetchall()})
        for label in sorted(there - now.kept, reverse=True):
            if hour > now_hour - RECENT_HOURS or (len(now.kept) < KEEP_RUNS and label not in now.dropped):
                now.kept.add(label)
        gone = there - now.kept
        now.dropped |= gone

        def move(conn: sqlite3.Connection) -> _Key | None:
            return _move(conn, hour, now.after, gone) if now.opened == self._db.opened else None

        moved_to = self._rows.write(move) if gone else None
        if moved_to is not None:
            now.after = moved_to
            return
        now.hours.pop()
        now.after = _START
        if not now.hours:  # labels that nothing was counted under
            every = "SELECT id FROM run WHERE id <= ?"
            ids = self._db.read(lambda conn: {int(label) for (label,) in conn.execute(every, (now.newest,)).fetchall()})
            now.dropped |= ids - now.kept


def _move(conn: sqlite3.Connection, hour: int, after: _Key, gone: set[int]) -> _Key | None:
    """Put some rows of these labels under the one of all earlier runs; after which to go on, None: this hour is done.

    The caller remembers it once this is committed: a transaction that is rolled back, or done twice, has moved nothing.
    """
    earlier = run_id_of(conn, EARLIER)
    rows = conn.execute(_OF_LABELS, (hour, *after, json.dumps(sorted(gone)), PIECE)).fetchall()
    for problem, environment, label, outcome, graph, calls, seen_us in rows:
        conn.execute(_TAKE, (hour, problem, environment, label, outcome, graph))
        conn.execute(_ADD, (hour, problem, environment, earlier, outcome, graph, calls, seen_us))
    return tuple(rows[-1][:5]) if len(rows) == PIECE else None


def _forget(conn: sqlite3.Connection, label: int) -> None:
    """Drop a label unless something was counted under it meanwhile, which SQLite finds out by a look at all rows."""
    conn.execute("UPDATE OR REPLACE compiled_gemm SET run_id = ? WHERE run_id = ?", (run_id_of(conn, EARLIER), label))
    conn.execute("DELETE FROM phase_call WHERE run_id = ?", (label,))
    try:
        conn.execute("DELETE FROM run WHERE id = ?", (label,))
    except sqlite3.IntegrityError:
        pass


def _count(conn: sqlite3.Connection) -> int:
    return int(conn.execute("SELECT count(*) FROM run").fetchone()[0])
