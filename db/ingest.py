"""Counts of other users' programs: read from a file that they may write, and added to our own, which they may not.

The ingest file has our schema, so any tool can look at it, but we check everything in it: sightings must be within
bounds, and so must sessions and reports of failed routes.  `members_file` reads the file, `members_rows` checks whether
its content can be true, `members_limits` how much of it may be new, and `members_progress` keeps how far we have read.

Each count is added exactly once: we read rows in the order of their keys, pass by pass, and store how much of each row
has been added, in the same transaction.  A pass reads only rows seen since the previous pass began.  The last pass,
after the file was moved out of the folder and nobody writes to it any more, reads all rows, and so finds those that the
others missed because a clock jumped.  After it the file and what we stored about it are removed.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from gemmtuned._testing import faults as failpoints
from gemmtuned.configs.engine_races import ENGINES, FAMILY, standing
from gemmtuned.configs.errors import StoreError
from gemmtuned.db.files import identity
from gemmtuned.db.members_file import FIRST, MembersFile, StrangeFile, set_aside, signature
from gemmtuned.db.members_limits import Ours, Room
from gemmtuned.db.members_progress import (
    DAY_US,
    MARK,
    OVERLAP_US,
    PUT_FILE,
    Added,
    Progress,
    marked,
    others_since,
    progress_of,
)
from gemmtuned.db.members_rows import SOON_US, Named, Names, is_valid, session_of, valid
from gemmtuned.db.row_ids import Part, Rows, plain, us
from gemmtuned.db.sightings import ADD_QUARANTINE, ADD_WANTED, ANY_GENERATION, count, keep_session

log = logging.getLogger("gemmtuned.daemon")

AT_ONCE: Final = 2000  # rows of one transaction
SETTLED_S: Final = 1.0  # a file that changed less than this before we looked may change again with the same time
ROTATE_BYTES: Final = 16 << 20  # some 130,000 rows
OTHERS_AT_ONCE: Final = 1000  # sessions, and reports
MOST_OTHERS: Final = 30_000  # sessions, and reports, per pass: more than a day may bring that is new

_REPORT_KEY: Final = ("device", "mode", "covers", "backend", "config", "stamp")
_LIVE: Final = """
SELECT 1 FROM solution s JOIN device h ON h.id = s.device_id WHERE s.problem_id = ? AND h.key = ? AND s.mode = ?
    AND s.covers = ? AND s.backend = ? AND s.config = ? AND s.stamp = ? AND s.retired_generation IS NULL
"""
_TOLD: Final = f"""
SELECT 1 FROM quarantine WHERE problem_id = ? AND {" AND ".join(f"{name} = ?" for name in _REPORT_KEY)}
    AND last_seen_us >= ?
"""  # noqa: S608
# What their file says of operators stays when a solution comes that may serve them: its own word counts then
_ANY_VERSION: Final = (
    "999999"  # for engines: theirs are not known here, and a newer one counts as the one that was raced
)
_LACKS_WANTED: Final = """
SELECT d.problem_id, d.environment_id, s.backend, s.beside FROM demand d JOIN solution s ON s.id = d.solution_id
JOIN problem p ON p.id = d.problem_id JOIN environment e ON e.id = d.environment_id
WHERE p.rest = :rest AND p.m = :m AND e.key = :key AND s.state != 'default_best' -- nothing better than theirs is known
    AND (d.wanted_of IS NOT d.solution_id OR NOT instr(' ' || d.wanted || ' ', ' ' || :operator || ' '))
"""
_REMEMBER: Final = """
INSERT INTO ingest_row (born, problem_id, environment_id, run_id, hour, outcome, graph,
    calls, sampled_calls, sampled_us)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET calls = excluded.calls, sampled_calls = excluded.sampled_calls,
    sampled_us = excluded.sampled_us
