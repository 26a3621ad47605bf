"""Questions about the database, each one function: opened read-only, answered as a list of rows, closed.

Nothing here waits for writers or keeps them waiting, and it also reads a database of a newer schema, since the views
are promises.  All raise StoreError when there is no database or it cannot be read.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gemmtuned.configs.errors import SettingError, StoreError
from gemmtuned.configs.hint import plain_case
from gemmtuned.configs.padding import COVERS, padded_m
from gemmtuned.configs.problem import COLUMNS, Problem, known_problems
from gemmtuned.configs.processes import life_of, pid_namespace
from gemmtuned.configs.solution import CROWDED, LIVE_STATES, Candidate, Device, Environment, Solution
from gemmtuned.db import faults, migrations
from gemmtuned.db.files import connect_read_only
from gemmtuned.db.leases import STALE_US
from gemmtuned.db.recheck import ASKED
from gemmtuned.db.rows import current_stamps, rows, us
from gemmtuned.db.sightings import HOURS
from gemmtuned.db.solutions import live_solutions

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
VIEWS: Final = (
    "coverage",
    "coverage_by_run",
    "coverage_by_problem",
    "untuned",
    "solutions",
    "trials",
    "sessions",
    "compiled",
    "hints", "frozen", "phases",
)  # fmt: skip
WEIGHTS: Final = {"calls": "calls", "flops": "flops", "time": "time_us"}
DAY_S: Final = 86_400.0

_PROBLEM: Final = ", ".join(f'p."{name}"' for name in COLUMNS)
# by: (columns named, grouped by); the views coverage* say the same for the last 24 h
_GROUPS: Final = {
    "family": ("p.family, h.key AS device", "p.family, h.id"),
    "device": ("h.key AS device", "h.id"),
    "run": ("r.name AS run, h.key AS device", "t.run_id, h.id"),
    "problem": (f"p.text AS problem, {_PROBLEM}, h.key AS device", "t.problem_id, h.id"),
}
_COVERAGE: Final = """
WITH recent AS (
    SELECT problem_id, environment_id, {run_id} AS run_id, sum(calls) AS calls,
        sum(calls * (outcome = 'exact')) AS exact_calls,
        sum(calls * (outcome = 'padded')) AS padded_calls,
        sum(calls * (outcome = 'miss')) AS missed_calls,
        sum(calls * graph) AS graph_calls,
        min(hour) AS first_hour, max(hour) AS last_hour
    FROM {sightings} WHERE hour >= :hour AND last_seen_us >= :since
    GROUP BY problem_id, environment_id, {run_id}
),
known AS MATERIALIZED (
    SELECT t.*, c.us, c.roofline_us, c.solution_id IS NOT NULL AS covered,
        c.solution_id IS NULL AND NOT d.tunable AS untunable
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
    JOIN demand d ON d.environment_id = t.environment_id AND d.problem_id = t.problem_id
)
SELECT {columns},
    count(DISTINCT t.problem_id) AS problems,
    count(DISTINCT CASE WHEN t.covered THEN t.problem_id END) AS tuned_problems,
    sum(t.calls) AS calls, sum(t.exact_calls) AS exact_calls, sum(t.padded_calls) AS padded_calls,
    sum(t.missed_calls) AS missed_calls,
    sum(t.calls * p.flops) AS flops, sum(t.calls * t.us) AS time_us,
    sum(t.calls * t.covered) AS covered_calls,
    sum(t.calls * p.flops * t.covered) AS covered_flops,
    sum(t.calls * t.us * t.covered) AS covered_time_us,
    count(DISTINCT CASE WHEN t.untunable THEN t.problem_id END) AS untunable_problems,
    sum(t.calls * t.untunable) AS untunable_calls,
    sum(t.calls * t.us * (t.us = t.roofline_us)) AS estimated_time_us,
    sum(t.graph_calls) AS graph_calls,
    min(t.first_hour) * 3600000000 AS first_hour, max(t.last_hour) * 3600000000 AS last_hour
