"""The file in which programs of other users leave their counts: checked before it is opened, read page by page.

Whoever may write to the folder may put anything there: a FIFO, a link, a view without an end, gigabytes of text.  So
the file must be a regular one with the tables that we make, every query has a deadline, and too long values are not
read.  We only read the file; when it is large or old it is moved out of the folder, and programs make a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import stat
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from gemmtuned._testing import faults as failpoints
from gemmtuned.configs.errors import StoreError
from gemmtuned.db import faults, migrations
from gemmtuned.db.lockfile import LockFile, what_lies_there
from gemmtuned.db.row_ids import PROBLEM_COLUMNS, rows

ANSWER_S: Final = 1.0  # the longest time for a query
LOCK_S: Final = 0.05
LONGEST: Final = 1 << 16  # the most bytes of a row or text; ours have at most 8 KiB
LARGEST_LOG_BYTES: Final = 1 << 30  # our programs truncate their log at 16 MiB
FIRST: Final = (*[-(1 << 63)] * 4, "", 0)  # a key less than that of any row

_KEY: Final = "problem_id, environment_id, run_id, hour, outcome, graph"
_SELECT: Final = f"SELECT {_KEY}, calls, sampled_calls, sampled_us, last_seen_us FROM"
_BY_HOUR: Final = "hour, problem_id, environment_id, run_id, outcome, graph"
# Pages are read by the primary key, so that a page costs the same however large the file is
_PAGE: Final = f"""
{_SELECT} {{table}}
WHERE last_seen_us >= ? AND ({_KEY}) > (?, ?, ?, ?, ?, ?) ORDER BY {_KEY} LIMIT ?
"""
_PAGE_BY_HOUR: Final = f"""
{_SELECT} sighting
WHERE last_seen_us >= ? AND hour >= ? AND ({_BY_HOUR}) > (?, ?, ?, ?, ?, ?) ORDER BY {_BY_HOUR} LIMIT ?
"""
# A file from before step 0016 of the schema has its old rows in a separate table, which is only read
_BEFORE: Final = "sighting_before"
_PROBLEM: Final = f"SELECT {PROBLEM_COLUMNS} FROM problem p WHERE p.id = ?"  # noqa: S608
_DEVICE: Final = """
SELECT h.key, h.kind, h.name, h.arch, h.units FROM environment e JOIN device h ON h.id = e.device_id WHERE e.id = ?
"""
_STAMPS: Final = "SELECT * FROM environment_stamp WHERE environment_id = ? LIMIT 256"
_SESSIONS: Final = """
SELECT * FROM session WHERE beat_us BETWEEN ? AND ? AND (host, pid, started_us) > (?, ?, ?)
ORDER BY host, pid, started_us LIMIT ?
"""
_REPORTS: Final = f"""
SELECT {PROBLEM_COLUMNS}, q.id, q.device, q.mode, q.covers, q.backend, q.config, q.stamp, q.reason, q.run,
    q.last_seen_us