"""


@dataclass
class Others:
    """How far the sessions and reports of a file are read: the keys of the last ones, and how many they were."""

    of: tuple[int | None, bool] = (None, False)  # which file
    session: tuple[Any, ...] = ("", 0, 0)  # host, pid, started_us
    report: int = 0
    number: int = 0

    def go_on(self, sessions: list[dict[str, Any]], reports: list[dict[str, Any]]) -> None:
        """Behind these."""
        if sessions:
            self.session = tuple(sessions[-1][name] for name in ("host", "pid", "started_us"))
        if reports:
            self.report = reports[-1]["id"]
        self.number += max(len(sessions), len(reports))


class Ingest(Part):
    """The part of the store that takes in what others left."""

    def __init__(self, shared: Rows) -> None:
        super().__init__(shared)
        self._looked: tuple[object, int] = (None, 0)  # the file as we last found nothing new in it; on which UTC day
        self._others = Others()
        self._strange: object = None  # the file moved aside as it was when it was found strange

    def take_from(self, path: Path, *, now_s: float, limit_s: float = float("inf")) -> int:
        """Add the new counts of this file to ours; returns how many calls. 0 when there is no such file yet.

        limit_s: after so long no further page is begun; the next call goes on.  Raises StoreError when the file cannot
        be read, StoreBusy when our own database is in use.
        """
        until_s, now_us = time.monotonic() + limit_s, us(now_s)
        aside = self._db.path.with_name("ingest-aside.db")
        calls = 0
        while True:
            calls += self._finish(aside, now_us, until_s)
            found = signature(path)
            looked = (found, now_us // DAY_US)
            if found is None or looked == self._looked or (calls and time.monotonic() > until_s):
                return calls
            if found[0][:2] == identity(self._db.path):
                raise StoreError(f"{path}: the same file as {self._db.path}. Remove it: programs make a new one")
            added, is_over, is_full = self._pass(path, now_us, until_s)
            calls += added
            if is_over and is_full and set_aside(path, aside):
                continue
            changed_s = max(facts[2] for facts in found) / 1e9
            if is_over and not is_full and changed_s < time.time() - SETTLED_S:
                self._looked = looked
            return calls

    def _finish(self, aside: Path, now_us: int, until_s: float) -> int:
        """Read the file that was moved aside, and remove it once all of it is added. Returns how many calls."""
        if signature(aside) is None:
            return 0
        try:
            file = MembersFile(aside, aside=True)
            try:
                if not self._take_others(file, now_us, until_s):  # rows written between our last look and the move
                    return 0
                calls, is_over = (0, True) if file.born is None else self._pages(file, now_us, until_s)
            finally:
                file.close()
        except StrangeFile as err:
            if self._strange != signature(aside):  # a read that the disk refuses once is damage to SQLite, too
                self._strange = signature(aside)
                raise
            kept = aside.with_name("ingest-refused.db")
            aside.replace(kept)
            raise StoreError(
                f"{err}; it was moved to {kept}, and what we had not yet taken of it is not counted"
            ) from err
        if is_over:
            failpoints.point("ingest.done")
            aside.unlink(missing_ok=True)
        return calls

    def _pass(self, path: Path, now_us: int, until_s: float) -> tuple[int, bool, bool]:
        """(calls added, whether this pass over the file is complete, whether a new file shall take its place)."""
        file = MembersFile(path)
        try:
            if not self._take_others(file, now_us, until_s):
                return 0, False, False
            if file.born is None:  # programs have only registered so far
                return 0, True, file.is_older
            calls, is_over = self._pages(file, now_us, until_s)
            if not is_over:
                return calls, False, False
            progress = self._db.read(lambda conn: progress_of(conn, file, now_us))
            size = file.bytes()
            over = file.is_older or abs(now_us - progress.opened_us) >= DAY_US
            old = over and progress.left_us is None
            return calls, True, old or size >= ROTATE_BYTES * (1 if progress.left_us is None else 4)
        finally:
            file.close()

    def _pages(self, file: MembersFile, now_us: int, until_s: float) -> tuple[int, bool]:
        """Read page after page to the end of this pass; (calls added, whether the end was reached)."""
        names = Names(file)
        calls = 0
        while True:
            progress = self._db.read(lambda conn: progress_of(conn, file, now_us))
            if progress.done:
                return calls, True
            progress.look_back(now_us)
            since_us = min(progress.since_us, now_us - OVERLAP_US)
            part, after = progress.resumes_at(file.parts)
            while not (found := file.sightings(part, since_us, after, AT_ONCE)) and part + 1 < file.parts:
                part, after = part + 1, FIRST
            page = [(marked(row, part), names.of(row)) for row in found if is_valid(row, now_us)]
            next_ = None
            if len(found) == AT_ONCE:
                next_ = (file.parts, part, *found[-1][:6])
            elif part + 1 < file.parts:
                next_ = (file.parts, part + 1, *FIRST)
            calls += self._rows.write(lambda conn: self._take(conn, progress, page, next_, now_us))  # noqa: B023
            if next_ is None:
                return calls, True
            if time.monotonic() > until_s:
                return calls, False

    def _take(
        self,
        conn: sqlite3.Connection,
        progress: Progress,
        page: list[tuple[tuple[Any, ...], Named | None]],
        next_: tuple[Any, ...] | None,
        now_us: int,
    ) -> int:
        """In one transaction, add the new counts of these rows and store how far we have read."""
        progress = replace(progress)  # a copy: the transaction may be rolled back, or repeated on a mended file
        room, added = Room(conn, now_us), Added(conn, progress.born)
        ours = Ours(self._rows, conn, room, now_us)
        new: list[tuple[Any, ...]] = []
        seen: list[tuple[Any, ...]] = []
        calls = left_out = 0
        for row, named in page:
            seen_us = min(max(row[9], 0), now_us)
            progress.seen_us = max(progress.seen_us, seen_us)
            if named is None:
                continue
            had = added.of(row, named)
            more = (row[6] - had[0], row[7] - had[1], row[8] - had[2])
            if more[0] > 0:
                ids = ours.ids(named)
                if ids is None:
                    left_out += more[0]
                    progress.leave(seen_us)
                    continue
                if not (0 <= more[1] <= more[0] and more[2] >= 0):
                    more = (more[0], 0, 0.0)
                new.append((*ids, *row[3:5], row[5] % MARK, *more, seen_us))
                calls += more[0]
            if row[6:9] != had and not progress.aside:
                seen.append((progress.born, *row[:9]))
        count(conn, new)
        conn.executemany(_REMEMBER, seen)
        room.keep()
        self._go_on(conn, progress, next_, now_us)
        if left_out and progress.aside:
            log.warning(
                "calls not taken calls=%d reason='more new problems or devices of others than a day may bring'",
                left_out,
            )
        return calls

    def _go_on(self, conn: sqlite3.Connection, progress: Progress, next_: tuple[Any, ...] | None, now_us: int) -> None:
        if next_ is not None:
            progress.after = json.dumps(next_)
        elif progress.aside:
            progress.done = 1
            conn.execute("DELETE FROM ingest_row WHERE born = ?", (progress.born,))
        else:
            progress.begin(now_us)
        conn.execute("DELETE FROM ingest_file WHERE born != ? AND (done OR NOT ?)", (progress.born, progress.aside))
        conn.execute(
            "DELETE FROM ingest_row WHERE born NOT IN (SELECT born FROM ingest_file) AND born != ?", (progress.born,)
        )
        conn.execute(PUT_FILE, asdict(progress))
        if next_ is None:
            conn.execute("DELETE FROM taken")  # versions before migration 0013 have filled it

    def _take_others(self, file: MembersFile, now_us: int, until_s: float) -> bool:
        """Take sessions of programs and reports of failed routes since the last pass began; whether that was all.

        This comes before the pages of a pass: the next pass begins with its last page, and later reads nothing older.
        """
        since_us = None if file.is_empty else self._db.read(lambda conn: others_since(conn, file))
        if since_us is None:
            return True
        if self._others.of != (file.born, file.aside):
            self._others = Others((file.born, file.aside))
        at = self._others
        while at.number < MOST_OTHERS:
            sessions = file.sessions(since_us, now_us + SOON_US, at.session, OTHERS_AT_ONCE)
            reports = file.reports(since_us, at.report, OTHERS_AT_ONCE)
            if sessions or reports:
                self._rows.write(lambda conn: self._keep_others(conn, sessions, reports, now_us))  # noqa: B023
            at.go_on(sessions, reports)
            if max(len(sessions), len(reports)) < OTHERS_AT_ONCE:
                break
            if time.monotonic() > until_s:
                return False
        self._others = Others()
        self._take_wanted(file, since_us)
        return True

    def _take_wanted(self, file: MembersFile, since_us: int) -> None:
        """Note which engines' operators call problems that we know; a claim of these costs one more race at most.

        So one of a problem that no such operator calls is left out: no race of that says anything of an engine.
        """
        names = Names(file)
        found = [(names.of(row), str(row[3])) for row in file.wanted(since_us, OTHERS_AT_ONCE)]
        known = [(named, set(text.split())) for named, text in found if named is not None]
        asked = [(named, op) for named, said in known if named.problem.family == FAMILY for op in ENGINES if op in said]

        def lacking(conn: sqlite3.Connection) -> list[dict[str, Any]]:
            return [values for one in asked if (values := _wanted(conn, *one)) is not None]

        new = self._db.read(lacking) if asked else []
        if new:
            self._rows.write(lambda conn: conn.executemany(ADD_WANTED, lacking(conn)))

    def _keep_others(
        self, conn: sqlite3.Connection, sessions: list[dict[str, Any]], reports: list[dict[str, Any]], now_us: int
    ) -> None:
        room = Room(conn, now_us)
        for row in sessions:
            self._take_session(conn, row, room, now_us)
        for row in reports:
            self._take_report(conn, row, room, now_us)
        room.keep()

    def _take_session(self, conn: sqlite3.Connection, row: dict[str, Any], room: Room, now_us: int) -> None:
        session = session_of(row, now_us)
        if session is None:
            return
        key = (plain(session.host, 512), session.pid, session.started_us)
        known = conn.execute("SELECT 1 FROM session WHERE host = ? AND pid = ? AND started_us = ?", key).fetchone()
        if known is not None or room.take("session"):
            ended_us = row.get("ended_us")
            ended_us = min(max(ended_us, 0), now_us) if isinstance(ended_us, int) else None
            keep_session(conn, self._db.file(), session, min(row["beat_us"], now_us), ended_us)

    def _take_report(self, conn: sqlite3.Connection, row: dict[str, Any], room: Room, now_us: int) -> None:
        problem = valid(row)
        if problem is None or not self._rows.is_known(conn, problem):
            return
        seen_us = min(max(row["last_seen_us"], 0), now_us)
        key = (self._rows.problem_id(conn, problem), *(plain(str(row[name]), 4096) for name in _REPORT_KEY))
        if conn.execute(_LIVE, key).fetchone() is None or conn.execute(_TOLD, (*key, seen_us)).fetchone() is not None:
            return
        if room.take("report"):  # another user's report is no proof: the daemon runs the kernel itself
            what = (plain(row["reason"], 4096), plain(row["run"], 512), "failed")
            conn.execute(ADD_QUARANTINE, (*key, *what, seen_us))


def _wanted(conn: sqlite3.Connection, named: Named, operator: str) -> dict[str, Any] | None:
    """The values of ADD_WANTED; None where the solution there is was raced beside the operator's kernel, or none is."""
    p = named.problem
    key = {"rest": p.rest, "m": p.m, "key": named.environment.key, "operator": operator}
    found = conn.execute(_LACKS_WANTED, key).fetchone()
    if found is None or standing(operator, str(found[2]), str(found[3]), _ANY_VERSION).raced:
        return None
    return {"problem": found[0], "environment": found[1], "operator": operator, "generation": ANY_GENERATION}
