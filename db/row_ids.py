"""Problems, environments and runs as rows: each distinct one is stored once, and other rows name it by its row id.

Row ids are remembered, since a flush names the same 500 problems every second.  A remembered id is used only after its
transaction was committed, and forgotten when the file was opened anew.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, TypeVar

from gemmtuned.configs.errors import ProblemError
from gemmtuned.configs.padding import COVERS, coarse_m, fine_m, padded_m
from gemmtuned.configs.problem import COLUMNS, Problem
from gemmtuned.configs.solution import Environment, Solution
from gemmtuned.configs.unpatched import builtins
from gemmtuned.db.connect import Connection

__builtins__ = builtins

T = TypeVar("T")
# What a program or worker has is known from the first time it is seen; it holds there if nobody said otherwise before
_STAMP: Final = """
INSERT INTO environment_stamp (environment_id, backend, kernel, stamp, current)
SELECT new.environment_id, new.backend, new.kernel, new.stamp, NOT EXISTS (
    SELECT 1 FROM environment_stamp s
    WHERE s.environment_id = new.environment_id AND s.backend = new.backend AND s.kernel = new.kernel)
FROM (SELECT ? AS environment_id, ? AS backend, ? AS kernel, ? AS stamp) AS new
WHERE true ON CONFLICT DO NOTHING
"""
LOOK_UP_AGAIN: Final = """
UPDATE demand SET solution_id = (SELECT l.solution_id FROM look_up l
    WHERE l.problem_id = demand.problem_id AND l.environment_id = demand.environment_id)
WHERE environment_id = ?
"""
# What a call costs of `d`, a row of demand, with its problem `p`, roofline `f` and solution `s` or none: as the view
# problem_cost says it, which would look the first two up once more for each of 10,000 problems.
COST: Final = """
CASE WHEN s.others > 0.15 AND d.sampled_calls >= 4 THEN d.sampled_us / d.sampled_calls
    ELSE coalesce(s.baseline_us, d.sampled_us / nullif(d.sampled_calls, 0),
        p.flops / f.flops_per_us + p.bytes / f.bytes_per_us + f.call_us) END
"""
MAX_REMEMBERED: Final = 65_536  # problems; more than any model has shapes

_NAMES: Final = ("id", "text", "rest", "operands", *COLUMNS, "m_fine", "m_coarse", "flops", "bytes")
_INSERT: Final = f"INSERT INTO problem ({', '.join(_NAMES)}) VALUES ({', '.join('?' * len(_NAMES))})"  # noqa: S608
_FIND: Final = "SELECT id FROM problem WHERE rest = ? AND m = ?"
_FIND_BETWEEN: Final = "SELECT m, id FROM problem WHERE rest = ? AND m BETWEEN ? AND ?"
# What a row does not say that was salvaged, or brought back from the published tables, the first to know it adds
_DEVICE: Final = """
INSERT INTO device (key, kind, name, arch, units) VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE
SET name = iif(name = '', excluded.name, name), arch = iif(arch IN ('', 'unknown'), excluded.arch, arch),
    units = iif(units = 0, excluded.units, units)
WHERE name = '' OR arch IN ('', 'unknown') OR units = 0
"""
_all_columns: Final = attrgetter(*COLUMNS)
PROBLEM_COLUMNS: Final = "p.rest, p.m"  # all that decides: what we have no column for stands in `rest` by its name


def look_up_keys(problems: Iterable[Problem]) -> str:
    """JSON of the keys that the look-up tries for these problems: [rest, m, covers] for each step of each."""
    keys = [(p.rest, padded_m(p.m, p.n, covers), covers) for p in problems for covers in COVERS]
    return json.dumps(list(dict.fromkeys(keys)))


class _NotKept(Exception):
    """Raised to roll a transaction back; it is no error."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