FROM quarantine q JOIN problem p ON p.id = q.problem_id WHERE q.last_seen_us >= ? AND q.id > ? ORDER BY q.id LIMIT ?
"""  # noqa: S608
_WANTED: Final = """
SELECT problem_id, environment_id, 0, wanted FROM demand
WHERE wanted <> '' AND last_seen_us >= ? ORDER BY last_seen_us DESC LIMIT ?
"""
# The columns that are read, with their types; additional columns do no harm
_COUNT, _TEXT, _REAL = "INTEGER", "TEXT", "REAL"
_READ: Final[dict[str, dict[str, str | None]]] = {
    "problem": dict.fromkeys(name.strip().removeprefix("p.") for name in PROBLEM_COLUMNS.split(",")),
    "device": {"id": _COUNT, "key": _TEXT, "kind": _TEXT, "name": _TEXT, "arch": _TEXT, "units": _COUNT},
    "environment": {"id": _COUNT, "key": _TEXT, "device_id": _COUNT, "first_seen_us": _COUNT},
    "environment_stamp": {"environment_id": _COUNT, "backend": _TEXT, "stamp": _TEXT},
    "run": {"id": _COUNT, "name": _TEXT},
    "sighting": {
        "problem_id": _COUNT, "environment_id": _COUNT, "run_id": _COUNT, "hour": _COUNT, "outcome": _TEXT,
        "graph": _COUNT, "calls": _COUNT, "sampled_calls": _COUNT, "sampled_us": _REAL, "last_seen_us": _COUNT,
    },
    "session": {"host": _TEXT, "pid": _COUNT, "started_us": _COUNT, "run": _TEXT, "beat_us": _COUNT},
    "quarantine": {"id": _COUNT, "problem_id": _COUNT, "reason": _TEXT, "run": _TEXT, "last_seen_us": _COUNT},
}  # fmt: skip
_DEMAND: Final[dict[str, str | None]] = {
    "problem_id": _COUNT,
    "environment_id": _COUNT,
    "wanted": _TEXT,
    "last_seen_us": _COUNT,
}


def signature(path: Path) -> tuple[tuple[int, int, int, int], ...] | None:
    """A value that changes when anybody writes to the file or its log; None when there is no file.

    Raises StoreError, before anything is opened, if gemmtuned did not make what lies there.
    """
    found = []
    for end in ("", "-wal", "-shm", "-journal"):
        try:
            facts = os.lstat(f"{path}{end}")
        except FileNotFoundError:
            if not end:
                return None
            continue
        except OSError as err:
            raise faults.store_error(err, path) from err
        if not stat.S_ISREG(facts.st_mode):
            what = what_lies_there(facts.st_mode)
            raise StoreError(f"{path}{end}: {what} that no gemmtuned made. Remove it: programs make a file there")
        if end and facts.st_size > LARGEST_LOG_BYTES:
            raise StoreError(f"{path}{end}: {facts.st_size} bytes. Stop the programs that write there, and remove it")
        if end in ("", "-wal"):
            found.append((facts.st_dev, facts.st_ino, facts.st_mtime_ns, facts.st_size))
    return tuple(found)


class StrangeFile(StoreError):
    """The file has content that gemmtuned did not write, or is damaged; another try does not help."""


class MembersFile:
    """A snapshot of the file, until `close`. aside: nobody writes to the file any more.

    Every method raises StoreError when the file cannot be read, has foreign content, or takes longer than ANSWER_S.
    """

    def __init__(self, path: Path, *, aside: bool = False) -> None:
        self.path = path
        self.aside = aside
        self.born: int | None  # identifies the file for its life; None while it is empty
        self.is_older = False  # it has the schema of an older version, to which our programs add nothing
        self._until_s = time.monotonic() + ANSWER_S
        uri = f"{path.absolute().as_uri()}?mode=ro" + ("&immutable=1" if aside else "")
        faults.refuse_short(path)
        try:
            self._conn = sqlite3.connect(uri, uri=True, timeout=ANSWER_S / 4, isolation_level=None)
        except sqlite3.Error as err:
            raise faults.store_error(err, path) from err
        try:
            self._conn.set_progress_handler(lambda: time.monotonic() > self._until_s, 10_000)
            self._conn.text_factory = lambda data: data.decode(errors="replace")
            if sys.version_info >= (3, 11):
                self._conn.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
            self._ask("PRAGMA trusted_schema = OFF")
            self._ask("BEGIN")
            if not self._ask("SELECT 1 FROM sqlite_master LIMIT 1"):  # somebody is making it now
                self.born, self.is_empty = None, True
                return
            self.is_empty = False
            self._refuse_strange()
            self.is_older = self._ask("PRAGMA user_version")[0][0] < migrations.SCHEMA
            came_as = "came_as" in {row[1] for row in self._ask("PRAGMA table_info(environment)")}
            name = "coalesce(nullif(came_as, ''), key)" if came_as else "key"  # step 0017 gave environments new keys
            first = self._ask(f"SELECT {name}, first_seen_us FROM environment ORDER BY id LIMIT 1")  # noqa: S608
            self.born = int.from_bytes(sha256(json.dumps(first).encode()).digest()[:8], "big") >> 1 if first else None
        except BaseException:
            self._conn.close()
            raise

    def close(self) -> None:
        """End the snapshot."""
        with contextlib.suppress(sqlite3.Error):
            self._conn.close()

    @property
    def parts(self) -> int:
        """How many tables have sightings: 2 from step 0016 of the schema on."""
        return 2 if self._has_before else 1

    def sightings(self, part: int, since_us: int, after: tuple[Any, ...], limit: int) -> list[tuple[Any, ...]]:
        """Rows of this part that were last seen since since_us and whose key is after this one, ordered by key.

        A row: problem, environment, run, hour, outcome, graph, which are its key, then calls, sampled_calls,
        sampled_us, last_seen_us.
        """
        if part == 0:
            return self._ask(_PAGE.format(table=_BEFORE if self._has_before else "sighting"), (since_us, *after, limit))
        hour = since_us // 3_600_000_000  # a row is last seen in its hour
        by_hour = (after[3], *after[:3], *after[4:])
        return self._ask(_PAGE_BY_HOUR, (since_us, hour, *by_hour, limit))

    def problem(self, number: int) -> dict[str, Any] | None:
        """The columns of the problem with this id; None when there is none."""
        return next(iter(self._rows(_PROBLEM, (number,))), None)

    def environment(self, number: int) -> tuple[dict[str, Any], dict[str, str]] | None:
        """(device, stamps that hold there now) of this environment; also of a file from before step 0017."""
        device = next(iter(self._rows(_DEVICE, (number,))), None)
        if device is None:
            return None
        now = [row for row in self._rows(_STAMPS, (number,)) if row.get("current", 1)]
        names = (f"{row['backend']}.{row['kernel']}" if row.get("kernel") else str(row["backend"]) for row in now)
        return device, dict(zip(names, (str(row["stamp"]) for row in now), strict=True))

    def run(self, number: int) -> str:
        """The run label with this id; "" when there is none."""
        found = self._ask("SELECT name FROM run WHERE id = ?", (number,))
        return found[0][0] if found else ""

    def sessions(self, since_us: int, until_us: int, after: tuple[Any, ...], limit: int) -> list[dict[str, Any]]:
        """Sessions seen in this time whose key (host, pid, started_us) is after this one."""
        return self._rows(_SESSIONS, (since_us, until_us, *after, limit))

    def reports(self, since_us: int, after: int, limit: int) -> list[dict[str, Any]]:
        """Reports of failed routes with an id after this one."""
        return self._rows(_REPORTS, (since_us, after, limit))

    def wanted(self, since_us: int, limit: int) -> list[tuple[Any, ...]]:
        """Calls of engines' operators that no solution may serve: problem, environment, 0, names of operators.

        The last seen first; none of a file from before step 0028.
        """
        return self._ask(_WANTED, (since_us, limit)) if self._has_wanted else []

    def bytes(self) -> int:
        """The size of the file without its free pages."""
        pages, free, size = (self._ask(f"PRAGMA {p}")[0][0] for p in ("page_count", "freelist_count", "page_size"))
        return int((pages - free) * size)

    def _refuse_strange(self) -> None:
        """Refuse all but plain tables with stored columns, since a view or a computed column may never end."""
        kinds = {row[1]: row for row in self._ask("PRAGMA table_list")}
        self._has_before = _BEFORE in kinds
        self._has_wanted = any(row[1] == "wanted" for row in self._ask("PRAGMA table_xinfo(demand)"))
        read = {**_READ, **({_BEFORE: _READ["sighting"]} if self._has_before else {})}
        read |= {"demand": _DEMAND} if self._has_wanted else {}
        for table, wanted in read.items():
            kind = kinds.get(table)
            if kind is None or kind[2] != "table" or not kind[5]:
                what = "no such table" if kind is None else kind[2] if kind[2] != "table" else "not strict"
                raise self._strange(f"{table}: {what}")
            columns = {row[1]: row for row in self._ask(f"PRAGMA table_xinfo({table})")}
            for name, type_ in wanted.items():
                if name not in columns or (type_ is not None and columns[name][2] != type_):
                    raise self._strange(f"{table}.{name} is not as we make it")
            if any(row[2] == "ANY" or row[6] for row in columns.values()):
                raise self._strange(f"{table} has columns of no type, or computed ones")

    def _strange(self, why: str) -> StrangeFile:
        return StrangeFile(f"{self.path}: holds what no gemmtuned wrote ({why}). Remove it: it is made anew")

    def _ask(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with self._named():
            return self._conn.execute(sql, values).fetchall()

    def _rows(self, sql: str, values: tuple[Any, ...]) -> list[dict[str, Any]]:
        with self._named():
            return rows(self._conn, sql, values)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        self._until_s = time.monotonic() + ANSWER_S
        try:
            yield
        except (sqlite3.Error, OverflowError) as err:
            if time.monotonic() > self._until_s:
                raise StoreError(f"{self.path}: not read within {ANSWER_S:g} s. If it stays so, remove it") from err
            if "too big" in str(err):
                raise self._strange("a text that is too long") from err
            if isinstance(err, OverflowError):
                raise self._strange(str(err)) from err
            if faults.kind(err) == "corrupt":
                raise StrangeFile(f"{self.path}: damaged ({err}). Remove it: it is made anew") from err
            raise faults.store_error(err, self.path, waited_s=ANSWER_S / 4) from err


def set_aside(path: Path, aside: Path) -> bool:
    """Move the file out of the folder, so that programs make a new one; False when somebody is using it.

    This is done under the lock of its writers, after a checkpoint: so nobody is in the middle of a write, all that was
    committed is in the file that is moved, and each writer notices before its next write.  Raises StoreError.
    """
    lock = LockFile(path.with_name(path.name + ".lock"))
    log = Path(f"{path}-wal")
    try:
        if not lock.acquire(LOCK_S):
            return False
        try:
            if signature(path) is None:
                return False
            with contextlib.closing(
                sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=LOCK_S, isolation_level=None)
            ) as conn:
                if conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
                    return False  # somebody reads an older state of it
            if log.exists() and log.stat().st_size:
                return False
            failpoints.point("ingest.set_aside")
            path.rename(aside)
            failpoints.point("ingest.moved")
            for end in ("-shm", "-wal"):  # both are empty of meaning now; a new file must not find them
                Path(f"{path}{end}").unlink(missing_ok=True)
        finally:
            lock.release()
    except (sqlite3.Error, OSError) as err:
        raise faults.store_error(err, path, waited_s=LOCK_S) from err
    finally:
        lock.close()
    return True