FROM known t
JOIN problem p ON p.id = t.problem_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id
LEFT JOIN run r ON r.id = t.run_id
GROUP BY {group}
ORDER BY {weight} DESC
"""
_COVERED_TIME: Final = """
WITH recent AS (
    SELECT problem_id, environment_id, sum(calls) AS calls FROM {sightings}
    WHERE hour >= :hour AND last_seen_us >= :since GROUP BY problem_id, environment_id
)
SELECT total(t.calls * c.us * (c.solution_id IS NOT NULL)) AS covered_us, total(t.calls * c.us) AS time_us
FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
"""
_FROZEN: Final = """
SELECT p.text AS problem, {problem}, h.key AS device, r.name AS run, sum(g.calls) AS calls, s.generation,
    max(g.last_seen_us) AS last_seen
FROM {sightings} g
JOIN demand d ON d.problem_id = g.problem_id AND d.environment_id = g.environment_id
JOIN solution s ON s.id = d.solution_id
JOIN problem p ON p.id = g.problem_id
JOIN run r ON r.id = g.run_id
JOIN environment e ON e.id = g.environment_id
JOIN device h ON h.id = e.device_id
WHERE g.hour >= :hour AND g.last_seen_us >= :since AND g.graph = 1 AND g.outcome = 'miss'
    AND s.state <> 'default_best' AND g.last_seen_us > s.published_us + 10000000
GROUP BY g.problem_id, g.environment_id, g.run_id ORDER BY calls DESC
"""
_SERVED: Final = f"""
WITH recent AS (
    SELECT problem_id, environment_id, sum(calls) AS calls
    FROM every_sighting WHERE hour >= :hour AND last_seen_us >= :since
    GROUP BY problem_id, environment_id
),
known AS MATERIALIZED (
    SELECT t.*, c.us, c.solution_id
    FROM recent t JOIN problem_cost c ON c.environment_id = t.environment_id AND c.problem_id = t.problem_id
)
SELECT p.text AS problem, {_PROBLEM}, h.key AS device, sum(t.calls) AS calls, sum(t.calls * t.us) AS time_us,
    s.backend, s.config, s.covers, s.state, s.baseline_us / s.us AS gain
FROM known t
JOIN problem p ON p.id = t.problem_id
JOIN environment e ON e.id = t.environment_id
JOIN device h ON h.id = e.device_id
LEFT JOIN solution s ON s.id = t.solution_id
GROUP BY t.problem_id, h.id, s.id
ORDER BY time_us DESC
"""  # noqa: S608
_TRAFFIC: Final = """
WITH cost AS MATERIALIZED (SELECT problem_id, environment_id, us FROM problem_cost)
SELECT s.hour, sum(s.calls * c.us) AS time_us, sum(s.calls * c.us * (s.outcome <> 'miss')) AS hit_us
FROM every_sighting s JOIN cost c ON c.problem_id = s.problem_id AND c.environment_id = s.environment_id
WHERE s.hour >= :hour GROUP BY s.hour ORDER BY s.hour
"""
_ANY_SHAPE: Final = {"m": None, "n": None, "k": None}
_OF_SHAPE: Final = "(:m IS NULL OR ((p.m = :m OR p.batch_invariant) AND p.n = :n AND p.k = :k))"
_SOLVED: Final = f"""
UNION
SELECT p.text AS problem, {_PROBLEM}, h.key AS device, 0.0 AS time_us
FROM solution s JOIN problem p ON p.id = s.problem_id JOIN device h ON h.id = s.device_id
WHERE s.retired_generation IS NULL AND {_OF_SHAPE}
"""  # noqa: S608
_KNOWN: Final = f"""
SELECT p.text AS problem, {_PROBLEM}, h.key AS device, sum(d.calls * c.us) AS time_us
FROM demand d
JOIN problem p ON p.id = d.problem_id
JOIN problem_cost c ON c.environment_id = d.environment_id AND c.problem_id = d.problem_id
JOIN environment e ON e.id = d.environment_id
JOIN device h ON h.id = e.device_id
WHERE ({{where}}) AND {_OF_SHAPE}
GROUP BY p.id, h.id
{{solved}}
ORDER BY time_us DESC
"""  # noqa: S608
_FILED: Final = """
SELECT s.*, h.key AS device
FROM solution s JOIN problem b ON b.id = s.problem_id JOIN device h ON h.id = s.device_id
WHERE b.rest = ? AND b.m = ? AND s.covers = ? AND h.key = ?
ORDER BY s.retired_generation IS NOT NULL, s.generation DESC
"""
_WHERE: Final = """
SELECT e.id, e.key AS environment, h.key AS device, h.kind, h.name, h.arch, h.units, u.tunable,
    u.calls, c.us, u.covers, u.unit_m, u.asked_us, u.last_seen_us,
    w.state, w.owner, w.lease_until_us, w.retry_us, w.attempts, w.cause, w.reason
