"""Counts of other users' programs: read from a file that they may write, added to our own, which they may not.

The ingest file has our schema, so it can be looked at like any other, but nothing of it is believed that is not
checked here: sightings within bounds, sessions, and reports of routes that failed.  It is only read.  What was taken is
remembered beside what it was added to, in one transaction, so a kill at any moment counts nothing twice.
"""

from __future__ import annotations

import os
import sqlite3
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import GemmtunedError, StoreError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import Session
from gemmtuned.configs.solution import Device, Environment
from gemmtuned.db import faults
from gemmtuned.db.files import connect_read_only
from gemmtuned.db.rows import PROBLEM_COLUMNS, problem_of, rest, rows, us
from gemmtuned.db.sightings import ADD_DEMAND, ADD_QUARANTINE, ADD_SIGHTING, Sightings, run_id_of

AT_ONCE: Final = 20_000  # rows of one transaction; the next turn goes on
LARGEST: Final = 1 << 20  # M, N, K
LARGEST_BYTES: Final = 64e9
NEW_A_DAY: Final = 10_000  # problems never seen before
MOST_CALLS: Final = 1 << 48
OVERLAP_US: Final = 60_000_000  # writers stamp their rows before they commit
FORGET_US: Final = 16 * 86_400_000_000  # hours older than that are rolled up into days, and grow no more

_SIGHTINGS: Final = f"""
SELECT {PROBLEM_COLUMNS}, s.environment_id, r.name AS run, s.hour, s.outcome, s.graph, s.calls, s.sampled_calls,
    s.sampled_us, s.last_seen_us
FROM sighting s JOIN problem p ON p.id = s.problem_id JOIN run r ON r.id = s.run_id
WHERE s.last_seen_us >= ? ORDER BY s.last_seen_us LIMIT ?
"""  # noqa: S608
_DEVICES: Final = """
SELECT e.id, h.key, h.kind, h.name, h.arch, h.units FROM environment e JOIN device h ON h.id = e.device_id
"""
_REPORTS: Final = f"""
SELECT {PROBLEM_COLUMNS}, q.device, q.mode, q.covers, q.backend, q.config, q.stamp, q.reason, q.run, q.last_seen_us
FROM quarantine q JOIN problem p ON p.id = q.problem_id WHERE q.last_seen_us >= ? LIMIT 1000
"""  # noqa: S608
_REPORT_KEY: Final = ("device", "mode", "covers", "backend", "config", "stamp")
_TAKE: Final = """
INSERT INTO taken (source, sighting, calls, sampled_calls, sampled_us, last_seen_us) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET calls = excluded.calls, sampled_calls = excluded.sampled_calls,
    sampled_us = excluded.sampled_us, last_seen_us = excluded.last_seen_us
"""


