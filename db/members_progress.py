"""How far a file of members (db/ingest.py) is read, and how much of each of its rows we have added already."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any, Final

from gemmtuned.configs.spelling import REST_OF_0_1_0
from gemmtuned.db.members_file import FIRST, MembersFile
from gemmtuned.db.members_rows import Named

OVERLAP_US: Final = 15_000_000  # a pass begins so much earlier: writers stamp their rows before they commit
DAY_US: Final = 86_400_000_000
EARLIEST_US: Final = -1 << 63
MARK: Final = 2  # the column `graph` holds 0 or 1; see `marked`
_KNOWN: Final = """
SELECT calls, sampled_calls, sampled_us FROM ingest_row WHERE born = ? AND problem_id = ? AND environment_id = ?
    AND run_id = ? AND hour = ? AND outcome = ? AND graph = ?
"""
PUT_FILE: Final = """
INSERT OR REPLACE INTO ingest_file (born, since_us, began_us, seen_us, after, left_us, opened_us, aside, done)
VALUES (:born, :since_us, :began_us, :seen_us, :after, :left_us, :opened_us, :aside, :done)
"""


@dataclass
class Progress:
    """How far a file is read: a row of `ingest_file`.

    A file is read in passes over all rows that may be new.  born: which file it is, by a hash.  since_us: this pass
    reads rows last seen from then on.  began_us: when it began.  seen_us: the latest time of a row that it has met.
    after: the row after which it goes on, as JSON; "" at its start.  left_us: the earliest time of a row left for
    another day, None without one.  opened_us: when the file was first read.  aside: 1 where it was moved aside, so that
    nobody writes to it; done: 1 where all of that was added.
    """

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
        """Begin the next pass, after the latest row of this one; a writer's clock that is ahead must hide no row."""
        self.since_us = min(self.seen_us, self.began_us, now_us) - OVERLAP_US
        self.began_us, self.after = now_us, ""

    def resumes_at(self, parts: int) -> tuple[int, tuple[Any, ...]]:
        """(part, key) after which this pass goes on; from its start where an upgrade gave the file other parts."""
        after = json.loads(self.after) if self.after else [0]
        return (after[1], tuple(after[2:])) if after[0] == parts else (0, FIRST)

    def look_back(self, now_us: int) -> None:
        """At the start of a pass on another day: go back to the rows that were left."""
        if self.left_us is not None and not self.after and now_us // DAY_US != self.began_us // DAY_US:
            self.since_us, self.left_us = min(self.since_us, self.left_us), None

    def leave(self, seen_us: int) -> None:
        """Leave a row of this time for another day."""
        self.left_us = seen_us if self.left_us is None else min(self.left_us, seen_us)


class Added:
    """How much of each row was added already."""

    def __init__(self, conn: sqlite3.Connection, born: int) -> None:
        self._conn, self._born = conn, born
        # Versions before migration 0013 kept a hash of each row that they had added, for 16 days. So a row without one
        # that is not newer than the newest hash was added, too, and its hash was forgotten
        self._earlier_us = conn.execute("SELECT max(last_seen_us) FROM taken").fetchone()[0]

    def of(self, row: tuple[Any, ...], named: Named) -> tuple[int, int, float]:
        """(calls, sampled_calls, sampled_us) of this row that were added already."""
        found = self._conn.execute(_KNOWN, (self._born, *row[:6])).fetchone()
        if found is None and self._earlier_us is not None and row[5] < MARK:  # those versions read the first part alone
            sql = "SELECT calls, sampled_calls, sampled_us FROM taken WHERE sighting = ?"
            found = self._conn.execute(sql, (_hash(row, named),)).fetchone()
            if found is None and row[9] <= self._earlier_us:
                return row[6], row[7], row[8]
        return found or (0, 0, 0.0)


def progress_of(conn: sqlite3.Connection, file: MembersFile, now_us: int) -> Progress:
    """How far this file is read; a file that was not seen before is read from its beginning."""
    names = ", ".join(f.name for f in fields(Progress))
    row = conn.execute(f"SELECT {names} FROM ingest_file WHERE born = ?", (file.born,)).fetchone()  # noqa: S608
    assert file.born is not None
    new = Progress(file.born, EARLIEST_US, now_us, 0, "", None, now_us, int(file.aside), 0)
    if row is None:
        return new
    found = Progress(*row)
    if file.aside and not found.aside:
        new.opened_us = found.opened_us
        return new
    return new if found.aside and not file.aside else found  # a new file that looks like the one before


def others_since(conn: sqlite3.Connection, file: MembersFile) -> int | None:
    """The time after which its sessions and reports are to be read; None for a file moved aside that was read whole."""
    row = conn.execute("SELECT since_us, aside FROM ingest_file WHERE born = ?", (file.born,)).fetchone()
    if row is None or (row[1] and not file.aside):  # a new file that looks like the one before
        return 0
    return None if row[1] else int(row[0])


def marked(row: tuple[Any, ...], part: int) -> tuple[Any, ...]:
    """The row with its part encoded in the column `graph`, so that one key is remembered for each part by itself."""
    return (*row[:5], row[5] + MARK * part, *row[6:])


def _hash(row: tuple[Any, ...], named: Named) -> str:
    """The hash by which versions before migration 0013 remembered a row."""
    columns = [getattr(named.problem, name) for name in REST_OF_0_1_0]
    rest = "|".join(["" if value is None else str(value) for value in columns])
    stamps = sorted(named.environment.stamps.items())
    key = " ".join([named.environment.device.key, *(f"{backend}={stamp}" for backend, stamp in stamps)])
    what = (str(named.problem), rest, key, named.run, *row[3:6])
    return sha256("\n".join(map(str, what)).encode(errors="replace")).hexdigest()