FROM unit u
JOIN problem_cost c ON c.environment_id = u.environment_id AND c.problem_id = u.problem_id
JOIN environment e ON e.id = u.environment_id
JOIN device h ON h.id = e.device_id
LEFT JOIN problem b ON b.rest = u.rest AND b.m = u.unit_m
LEFT JOIN work w ON w.problem_id = b.id AND w.environment_id = e.id AND w.covers = u.covers
    AND w.mode = 'eager'
WHERE u.rest = ? AND u.m = ?
ORDER BY u.last_seen_us DESC
"""


def coverage(
    path: Path, *, by: str = "family", since_s: float = DAY_S, weight: str = "time", now_s: float | None = None
) -> list[dict[str, Any]]:
    """Coverage by family, device, run or problem over the last since_s seconds, heaviest first.

    Columns as in the views coverage*, with graph calls and hour range always, and estimated_time_us: of problems that
    were neither tuned nor timed, whose time is by their size alone.  Hours are counted whole: an hour is in when the
    window touches it and something was seen in it since.
    """
    if by not in _GROUPS:
        raise SettingError(f"coverage by {by!r}: expected one of {', '.join(_GROUPS)}")
    if weight not in WEIGHTS:
        raise SettingError(f"weight {weight!r}: expected one of {', '.join(WEIGHTS)}")
    columns, group = _GROUPS[by]
    since = us((time.time() if now_s is None else now_s) - since_s)
    run_id = "run_id" if by == "run" else "NULL"
    texts = {"columns": columns, "group": group, "run_id": run_id, "weight": WEIGHTS[weight]}
    return _of_window(path, _COVERAGE, since, texts)


def covered_time(path: Path, *, since_s: float = DAY_S, now_s: float | None = None) -> tuple[float, float]:
    """(GEMM time covered now, all of it) of the last since_s seconds, in microseconds, as `coverage` has it."""
    found = _of_window(path, _COVERED_TIME, us((time.time() if now_s is None else now_s) - since_s))
    return (found[0]["covered_us"], found[0]["time_us"]) if found else (0.0, 0.0)


def _of_window(path: Path, sql: str, since_us: int, texts: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """A question about sightings since then, which names their table {sightings}.

    A row that stands for a day or a block of four weeks is in when the window touches it, as one of an hour is.
    """
    values = {"since": since_us, "hour": since_us // 3_600_000_000}

    def look(conn: sqlite3.Connection) -> list[dict[str, Any]]:
        before = conn.execute("SELECT EXISTS (SELECT 1 FROM sighting_before)").fetchone()[0]  # as a union it is slower
        first = next((h for (h,) in conn.execute(HOURS).fetchall()[::-1] if h <= values["hour"]), values["hour"])
        sightings = "every_sighting" if before else "sighting"
        return rows(conn, sql.format(sightings=sightings, **(texts or {})), {**values, "hour": first})

    return _on(path, look, [])


def served(path: Path, *, since_s: float = DAY_S, now_s: float | None = None) -> list[dict[str, Any]]:
    """Every problem called in the last since_s seconds, and what serves it, by device; the heaviest first.

    Columns: the problem's, device, calls, time_us (on stock torch); then of the solution that the look-up finds, for
    this M or for its bucket, and None where there is none: backend, config, covers, state, gain (over stock torch).
    """
    since = us((time.time() if now_s is None else now_s) - since_s)
    return ask(path, _SERVED, {"since": since, "hour": since // 3_600_000_000})


def traffic(path: Path, *, since_s: float = DAY_S, now_s: float | None = None) -> list[dict[str, Any]]:
    """GEMM time by hour: hour (since 1970), time_us (on stock torch), hit_us (of calls that a solution served)."""
    since = us((time.time() if now_s is None else now_s) - since_s)
    return ask(path, _TRAFFIC, {"hour": since // 3_600_000_000})


def untuned(path: Path, *, limit: int | None = None, device: str | None = None) -> list[dict[str, Any]]:
    """Problems without a verdict where they were seen, dearest first."""
    sql = (
        "SELECT * FROM untuned WHERE (:device IS NULL OR device = :device) ORDER BY worth DESC, calls DESC LIMIT :limit"
    )
    return ask(path, sql, {"device": device, "limit": -1 if limit is None else limit})


def solutions(
    path: Path, *, live: bool = True, limit: int | None = None, problems: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Verdicts, those that saved most first. live=False: also what was withdrawn or superseded.

    problems: only what is filed under one of these, spelled as str() does.
    """
    states = ", ".join(f"'{s}'" for s in LIVE_STATES)
    only = f"state IN ({states})" if live else "true"
    return ask(
        path,
        f"SELECT * FROM solutions WHERE {only} AND (:problems IS NULL "  # noqa: S608
        "OR problem IN (SELECT value FROM json_each(:problems))) ORDER BY saved_us DESC, speedup DESC LIMIT :limit",
        {
            "problems": None if problems is None else json.dumps(sorted(problems)),
            "limit": -1 if limit is None else limit,
        },
    )


