"""Counts of other users' programs: read from a file that they may write, added to our own, which they may not.

The ingest file has our schema, so it can be looked at like any other, but nothing of it is believed that is not
checked here: sightings within bounds, sessions, and reports of routes that failed.  `members_file` reads it,
`members_rows` looks whether what it says can be true.

Exactly once: rows are gone through in the order of their keys, pass by pass, and how much of each is in our own tables
is remembered beside these, in one transaction with what was added.  A pass reads only what was seen since the one
before began; the last one, when the file was moved out of the folder and nobody writes to it any more, reads all of
it, so what clocks that jump kept from the others is found by then.  After it the file and its memory are dropped.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from gemmtuned._testing import faults as failpoints
from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.problem import REST_OF_0_1_0, Problem
from gemmtuned.configs.solution import Environment
from gemmtuned.db.files import identity
from gemmtuned.db.members_file import FIRST, MembersFile, StrangeFile, set_aside, signature
from gemmtuned.db.members_rows import SOON_US, Named, Names, cached, is_valid, session_of, valid
from gemmtuned.db.rows import plain, us
from gemmtuned.db.sightings import ADD_QUARANTINE, Sightings, count, run_id_of

log = logging.getLogger("gemmtuned.daemon")

AT_ONCE: Final = 2000  # rows of one transaction
OVERLAP_US: Final = 15_000_000  # writers stamp their rows before they commit
SETTLED_S: Final = 1.0  # a file that changed less than this before we looked may change again within one tick
DAY_US: Final = 86_400_000_000
ROTATE_BYTES: Final = 16 << 20  # some 130,000 rows
NEW_A_DAY: Final = 10_000  # problems never seen before
MORE_A_DAY: Final = {"environment": 100, "run": 1000, "session": 10_000, "report": 10_000}
FURTHER_RUNS: Final = "(further runs)"  # whose calls are those of runs beyond the limit
EARLIEST_US: Final = -1 << 63
OTHERS_AT_ONCE: Final = 1000  # sessions, and reports
FIRST_SESSION: Final = ("", 0, 0)  # host, pid, started_us
_MARK: Final = 2  # `graph` is 0 or 1

_REPORT_KEY: Final = ("device", "mode", "covers", "backend", "config", "stamp")
_LIVE: Final = """
SELECT 1 FROM solution s JOIN device h ON h.id = s.device_id WHERE s.problem_id = ? AND h.key = ? AND s.mode = ?
    AND s.covers = ? AND s.backend = ? AND s.config = ? AND s.stamp = ? AND s.retired_generation IS NULL
"""
_TOLD: Final = f"""
SELECT 1 FROM quarantine WHERE problem_id = ? AND {" AND ".join(f"{name} = ?" for name in _REPORT_KEY)}
    AND last_seen_us >= ?
"""  # noqa: S608
_KNOWN: Final = """
SELECT calls, sampled_calls, sampled_us FROM ingest_row WHERE born = ? AND problem_id = ? AND environment_id = ?
    AND run_id = ? AND hour = ? AND outcome = ? AND graph = ?
"""
_REMEMBER: Final = """
INSERT INTO ingest_row (born, problem_id, environment_id, run_id, hour, outcome, graph,
    calls, sampled_calls, sampled_us)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET calls = excluded.calls, sampled_calls = excluded.sampled_calls,
    sampled_us = excluded.sampled_us
