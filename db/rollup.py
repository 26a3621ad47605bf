"""Old sightings take less room: hours become days, and days become blocks of four weeks.

`sighting.hour` is the first hour of the time that a row stands for.  Everything happens in slices: each is one small
transaction that leaves the sums as they were, so programs hardly wait for it, a kill between two loses nothing, and
who comes next goes on where it was left: the rows themselves show what is still to do.  The same slices bring
over the rows of databases made before step 0016, hits of solutions included.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from typing import Final

from gemmtuned.db.labels import Labels
from gemmtuned.db.row_ids import Part, Rows, us
from gemmtuned.db.sightings import ADD_RECENT, HOURS

KEEP_HOURS: Final = 24  # hours of days that ended less than this ago stay
KEEP_DAYS: Final = 28  # days of blocks that ended less than this ago stay
BLOCK_HOURS: Final = 28 * 24
SLICE_S: Final = 0.03  # to hold the write lock: no piece of a slice begins later; programs wait 0.25 s for it
PIECE: Final = 400  # rows: some 3 ms
FORGET_SESSIONS_S: Final = 14 * 86_400.0
SESSIONS: Final = 2000  # that are forgotten in one transaction: some 10 ms

_KEY: Final = "problem_id, environment_id, run_id, hour, outcome, graph"
_OF_HOUR: Final = f"SELECT {_KEY}, calls, last_seen_us FROM sighting WHERE hour = ? ORDER BY {_KEY} LIMIT ?"  # noqa: S608
_OF_BEFORE: Final = f"SELECT {_KEY}, calls, last_seen_us FROM sighting_before ORDER BY {_KEY} LIMIT ?"  # noqa: S608
_MERGE: Final = f"""
INSERT INTO sighting ({_KEY}, calls, sampled_calls, sampled_us, last_seen_us) VALUES (?, ?, ?, ?, ?, ?, ?, 0, 0.0, ?)
ON CONFLICT DO UPDATE SET calls = calls + excluded.calls, last_seen_us = max(last_seen_us, excluded.last_seen_us)
"""  # noqa: S608
_DROP: Final = f"DELETE FROM sighting WHERE hour = ? AND ({_KEY}) <= (?, ?, ?, ?, ?, ?)"  # noqa: S608
_DROP_BEFORE: Final = f"DELETE FROM sighting_before WHERE ({_KEY}) <= (?, ?, ?, ?, ?, ?)"  # noqa: S608
_KEEP_HITS: Final = f"""
UPDATE solution SET hits_before = hits_before + h.calls
FROM (
    SELECT solution_id, sum(calls) AS calls FROM hits_before
    WHERE problem_id IN (SELECT value FROM json_each(:problems))
        AND solution_id IN (SELECT x.id FROM problem q JOIN problem b ON b.rest = q.rest
            AND b.m IN (q.m, q.m_fine, q.m_coarse) JOIN solution x ON x.problem_id = b.id
            WHERE q.id IN (SELECT value FROM json_each(:problems)))
        AND ({_KEY}) <= (:problem_id, :environment_id, :run_id, :hour, :outcome, :graph)
    GROUP BY solution_id
) h WHERE solution.id = h.solution_id
"""  # noqa: S608
_OLD_PHASE: Final = "SELECT 1 FROM phase_call WHERE hour < ? LIMIT 1"
_PHASE_KEY: Final = "hour, phase, problem_id, environment_id, run_id"
_DROP_PHASES: Final = f"""
DELETE FROM phase_call WHERE ({_PHASE_KEY}) IN
    (SELECT {_PHASE_KEY} FROM phase_call WHERE hour < ? ORDER BY {_PHASE_KEY} LIMIT ?)