def saved_us(path: Path) -> float:
    """GEMM time in microseconds that all solutions together have saved so far, withdrawn ones included."""
    return sum(float(row["saved"]) for row in ask(path, "SELECT total(saved_us) AS saved FROM solutions"))


def trials(path: Path, *, problem: Problem | None = None, limit: int | None = None) -> list[dict[str, Any]]:
    """What was tried, newest first; of one problem or of all."""
    sql = "SELECT * FROM trials WHERE (:problem IS NULL OR problem = :problem) ORDER BY started DESC LIMIT :limit"
    return ask(
        path, sql, {"problem": None if problem is None else str(problem), "limit": -1 if limit is None else limit}
    )


def compiled(path: Path, *, since_s: float = DAY_S) -> list[dict[str, Any]]:
    """GEMMs that torch.compile put inside kernels of its own, compiled in the last since_s seconds, by problem."""
    sql = "SELECT * FROM compiled WHERE last_seen >= ? ORDER BY problem, run, kernel"
    return ask(path, sql, (us(time.time() - since_s),))


def frozen(path: Path, *, since_s: float = DAY_S) -> list[dict[str, Any]]:
    """Tuned problems that programs go on replaying with their old kernels, out of graphs captured before the publish.

    As the view of that name, of the last since_s seconds; those called most first.
    """
    return _of_window(path, _FROZEN, us(time.time() - since_s), {"problem": _PROBLEM})


def sessions(path: Path) -> list[dict[str, Any]]:
    """Hooked processes, the ones heard of last first. Besides the view's states: gone, of which this host is sure."""
    found = ask(path, "SELECT * FROM sessions ORDER BY last_seen DESC")
    here = (socket.gethostname(), pid_namespace())
    for row in found:
        same = here[1] is not None and (row["host"], row.get("namespace")) == here
        if same and row["state"] != "ended" and not _is_there(row["pid"]):
            row["state"] = "gone"
    return found


def _is_there(pid: int) -> bool:
    """Whether a process of this number runs here, or may."""
    try:
        os.kill(pid, 0)  # asks, and sends nothing
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    try:  # may be hidden from us
        return not life_of(pid)[0]
    except (OSError, IndexError):
        return True


def count_runs(path: Path) -> int:
    """Labels of workloads that the database knows."""
    return int(next(iter(ask(path, "SELECT count(*) AS n FROM run")), {"n": 0})["n"])


def generation(path: Path) -> int:
    """The newest publication in the store; 0 before the first."""
    return max((int(row["g"] or 0) for row in ask(path, "SELECT max(generation) AS g FROM publication")), default=0)


def free_bytes(path: Path) -> int:
    """How much of the file holds nothing; it is used again before the file grows."""
    sql = "SELECT freelist_count * page_size AS free FROM pragma_freelist_count, pragma_page_size"
    return sum(int(row["free"]) for row in ask(path, sql))


def publications(path: Path, *, limit: int = 50) -> list[dict[str, Any]]:
    """Generations, newest first: when, how many verdicts came and went, why."""
    return ask(path, "SELECT * FROM publication ORDER BY generation DESC LIMIT ?", (limit,))