"""
_PUT_FILE: Final = """
INSERT OR REPLACE INTO ingest_file (born, since_us, began_us, seen_us, after, left_us, opened_us, aside, done)
VALUES (:born, :since_us, :began_us, :seen_us, :after, :left_us, :opened_us, :aside, :done)
"""


@dataclass
class _Progress:
    """How far a file is read: a row of `ingest_file`."""

    born: int
    since_us: int
    began_us: int
    seen_us: int
    after: str
    left_us: int | None
    opened_us: int
    aside: int
    done: int

    def begin(self, now_us: int) -> None:
        """The next pass begins, from what this one has seen on. A clock ahead of ours must not hide what comes."""
        self.since_us = min(self.seen_us, self.began_us, now_us) - OVERLAP_US
        self.began_us, self.after = now_us, ""

    def place(self, parts: int) -> tuple[int, tuple[Any, ...]]:
        """(part, key) after which this pass goes on; at its start again when the file was brought up to date since."""
        after = json.loads(self.after) if self.after else [0]
        return (after[1], tuple(after[2:])) if after[0] == parts else (0, FIRST)

    def look_back(self, now_us: int) -> None:
        """At the start of a pass on another day: what was left is read again."""
        if self.left_us is not None and not self.after and now_us // DAY_US != self.began_us // DAY_US:
            self.since_us, self.left_us = min(self.since_us, self.left_us), None

    def leave(self, seen_us: int) -> None:
        """A row stays for another day."""
        self.left_us = seen_us if self.left_us is None else min(self.left_us, seen_us)


class Ingest(Sightings):
    """The part of the store that takes in what others left."""

    _looked: tuple[object, int] = (
        None,
        0,
    )  # at which state of the file we last found nothing new, and on which UTC day
    _sessions_after: tuple[Any, ...] = FIRST_SESSION

    def take_from(self, path: Path, *, now_s: float, limit_s: float = float("inf")) -> int:
        """Add what is new in this file to ours; returns how many calls. 0 when there is no such file yet.

        limit_s: after the first page no further one is begun after so long; the next call goes on.  Raises StoreError
        when it cannot be read, StoreBusy when our own database is in use.
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
        """Go through the file that was moved aside, and remove it once all of it is ours. Returns how many calls."""
        if signature(aside) is None:
            return 0
        try:
            file = MembersFile(aside, aside=True)
            try:
                self._take_others(file, now_us)  # what was written between our last look at it and the move
                calls, is_over = (0, True) if file.born is None else self._pages(file, now_us, until_s)
            finally:
                file.close()
        except StrangeFile as err:
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
        """(calls added, whether this pass over the file came to its end, whether a new file is to take its place)."""
        file = MembersFile(path)
        try:
            if file.born is None:  # programs have said that they are there, and nothing else
                self._take_others(file, now_us)
                return 0, True, file.is_older
            self._take_others(file, now_us)
            calls, is_over = self._pages(file, now_us, until_s)
            if not is_over:
                return calls, False, False
            progress = self._db.read(lambda conn: _progress(conn, file, now_us))
            size = file.bytes()
            over = file.is_older or abs(now_us - progress.opened_us) >= DAY_US
            old = over and progress.left_us is None
            return calls, True, old or size >= ROTATE_BYTES * (1 if progress.left_us is None else 4)
        finally:
            file.close()

    def _pages(self, file: MembersFile, now_us: int, until_s: float) -> tuple[int, bool]:
        """Page after page to the end of this pass; (calls added, whether that was reached)."""
        names = Names(file)
        calls = 0
        while True:
            progress = self._db.read(lambda conn: _progress(conn, file, now_us))
            if progress.done:
                return calls, True
            progress.look_back(now_us)
            since_us = min(progress.since_us, now_us - OVERLAP_US)
            part, after = progress.place(file.parts)
            while not (found := file.sightings(part, since_us, after, AT_ONCE)) and part + 1 < file.parts:
                part, after = part + 1, FIRST
            page = [(_marked(row, part), names.of(row)) for row in found if is_valid(row, now_us)]
            next_ = None
            if len(found) == AT_ONCE:
                next_ = (file.parts, part, *found[-1][:6])
            elif part + 1 < file.parts:
                next_ = (file.parts, part + 1, *FIRST)
            calls += self._write(lambda conn: self._take(conn, progress, page, next_, now_us))  # noqa: B023
            if next_ is None:
                return calls, True
            if time.monotonic() > until_s:
                return calls, False

    def _take(
        self,
        conn: sqlite3.Connection,
        progress: _Progress,
        page: list[tuple[tuple[Any, ...], Named | None]],
        next_: tuple[Any, ...] | None,
        now_us: int,
    ) -> int:
        """One transaction: what is new of these rows is added, and how far we are is remembered."""
        progress = replace(progress)  # the transaction may be rolled back, or done anew on a mended file
        room, before = _Room(conn, now_us), _Before(conn, progress.born)
        ours = _Ours(self, conn, room, now_us)
        new: list[tuple[Any, ...]] = []
        seen: list[tuple[Any, ...]] = []
        calls = left_out = 0
        for row, named in page:
            seen_us = min(max(row[9], 0), now_us)
            progress.seen_us = max(progress.seen_us, seen_us)
            if named is None:
                continue
            had = before.of(row, named)
            more = (row[6] - had[0], row[7] - had[1], row[8] - had[2])
            if more[0] > 0:
                ids = ours.ids(named)
                if ids is None:
                    left_out += more[0]
                    progress.leave(seen_us)
                    continue
                if not (0 <= more[1] <= more[0] and more[2] >= 0):
                    more = (more[0], 0, 0.0)
                new.append((*ids, *row[3:5], row[5] % _MARK, *more, seen_us))
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

    def _go_on(self, conn: sqlite3.Connection, progress: _Progress, next_: tuple[Any, ...] | None, now_us: int) -> None:
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
        conn.execute(_PUT_FILE, asdict(progress))
        if next_ is None:
            conn.execute("DELETE FROM taken")  # of the version before; see migrations/0013

    def _take_others(self, file: MembersFile, now_us: int) -> None:
        """Programs that live, and reports of routes that failed, since the last pass began.

        Before the pages of a pass: with the last one the next pass begins, and what was not taken by then would never
        be read again.
        """
        since_us = None if file.is_empty else self._db.read(lambda conn: _others_since(conn, file))
        if since_us is None:
            return
        sessions = file.sessions(since_us, now_us + SOON_US, self._sessions_after, OTHERS_AT_ONCE)
        reports = file.reports(since_us, 0, OTHERS_AT_ONCE)
        if not sessions and not reports:
            self._sessions_after = FIRST_SESSION
            return

        def work(conn: sqlite3.Connection) -> None:
            room = _Room(conn, now_us)
            for row in sessions:
                self._take_session(conn, row, room, now_us)
            for row in reports:
                self._take_report(conn, row, room, now_us)
            room.keep()

        self._write(work)
        if len(sessions) == OTHERS_AT_ONCE:
            self._sessions_after = tuple(sessions[-1][name] for name in ("host", "pid", "started_us"))
        else:
            self._sessions_after = FIRST_SESSION

    def _take_session(self, conn: sqlite3.Connection, row: dict[str, Any], room: _Room, now_us: int) -> None:
        session = session_of(row, now_us)
        if session is None:
            return
        key = (plain(session.host, 512), session.pid, session.started_us)
        known = conn.execute("SELECT 1 FROM session WHERE host = ? AND pid = ? AND started_us = ?", key).fetchone()
        if known is not None or room.take("session"):
            ended_us = row.get("ended_us")
            ended_us = min(max(ended_us, 0), now_us) if isinstance(ended_us, int) else None
            self._keep_session(conn, session, min(row["beat_us"], now_us), ended_us)

    def _take_report(self, conn: sqlite3.Connection, row: dict[str, Any], room: _Room, now_us: int) -> None:
        problem = valid(row)
        if problem is None or not self._is_known(conn, problem):
            return
        seen_us = min(max(row["last_seen_us"], 0), now_us)
        key = (self._problem_id(conn, problem), *(plain(str(row[name]), 4096) for name in _REPORT_KEY))
        if conn.execute(_LIVE, key).fetchone() is None or conn.execute(_TOLD, (*key, seen_us)).fetchone() is not None:
            return
        if room.take("report"):  # another user's word is not evidence: the daemon runs it, whatever they compared
            what = (plain(row["reason"], 4096), plain(row["run"], 512), "failed")
            conn.execute(ADD_QUARANTINE, (*key, *what, seen_us))

    def _is_known(self, conn: sqlite3.Connection, problem: Problem) -> bool:
        if problem in self._problems or problem in self._fresh:
            return True
        found = conn.execute("SELECT 1 FROM problem WHERE rest = ? AND m = ?", (problem.rest, problem.m)).fetchone()
        return found is not None