"""  # noqa: S608
_OLD_SESSIONS: Final = "SELECT host, pid, started_us FROM session WHERE beat_us < ? LIMIT ?"
_DROP_SESSION: Final = "DELETE FROM session WHERE host = ? AND pid = ? AND started_us = ? AND beat_us < ?"

Row = tuple[int, int, int, int, str, int, int, int]  # _KEY, calls, last_seen_us


class RollUp(Part):
    """The part of the store that keeps it small."""

    def __init__(self, shared: Rows) -> None:
        super().__init__(shared)
        self._labels = Labels(shared)
        self._forgotten = False  # what was too old, since the last time that all was done

    def roll_up(self, *, now_s: float, for_s: float | None = None) -> bool:
        """Merge what is old enough, slice by slice, for that many seconds; None: to the end. True when it is all done.

        A slice that has begun is finished.  Then sessions not heard of for two weeks and phases of four weeks ago are
        forgotten, in slices, too, and run labels beyond their bound dropped.  Raises StoreBusy and StoreError as every
        call does; what earlier slices did stays done.
        """
        until_s = None if for_s is None else time.monotonic() + for_s
        while True:
            now_us = us(now_s)
            if not (self._slice(now_us // 3_600_000_000) or self._forget(now_us) or self._labels.prune(now_us)):
                self._forgotten = False
                return True
            if until_s is not None and time.monotonic() > until_s:
                return False

    def _forget(self, now_us: int) -> bool:
        """One small step; False when there is nothing too old. Months of short programs leave a million of each.

        Once there is nothing, it does not look again before the whole roll-up is done: it reads all sessions.
        """
        if self._forgotten:
            return False
        hour = now_us // 3_600_000_000 - KEEP_DAYS * 24
        if self._db.read(lambda conn: conn.execute(_OLD_PHASE, (hour,)).fetchone()):
            self._rows.write(lambda conn: _in_pieces(lambda: conn.execute(_DROP_PHASES, (hour, PIECE)).rowcount))
            return True
        before_us = now_us - int(FORGET_SESSIONS_S * 1e6)
        # found without the lock, since that is a look at all of them
        old = self._db.read(lambda conn: conn.execute(_OLD_SESSIONS, (before_us, SESSIONS)).fetchall())
        if old:
            keys = [(*key, before_us) for key in old]
            self._rows.write(lambda conn: conn.executemany(_DROP_SESSION, keys).rowcount)
        self._forgotten = not old
        return bool(old)

    def left_of_0_1_0(self) -> float:
        """The share of the problems, 0 to 1, that has rows from before step 0016: the slices go problem by problem."""
        sql = """SELECT (SELECT min(problem_id) FROM sighting_before), (SELECT max(problem_id) FROM sighting_before),
            (SELECT max(id) FROM problem)"""
        low, high, count = self._db.read(lambda conn: conn.execute(sql).fetchone())
        return 0.0 if low is None else float(high + 1 - low) / float(count)

    def _slice(self, now_hour: int) -> bool:
        """One small step; False when there was nothing to do. Looks without the lock, and again with it."""
        if self._db.read(lambda conn: conn.execute("SELECT 1 FROM sighting_before LIMIT 1").fetchone()):
            return self._rows.write(lambda conn: _in_pieces(lambda: _bring_over(conn, now_hour)))
        # row by row: all the hours of a store that was not rolled up for months are not looked up for each of them
        old = self._db.read(
            lambda conn: next(
                (hour for (hour,) in conn.execute(HOURS) if _first_hour(hour, now_hour) is not None), None
            )
        )
        if old is None:
            return False
        return self._rows.write(lambda conn: _in_pieces(lambda: _merge_hour(conn, old, now_hour)))


def _in_pieces(piece: Callable[[], int]) -> bool:
    """Do pieces, each of which tells how many rows it took, until one takes fewer than PIECE or SLICE_S is over."""
    until_s = time.monotonic() + SLICE_S
    while piece() == PIECE and time.monotonic() < until_s:
        pass
    return True


def _merge_hour(conn: sqlite3.Connection, hour: int, now_hour: int) -> int:
    """The first rows of this hour, into the time that they belong to now; returns how many."""
    found: list[Row] = conn.execute(_OF_HOUR, (hour, PIECE)).fetchall()
    if found:
        _merge(conn, found, now_hour)
        conn.execute(_DROP, (hour, *found[-1][:6]))
    return len(found)


def _bring_over(conn: sqlite3.Connection, now_hour: int) -> int:
    """The first rows from before step 0016, with what they mean for the sums that are kept since; returns how many."""
    found: list[Row] = conn.execute(_OF_BEFORE, (PIECE,)).fetchall()
    if found:
        last = found[-1][:6]
        problems = {"problems": json.dumps(sorted({row[0] for row in found}))}
        conn.execute(_KEEP_HITS, problems | dict(zip(_KEY.split(", "), last, strict=True)))
        recent: dict[tuple[int, int, int], int] = {}
        for problem, environment, _, hour, _, _, calls, _ in found:
            of = (problem, environment, hour // 24)
            recent[of] = recent.get(of, 0) + calls
        sums = [{"calls": float(n), "day": day, "problem": p, "environment": e} for (p, e, day), n in recent.items()]
        conn.executemany(ADD_RECENT, sums)
        _merge(conn, found, now_hour)
        conn.execute(_DROP_BEFORE, last)
    return len(found)


def _merge(conn: sqlite3.Connection, found: list[Row], now_hour: int) -> None:
    """Add these to the rows of the time that they belong to now."""
    sums: dict[tuple[int, int, int, int, str, int], tuple[int, int]] = {}
    for problem, environment, run, hour, outcome, graph, calls, seen_us in found:
        first_hour = _first_hour(hour, now_hour)
        key = (problem, environment, run, hour if first_hour is None else first_hour, outcome, graph)
        had = sums.get(key, (0, 0))
        sums[key] = (had[0] + calls, max(had[1], seen_us))
    conn.executemany(_MERGE, [(*key, *values) for key, values in sums.items()])


def hours_of(hour: int, now_hour: int) -> int:
    """How many hours a row of this hour stands for once all is merged that is old enough: 1, a day's or a block's."""
    if hour % BLOCK_HOURS == 0 and hour + BLOCK_HOURS <= now_hour - KEEP_DAYS * 24:
        return BLOCK_HOURS
    return 24 if hour % 24 == 0 and hour + 24 <= now_hour - KEEP_HOURS else 1


def _first_hour(hour: int, now_hour: int) -> int | None:
    """The first hour of the day or block that a row of this hour belongs to now; None: it stays as it is."""
    block = hour // BLOCK_HOURS * BLOCK_HOURS
    if block + BLOCK_HOURS <= now_hour - KEEP_DAYS * 24:
        return block if block != hour else None
    day = hour // 24 * 24
    return day if day + 24 <= now_hour - KEEP_HOURS and day != hour else None