def asked_again(path: Path) -> int:
    """How many problems have a solution in use that waits to be raced again because somebody asked."""
    found = ask(path, ASKED, {"device": None, "environment": None, "stamps": "[]"})
    return int(found[0]["n"]) if found else 0


def environments(path: Path) -> list[dict[str, Any]]:
    """Where problems were seen: environment, device, problems, calls, open_problems (no verdict), failed, last_seen.

    untunable: problems without a verdict that the daemon's version cannot tune, not among the open ones.
    stale: open problems that were not called for a week, and that nobody asked for: they wait for nobody.
    put_off: open problems of which no times could be taken when last tried; put_off_reason: why, of one of them.
    """
    return ask(
        path,
        """
        SELECT e.key AS environment, h.key AS device, count(*) AS problems, sum(u.calls) AS calls,
            sum(u.solution_id IS NULL AND u.tunable) AS open_problems,
            sum(u.solution_id IS NULL AND NOT u.tunable) AS untunable,
            sum(u.solution_id IS NULL AND u.tunable AND w.state IS 'failed') AS failed, -- none: nobody leased it
            sum(u.solution_id IS NULL AND u.tunable AND w.state IS 'open' AND w.cause = 'put_off') AS put_off,
            max(CASE WHEN u.solution_id IS NULL AND u.tunable AND w.state IS 'open' AND w.cause = 'put_off'
                THEN w.reason END) AS put_off_reason,
            sum(u.solution_id IS NULL AND u.tunable AND w.state IS NOT 'failed' AND u.asked_us IS NULL
                AND u.last_seen_us < :stale) AS stale,
            max(u.last_seen_us) AS last_seen
        FROM unit u
        JOIN environment e ON e.id = u.environment_id
        JOIN device h ON h.id = e.device_id
        LEFT JOIN problem b ON b.rest = u.rest AND b.m = u.unit_m
        LEFT JOIN work w ON w.problem_id = b.id AND w.environment_id = e.id AND w.covers = u.covers AND w.mode = 'eager'
        GROUP BY e.id ORDER BY last_seen DESC
        """,
        {"stale": us(time.time()) - STALE_US},
    )


def called(path: Path) -> list[dict[str, Any]]:
    """Problems that were called, ever, or that wait to be tuned, each with its device; dearest first."""
    return ask(path, _KNOWN.format(solved="", where="d.calls > 0 OR d.solution_id IS NULL"), _ANY_SHAPE)


def seen(path: Path, shape: tuple[int, int, int] | None = None) -> list[dict[str, Any]]:
    """As `called`, and what has a solution: of one that serves several M the largest, called or not.

    shape: M, N, K of those that are wanted.
    """
    values = dict(zip(("m", "n", "k"), shape, strict=True)) if shape else _ANY_SHAPE
    return ask(path, _KNOWN.format(solved=_SOLVED, where="true"), values)


def spelled_like(path: Path, problem: Problem) -> list[Problem]:
    """Problems that were called, tuned or asked for and differ from this one in threads, math mode, determinism alone.

    This one is among them, if it was; what only an imported table names is not.
    """
    found = ask(
        path,
        """
        SELECT p.text AS problem FROM problem p WHERE m = ? AND n = ? AND k = ? AND (
            EXISTS (SELECT 1 FROM demand d WHERE d.problem_id = p.id)
            OR EXISTS (SELECT 1 FROM solution s WHERE s.problem_id = p.id)
            OR EXISTS (SELECT 1 FROM work w WHERE w.problem_id = p.id)
            OR EXISTS (SELECT 1 FROM trial t WHERE t.problem_id = p.id)
        ) ORDER BY id
        """,
        (problem.m, problem.n, problem.k),
    )
    return [one for one in known_problems(found) if plain_case(one) == plain_case(problem)]