class _Ours:
    """Numbers of ours for what rows name, made when new and within the limits of a day."""

    def __init__(self, part: Ingest, conn: sqlite3.Connection, room: _Room, now_us: int) -> None:
        self._part, self._conn, self._room, self._now_us = part, conn, room, now_us
        self._environments: dict[str, int | None] = {}
        self._runs: dict[str, int] = {}

    def ids(self, named: Named) -> tuple[int, int, int] | None:
        """(problem, environment, run); None when it is new and there is no room for it today."""
        environment = cached(self._environments, named.environment, self._environment)
        if environment is None:
            return None
        if not self._part._is_known(self._conn, named.problem) and not self._room.take("problem"):
            return None
        return self._part._problem_id(self._conn, named.problem), environment, cached(self._runs, named.run, self._run)

    def _environment(self, environment: Environment) -> int | None:
        known = self._conn.execute("SELECT id FROM environment WHERE key = ?", (environment.key,)).fetchone()
        if known is None and not self._room.take("environment"):
            return None
        return self._part._environment_id(self._conn, environment, self._now_us)

    def _run(self, name: str) -> int:
        name = plain(name, 200)
        known = self._conn.execute("SELECT id FROM run WHERE name = ?", (name,)).fetchone()
        if known is None and not self._room.take("run"):
            name = FURTHER_RUNS
        return run_id_of(self._conn, name)