class Rows:
    """What the parts of a Store share: the connection, its transactions, and the row ids already known."""

    def __init__(self, connection: Connection, *, remembered: int = MAX_REMEMBERED) -> None:
        self.db = connection
        self._opened = -1
        self._remembered = remembered
        self._problems: dict[Problem, int] = {}
        self._fresh: dict[Problem, int] = {}  # ids given in the current transaction
        # By Environment.key: stamps that are in the file, and its number; and what the transaction that runs now adds
        self._environments: dict[str, tuple[dict[str, str], int]] = {}
        self._new_environments: dict[str, tuple[dict[str, str], int]] = {}

    def write(self, work: Callable[[sqlite3.Connection], T], *, durable: bool = False, unchecked: bool = False) -> T:
        """The result of `work`, done in one transaction; see Connection.write."""

        def once(conn: sqlite3.Connection) -> T:
            if self._opened != self.db.opened or len(self._problems) > self._remembered:
                self._problems.clear()
                self._environments.clear()
                self._opened = self.db.opened
            self._fresh.clear()
            self._new_environments.clear()
            return work(conn)

        try:
            result = self.db.write(once, durable=durable, unchecked=unchecked)
            self._problems.update(self._fresh)
            self._environments.update(self._new_environments)
            return result
        finally:
            self._fresh.clear()
            self._new_environments.clear()

    def would(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """The result of `work`, whose changes are rolled back."""

        def once(conn: sqlite3.Connection) -> T:
            raise _NotKept(work(conn))

        try:
            return self.write(once)
        except _NotKept as undone:
            return undone.result  # type: ignore[no-any-return]

    def problem_id(self, conn: sqlite3.Connection, problem: Problem) -> int:
        """The row id of this problem, which is stored if new. Within `write` only."""
        return self.problem_ids(conn, (problem,))[0]

    def problem_ids(self, conn: sqlite3.Connection, problems: Sequence[Problem]) -> list[int]:
        """The row ids of these problems, in their order; new ones are stored together. Within `write` only."""
        known, fresh = self._problems, self._fresh
        sought = {p: p.rest for p in problems if p not in fresh and (not known or p not in known)}
        if sought:
            stored = _stored(conn, sought)
            after = conn.execute("SELECT coalesce(max(id), 0) FROM problem").fetchone()[0]
            new, numbers = [], []
            for p, text in sought.items():
                number = stored.get((text, p.m))
                if number is None:
                    number = after = after + 1
                    sizes = (fine_m(p.m), coarse_m(p.m, p.n), float(p.flops), float(p.bytes))
                    new.append((number, str(p), text, p.operands, *_all_columns(p), *sizes))
                numbers.append(number)
            conn.executemany(_INSERT, new)
            fresh.update(zip(sought, numbers, strict=True))
        return [fresh.get(p) or known[p] for p in problems]

    def is_known(self, conn: sqlite3.Connection, problem: Problem) -> bool:
        """Whether this problem is stored; nothing is added."""
        if problem in self._problems or problem in self._fresh:
            return True
        found = conn.execute("SELECT 1 FROM problem WHERE rest = ? AND m = ?", (problem.rest, problem.m)).fetchone()
        return found is not None

    def known_problems(self, conn: sqlite3.Connection, problems: Sequence[Problem]) -> list[int]:
        """The row ids of those of these problems that are stored; nothing is added."""
        found = (conn.execute(_FIND, (p.rest, p.m)).fetchone() for p in dict.fromkeys(problems))
        return [int(row[0]) for row in found if row is not None]

    def environment_id(self, conn: sqlite3.Connection, environment: Environment, now_us: int) -> int:
        """The row id of this environment, which is stored with its device if new; its stamps are stored, too.

        Within `write` only.
        """
        key = environment.key
        known = self._environments.get(key)
        if known is not None and known[0] == environment.stamps:
            return known[1]
        d = environment.device
        conn.execute(_DEVICE, (d.key, d.kind, d.name, d.arch, d.units))
        found = conn.execute("SELECT id FROM environment WHERE key = ?", (key,)).fetchone()
        if found is None:
            device_id = conn.execute("SELECT id FROM device WHERE key = ?", (d.key,)).fetchone()[0]
            found = conn.execute(
                "INSERT INTO environment (key, device_id, first_seen_us) VALUES (?, ?, ?) RETURNING id",
                (key, device_id, now_us),
            ).fetchone()
        number = int(found[0])
        if conn.executemany(_STAMP, stamp_rows(number, environment)).rowcount:
            conn.execute(LOOK_UP_AGAIN, (number,))
        self._new_environments[key] = (dict(environment.stamps), number)  # a copy: a program's stamps grow
        return number


class Part:
    """One part of a Store: the questions and changes of one kind. Its parts share one Rows."""

    def __init__(self, shared: Rows) -> None:
        self._rows = shared
        self._db = shared.db


def _stored(conn: sqlite3.Connection, sought: dict[Problem, str]) -> dict[tuple[str, int], int]:
    """The row ids of those of these problems, each with its rest, that are stored, by (rest, m)."""
    sizes: dict[str, list[int]] = {}
    for p, rest in sought.items():
        sizes.setdefault(rest, []).append(p.m)
    found: dict[tuple[str, int], int] = {}
    for rest, some in sizes.items():
        low, high = min(some), max(some)
        if high - low < 4 * len(some):  # dense enough to read the whole range at once
            rows = conn.execute(_FIND_BETWEEN, (rest, low, high)).fetchall()
            found |= {(rest, m): int(number) for m, number in rows}
            continue
        for m in some:
            row = conn.execute(_FIND, (rest, m)).fetchone()
            if row is not None:
                found[rest, m] = int(row[0])
    return found


def plain(text: str, limit: int) -> str:
    """Text that SQLite can store: bytes of a command line that are not UTF-8 become `?`."""
    if text.isascii() and len(text) <= limit:
        return text
    return text[:limit].encode(errors="replace").decode()


def us(now_s: float) -> int:
    """Seconds as integer microseconds."""
    return round(now_s * 1e6)


def problem_of(row: sqlite3.Row | dict[str, Any]) -> Problem:
    """The problem in a row with PROBLEM_COLUMNS. Raises ProblemError if a newer version wrote it, or it is damaged."""
    return Problem.from_rest(str(row["rest"]), row["m"])


def stamp_rows(environment_id: int, environment: Environment) -> list[tuple[int, str, str, str]]:
    """(environment_id, backend, kernel, stamp) for each stamp of an environment."""
    names = ((name.partition("."), stamp) for name, stamp in environment.stamps.items())
    return [(environment_id, backend, kernel, stamp) for (backend, _, kernel), stamp in names]


def stamps_here(environment: Environment) -> str:
    """The backends and stamps whose solutions hold in this environment, as JSON for HOLDS_HERE."""
    return json.dumps([f"{backend} {stamp}" for _, backend, _, stamp in stamp_rows(0, environment)])


HOLDS_HERE: Final = "(s.backend || ' ' || s.stamp) IN (SELECT value FROM json_each(:stamps))"  # s: a solution


def current_stamps(conn: sqlite3.Connection, environment_id: int) -> dict[str, str]:
    """The stamps that hold in an environment now, as Environment.stamps has them."""
    sql = "SELECT backend, kernel, stamp FROM environment_stamp WHERE environment_id = ? AND current = 1"
    return {
        f"{backend}.{kernel}" if kernel else backend: stamp
        for backend, kernel, stamp in conn.execute(sql, (environment_id,)).fetchall()
    }


SOLUTION_SELECT: Final = (
    f"SELECT {PROBLEM_COLUMNS}, s.id, h.key AS device, s.mode, s.covers, s.backend, s.config, s.stamp, s.us, "  # noqa: S608
    "s.baseline_us, s.gain_low, s.err, s.baseline_err, s.state, s.generation, s.launch, s.beside "
    "FROM solution s JOIN problem p ON p.id = s.problem_id JOIN device h ON h.id = s.device_id "
)
_OWN: Final = (
    "device", "mode", "covers", "backend", "config", "stamp", "us", "baseline_us", "gain_low", "err", "baseline_err",
    "state", "generation", "launch", "beside",
)  # fmt: skip


def solution_of(row: dict[str, Any]) -> Solution | None:
    """The solution in a row of SOLUTION_SELECT; None for one whose problem is not valid."""
    try:
        return Solution(problem=problem_of(row), **{name: row[name] for name in _OWN})
    except ProblemError:
        return None


def rows(conn: sqlite3.Connection, sql: str, values: tuple[Any, ...] | dict[str, Any] = ()) -> list[dict[str, Any]]:
    """All rows of a query, by column name; the cursor is closed."""
    cursor = conn.execute(sql, values)
    names = [c[0] for c in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