def explain(path: Path, problem: Problem, *, environment: Environment | None = None) -> list[dict[str, Any]]:
    """What the look-up of this problem finds, step by step, and why each step that finds nothing does not.

    One row for each step (exact, fine, coarse) and solution filed there, in look-up order, for the given environment or
    for each in which the problem was seen.  Columns: environment, device, covers, m, backend, config, state, stamp,
    us, baseline_us, generation, chosen (the one that runs), why.  A last row, covers `queue`, says what is being done
    about it.
    """
    conn = _open(path)
    try:
        seen = rows(conn, _WHERE, (problem.rest, problem.m))
        places = [environment] if environment is not None else [_environment(conn, s) for s in seen]
        found: list[dict[str, Any]] = []
        for place in places:
            steps = _steps(conn, problem, place)
            found += steps
            here = next((s for s in seen if s["environment"] == place.key), None)
            hit = any(step["chosen"] for step in steps)
            found.append(_row(place.key, place.device.key, "queue", problem.m, why=_queue(here, hit=hit)))
        return found
    except (sqlite3.Error, UnicodeDecodeError) as err:
        raise faults.store_error(err, path) from err
    finally:
        conn.close()


def hints(path: Path, problem: Problem, *, limit: int = 20) -> list[dict[str, Any]]:
    """Imported rows for this problem's plain case, sizes near it first."""
    p = plain_case(problem)
    sql = (
        "SELECT * FROM hints WHERE kind = 'tuned' AND problem IN (SELECT text FROM problem WHERE rest = :rest) "
        "ORDER BY 1.0 * max(m, :m) / min(m, :m), coalesce(us, 1e300), source, line LIMIT :limit"
    )
    return ask(path, sql, {"rest": p.rest, "m": p.m, "limit": limit})


def devices(path: Path) -> dict[str, Device]:
    """Every device kind that was seen, by its key."""
    return {row["key"]: Device(**row) for row in ask(path, "SELECT key, kind, name, arch, units FROM device")}


def frame(path: Path, view: str) -> pd.DataFrame:
    """A promised view as a pandas DataFrame. Raises SettingError for a name that is none."""
    if view not in VIEWS:
        raise SettingError(f"{view!r} is not a view, expected one of {', '.join(VIEWS)}")
    import pandas as pd

    conn = _open(path)
    try:
        return pd.read_sql_query(f"SELECT * FROM {view}", conn)  # noqa: S608
    except (sqlite3.Error, UnicodeDecodeError) as err:
        raise faults.store_error(err, path) from err
    finally:
        conn.close()


def published(path: Path, device_keys: Collection[str] | None = None) -> tuple[int, list[Solution]]:
    """(generation, live solutions) of one moment; None: of all devices."""

    def look(conn: sqlite3.Connection) -> tuple[int, list[Solution]]:
        conn.execute("BEGIN")
        return live_solutions(conn, device_keys)

    none: list[Solution] = []
    return _on(path, look, (0, none))


def ask(path: Path, sql: str, values: tuple[Any, ...] | dict[str, Any] = ()) -> list[dict[str, Any]]:
    """One question on one read-only connection."""
    return _on(path, lambda conn: rows(conn, sql, values), [])


class _Copy(sqlite3.Connection):
    """A copy in memory, of which the next question is asked, too."""

    def close(self) -> None:
        """Stay: a command asks several questions, and a copy of a year takes seconds."""


_copies: dict[tuple[object, ...], _Copy] = {}


def _open(path: Path) -> sqlite3.Connection:
    """The database to read: as it is, or a copy in memory brought up to our schema where nobody has done that yet."""
    conn = connect_read_only(path)
    try:
        application, version = migrations.identity(conn)
        if application != migrations.APPLICATION_ID or not 0 < version < migrations.SCHEMA:
            return conn
        state = (path, threading.get_ident(), *_state(path), *_state(path.with_name(path.name + "-wal")))
        newer = _copies.get(state)
        if newer is None:
            _copies.clear()
            newer = sqlite3.connect(":memory:", isolation_level=None, factory=_Copy)
            conn.backup(newer)
            migrations.apply(newer)
            _copies[state] = newer
    except (sqlite3.Error, UnicodeDecodeError) as err:
        conn.close()
        raise faults.store_error(err, path) from err
    conn.close()
    return newer


def _state(path: Path) -> tuple[int, ...]:
    """What changes when somebody writes to this file."""
    try:
        facts = path.stat()
    except OSError:
        return ()
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _on(path: Path, look: Callable[[sqlite3.Connection], T], nothing: T) -> T:
    conn = _open(path)
    try:
        if migrations.identity(conn) == (0, 0):  # made, but not yet filled: a program is starting
            return nothing
        return look(conn)
    except (sqlite3.Error, UnicodeDecodeError) as err:
        raise faults.store_error(err, path) from err
    except OverflowError as err:
        raise StoreError(f"{path}: asked for a number that SQLite cannot hold ({err})") from err
    finally:
        conn.close()