class _Before:
    """How much of a row we have already."""

    def __init__(self, conn: sqlite3.Connection, born: int) -> None:
        self._conn, self._born = conn, born
        # Where the version before has left off: rows are known by a hash, and forgotten 16 days after they were seen
        self._earlier_us = conn.execute("SELECT max(last_seen_us) FROM taken").fetchone()[0]

    def of(self, row: tuple[Any, ...], named: Named) -> tuple[int, int, float]:
        """(calls, sampled_calls, sampled_us)."""
        found = self._conn.execute(_KNOWN, (self._born, *row[:6])).fetchone()
        if found is None and self._earlier_us is not None and row[5] < _MARK:  # what came later it never saw
            sql = "SELECT calls, sampled_calls, sampled_us FROM taken WHERE sighting = ?"
            found = self._conn.execute(sql, (_hash(row, named),)).fetchone()
            if found is None and row[9] <= self._earlier_us:
                return row[6], row[7], row[8]
        return found or (0, 0, 0.0)


class _Room:
    """What members may still bring that is new to us today."""

    def __init__(self, conn: sqlite3.Connection, now_us: int) -> None:
        self._conn, self._day = conn, now_us // DAY_US
        found = conn.execute("SELECT what, number FROM ingest_new WHERE day = ?", (self._day,)).fetchall()
        self._used: dict[str, int] = dict(found)
        self._before = dict(self._used)

    def take(self, what: str) -> bool:
        """Whether there is room for one more."""
        used = self._used.get(what, 0)
        if used >= (NEW_A_DAY if what == "problem" else MORE_A_DAY[what]):
            return False
        self._used[what] = used + 1
        return True

    def keep(self) -> None:
        """Write down what was used."""
        if self._used != self._before:
            self._conn.execute("DELETE FROM ingest_new WHERE day != ?", (self._day,))
            rows = [(self._day, what, number) for what, number in self._used.items()]
            self._conn.executemany("INSERT OR REPLACE INTO ingest_new (day, what, number) VALUES (?, ?, ?)", rows)


def _progress(conn: sqlite3.Connection, file: MembersFile, now_us: int) -> _Progress:
    """How far this file is read; of one not seen before, from its beginning on."""
    names = ", ".join(f.name for f in fields(_Progress))
    row = conn.execute(f"SELECT {names} FROM ingest_file WHERE born = ?", (file.born,)).fetchone()  # noqa: S608
    assert file.born is not None
    new = _Progress(file.born, EARLIEST_US, now_us, 0, "", None, now_us, int(file.aside), 0)
    if row is None:
        return new
    found = _Progress(*row)
    if file.aside and not found.aside:
        new.opened_us = found.opened_us
        return new
    return new if found.aside and not file.aside else found  # a new file that looks like the one before


def _others_since(conn: sqlite3.Connection, file: MembersFile) -> int | None:
    """From when on its sessions and reports are to be read; None: a file moved aside, of which all were."""
    row = conn.execute("SELECT since_us, aside FROM ingest_file WHERE born = ?", (file.born,)).fetchone()
    if row is None or (row[1] and not file.aside):  # a new file that looks like the one before
        return 0
    return None if row[1] else int(row[0])


def _marked(row: tuple[Any, ...], part: int) -> tuple[Any, ...]:
    """The row with its part in the column `graph`: what one key has in each part is remembered by itself."""
    return (*row[:5], row[5] + _MARK * part, *row[6:])


def _hash(row: tuple[Any, ...], named: Named) -> str:
    """By which the version before knew a row."""
    columns = [getattr(named.problem, name) for name in REST_OF_0_1_0]
    rest = "|".join(["" if value is None else str(value) for value in columns])
    stamps = sorted(named.environment.stamps.items())
    key = " ".join([named.environment.device.key, *(f"{backend}={stamp}" for backend, stamp in stamps)])
    what = (str(named.problem), rest, key, named.run, *row[3:6])
    return sha256("\n".join(map(str, what)).encode(errors="replace")).hexdigest()