class Ingest(Sightings):
    """The part of the store that takes in what others left."""

    def take_from(self, path: Path, *, now_s: float) -> int:
        """Add what is new in this file to ours; returns how many calls. 0 when there is no such file yet.

        Raises StoreError when it cannot be read.
        """
        try:
            return self._take_from(path, now_s=now_s)
        except (AttributeError, TypeError, ValueError) as err:  # bytes for a text, a text for a number
            raise StoreError(f"{path}: holds what no gemmtuned wrote ({err}). Remove it: it is made anew") from err

    def _take_from(self, path: Path, *, now_s: float) -> int:
        try:
            facts = os.stat(path)  # noqa: PTH116
        except FileNotFoundError:
            return 0
        source = f"{facts.st_dev}:{facts.st_ino}"
        since_us = self._db.read(
            lambda conn: conn.execute("SELECT max(last_seen_us) FROM taken WHERE source = ?", (source,)).fetchone()[0]
        )
        since_us = min(since_us or 0, us(now_s)) - OVERLAP_US  # a clock ahead of ours must not hide what comes
        conn = connect_read_only(path)
        try:
            found = rows(conn, _SIGHTINGS, (since_us, AT_ONCE))
            environments = _environments(conn)
            sessions = rows(conn, "SELECT * FROM session WHERE beat_us >= ? LIMIT 1000", (since_us,))
            reports = rows(conn, _REPORTS, (since_us,))
        except (sqlite3.Error, UnicodeDecodeError) as err:
            raise faults.store_error(err, path) from err
        finally:
            conn.close()
        taken = self._write(lambda ours: self._take(ours, source, found, environments, reports, us(now_s)))
        for row in sessions:
            self._copy_session(row)
        return taken

    def _take(
        self,
        conn: sqlite3.Connection,
        source: str,
        found: list[dict[str, Any]],
        environments: dict[int, Environment],
        reports: list[dict[str, Any]],
        now_us: int,
    ) -> int:
        day = "SELECT count(*) FROM demand WHERE first_seen_us >= ?"
        room = NEW_A_DAY - conn.execute(day, (now_us - 86_400_000_000,)).fetchone()[0]
        calls = 0
        for row in found:
            problem, environment = _valid(row), environments.get(row["environment_id"])
            if problem is None or environment is None or row["hour"] > now_us // 3_600_000_000 + 1:
                continue
            key = _key(row, problem, environment)
            known = "SELECT calls, sampled_calls, sampled_us FROM taken WHERE source = ? AND sighting = ?"
            before = conn.execute(known, (source, key)).fetchone() or (0, 0, 0.0)
            more = (row["calls"] - before[0], row["sampled_calls"] - before[1], row["sampled_us"] - before[2])
            seen_us = min(row["last_seen_us"], now_us)
            if more[0] > 0 and not (0 <= more[1] <= more[0] and more[2] >= 0):
                more = (more[0], 0, 0.0)
            if more[0] > 0:
                if room <= 0 and not self._is_known(conn, problem):
                    continue
                ids = (self._problem_id(conn, problem), self._environment_id(conn, environment, now_us))
                run = run_id_of(conn, str(row["run"]))
                room -= conn.execute("SELECT 1 FROM demand WHERE problem_id = ?", ids[:1]).fetchone() is None
                where = (row["hour"], row["outcome"], row["graph"])
                conn.execute(ADD_SIGHTING, (*ids, run, *where, *more, seen_us))
                conn.execute(ADD_DEMAND, (*ids, *more, seen_us, seen_us))
                calls += more[0]
            conn.execute(_TAKE, (source, key, row["calls"], row["sampled_calls"], row["sampled_us"], seen_us))
        for row in reports:
            self._take_report(conn, row, now_us)
        conn.execute("DELETE FROM taken WHERE last_seen_us < ?", (now_us - FORGET_US,))
        return calls

    def _take_report(self, conn: sqlite3.Connection, row: dict[str, Any], now_us: int) -> None:
        problem = _valid(row)
        if problem is None or not self._is_known(conn, problem):
            return
        seen_us = min(row["last_seen_us"], now_us)
        key = (self._problem_id(conn, problem), *(str(row[name])[:4096] for name in _REPORT_KEY))
        where = " AND ".join(f"{name} = ?" for name in ("problem_id", *_REPORT_KEY))
        told = f"SELECT 1 FROM quarantine WHERE {where} AND last_seen_us >= ?"  # noqa: S608
        if conn.execute(told, (*key, seen_us)).fetchone() is None:
            conn.execute(ADD_QUARANTINE, (*key, str(row["reason"])[:4096], str(row["run"])[:512], seen_us))

    def _is_known(self, conn: sqlite3.Connection, problem: Problem) -> bool:
        found = conn.execute("SELECT 1 FROM problem WHERE rest = ? AND m = ?", (rest(problem), problem.m)).fetchone()
        return found is not None

    def _copy_session(self, row: dict[str, Any]) -> None:
        known = {f.name: row[f.name] for f in fields(Session) if row.get(f.name) is not None}
        self._put_session(Session(**known), int(row["beat_us"]), row["ended_us"])


def _environments(conn: sqlite3.Connection) -> dict[int, Environment]:
    stamps: dict[int, dict[str, str]] = {}
    for number, backend, stamp in conn.execute(
        "SELECT environment_id, backend, stamp FROM environment_stamp"
    ).fetchall():
        stamps.setdefault(number, {})[str(backend)[:200]] = str(stamp)[:4096]
    found = {}
    for row in rows(conn, _DEVICES):
        names = {name: str(row[name])[:512] for name in ("key", "kind", "name", "arch")}
        found[int(row["id"])] = Environment(Device(**names, units=int(row["units"])), stamps.get(row["id"], {}))
    return found


def _valid(row: dict[str, Any]) -> Problem | None:
    try:
        problem = problem_of(row)
    except GemmtunedError:
        return None
    small = max(problem.m, problem.n, problem.k) <= LARGEST and problem.bytes <= LARGEST_BYTES
    counted = 0 <= row.get("calls", 0) <= MOST_CALLS
    return problem if small and counted else None


def _key(row: dict[str, Any], problem: Problem, environment: Environment) -> str:
    what = (str(problem), rest(problem), environment.key, row["run"], row["hour"], row["outcome"], row["graph"])
    return sha256("\n".join(map(str, what)).encode(errors="replace")).hexdigest()