def _environment(conn: sqlite3.Connection, row: dict[str, Any]) -> Environment:
    """That of a row of _WHERE, with the stamps that hold there now."""
    device = Device(row["device"], row["kind"], row["name"], row["arch"], row["units"])
    return Environment(device, current_stamps(conn, row["id"]))


def _steps(conn: sqlite3.Connection, problem: Problem, environment: Environment) -> list[dict[str, Any]]:
    key, device = environment.key, environment.device.key
    steps: list[dict[str, Any]] = []
    hit = False
    for covers in COVERS[:1] if problem.batch_invariant else COVERS:
        m = padded_m(problem.m, problem.n, covers)
        filed = rows(conn, _FILED, (problem.rest, m, covers, device))
        if not filed:
            steps.append(_row(key, device, covers, m, why="nothing filed here"))
        for s in filed:
            why = _why_not(s, environment)
            chosen = not why and not hit
            text = why or ("this one runs" if chosen else "an earlier step was found")
            if (s["others"] or 0.0) > CROWDED:
                text += f"; timed while others used {s['others']:.0%} of the device"
            known = {
                name: s[name] for name in ("backend", "config", "state", "stamp", "us", "baseline_us", "generation")
            }
            steps.append(_row(key, device, covers, m, chosen=chosen, why=text, **known))
            hit = hit or chosen
    return steps


def _why_not(s: dict[str, Any], environment: Environment) -> str:
    if s["state"] not in LIVE_STATES:
        return f"{s['state']}: {s['reason']}"
    if s["backend"] not in environment.backends:
        return f"backend {s['backend']} is not available here"
    if not environment.accepts(s["backend"], s["stamp"]):
        here = environment.stamp_of(Candidate(s["backend"], s["config"]))
        return f"made for {s['backend']} {s['stamp']}, here it is {here or 'not there any more'}"
    return ""


def _queue(here: dict[str, Any] | None, *, hit: bool) -> str:
    if here is None:
        return "never seen in this environment: run a program that calls it with GEMMTUNED=1, or gemmtuned tune"
    calls = f"{here['calls']} call{'' if here['calls'] == 1 else 's'} seen, {here['us']:.1f} us each by the default"
    if hit:
        return calls
    unit = "" if here["covers"] == "exact" else f", to be tuned with its bucket up to M={here['unit_m']}"
    now = us(time.time())
    if not here["tunable"]:
        return f"{calls}: this version cannot tune it"
    if here["state"] == "failed":
        by_hand = here["cause"] in ("withdrawn", "rolled_back")
        how = here["reason"] if by_hand else f"failed for good ({here['reason']})"
        return f"{calls}{unit}: {how}; gemmtuned retune has it tried again, tune tries at once"
    if here["owner"] is not None and here["lease_until_us"] > now:
        return f"{calls}{unit}: being tuned by {here['owner']}"
    if here["retry_us"] is not None and here["retry_us"] > now:
        again = f"again in {(here['retry_us'] - now) / 1e6:.0f} s"
        times = "once" if here["attempts"] == 1 else f"{here['attempts']} times"
        return f"{calls}{unit}: failed {times} ({here['reason']}), {again}"
    if here["asked_us"] is None and here["last_seen_us"] < now - STALE_US:
        return f"{calls}{unit}: stale, not called for a week; gemmtuned retune has it tuned all the same"
    before = f" (last time {here['reason']})" if here["reason"] else ""
    return f"{calls}{unit}: waits for a daemon with this environment and an idle device{before}"


def _row(
    environment: str, device: str, covers: str, m: int, *, why: str, chosen: bool = False, **known: Any
) -> dict[str, Any]:
    empty = dict.fromkeys(("backend", "config", "state", "stamp", "us", "baseline_us", "generation"))
    return {
        "environment": environment,
        "device": device,
        "covers": covers,
        "m": m,
        **empty,
        **known,
        "chosen": chosen,
        "why": why,
    }
