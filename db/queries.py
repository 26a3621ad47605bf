"""Questions about the database, each one function: it opens the file read-only, returns a list of rows, and closes it.

ask.py has the way to do that.  traffic.py has the questions about a window of time, look_up.py the one about a single
product; callers import all of them from here.  All raise StoreError when there is no database or it cannot be read.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gemmtuned.configs.errors import SettingError
from gemmtuned.configs.hint import plain_case
from gemmtuned.configs.nearest_word import did_you_mean
from gemmtuned.configs.problem import Problem, known_problems
from gemmtuned.configs.processes import life_of, pid_namespace
from gemmtuned.configs.solution import LIVE_STATES, Device, Solution
from gemmtuned.configs.tunable import why_not
from gemmtuned.db.abilities import reason
from gemmtuned.db.ask import DAY_S, PROBLEM, ask, error_of, on, open_to_read
from gemmtuned.db.leases import STALE_US
from gemmtuned.db.look_up import explain
from gemmtuned.db.recheck import ASKED
from gemmtuned.db.row_ids import us
from gemmtuned.db.solutions import live_solutions
from gemmtuned.db.traffic import WEIGHTS, coverage, covered_time, frozen, served, traffic, unfit, unraced

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "DAY_S",
    "VIEWS",
    "WEIGHTS",
    "ask",
    "asked_again",
    "called",
    "compiled",
    "count_runs",
    "coverage",
    "covered_time",
    "devices",
    "environments",
    "explain",
    "frame",
    "free_bytes",
    "frozen",
    "generation",
    "hints",
    "publications",
    "published",
    "saved_us",
    "seen",
    "served",
    "sessions",
    "solutions",
    "spelled_like",
    "traffic",
    "trials",
    "unfit",
    "unraced",
    "untuned",
]

VIEWS: Final = (
    "coverage",
    "coverage_by_run",
    "coverage_by_problem",
    "untuned",
    "solutions",
    "trials",
    "sessions",
    "compiled",
    "hints",
    "frozen",
    "phases",
    "traffic",
    "unraced",
    "unfit",
)

_ANY_SHAPE: Final = {"m": None, "n": None, "k": None}
_OF_SHAPE: Final = "(:m IS NULL OR ((p.m = :m OR p.batch_invariant) AND p.n = :n AND p.k = :k))"
_SOLVED: Final = f"""
UNION
SELECT p.text AS problem, {PROBLEM}, h.key AS device, 0.0 AS time_us
FROM solution s JOIN problem p ON p.id = s.problem_id JOIN device h ON h.id = s.device_id
WHERE s.retired_generation IS NULL AND {_OF_SHAPE}
"""  # noqa: S608
_KNOWN: Final = f"""
SELECT p.text AS problem, {PROBLEM}, h.key AS device, sum(d.calls * c.us) AS time_us
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


def untuned(path: Path, *, limit: int | None = None) -> list[dict[str, Any]]:
    """Problems without a verdict where they were seen, most expensive first.

    As the view of that name, with the reason of those that cannot be tuned, also where no daemon has looked at them.
    """
    sql = "SELECT * FROM untuned ORDER BY worth DESC, calls DESC LIMIT ?"
    rows = ask(path, sql, (-1 if limit is None else limit,))
    for row in rows:
        for problem in known_problems([row]):
            if row["state"] == "untunable" or why_not(problem):
                row |= {"state": "untunable", "reason": reason(problem)}
    return rows


def solutions(path: Path, *, live: bool = True, problems: Collection[str] | None = None) -> list[dict[str, Any]]:
    """Verdicts, those that saved most first. live=False: also withdrawn and superseded ones.

    problems: only verdicts filed under one of these, spelled as str() does.
    """
    states = ", ".join(f"'{s}'" for s in LIVE_STATES)
    only = f"state IN ({states})" if live else "true"
    return ask(
        path,
        f"SELECT * FROM solutions WHERE {only} AND (:problems IS NULL "  # noqa: S608
        "OR problem IN (SELECT value FROM json_each(:problems))) ORDER BY saved_us DESC, speedup DESC",
        {"problems": None if problems is None else json.dumps(sorted(problems))},
    )


def saved_us(path: Path) -> float:
    """GEMM time in microseconds that all solutions together have saved so far, withdrawn ones included."""
    return sum(float(row["saved"]) for row in ask(path, "SELECT total(saved_us) AS saved FROM solutions"))


def trials(path: Path, *, problem: Problem | None = None, limit: int | None = None) -> list[dict[str, Any]]:
    """Trials, newest first; of one problem or of all."""
    sql = "SELECT * FROM trials WHERE (:problem IS NULL OR problem = :problem) ORDER BY started DESC LIMIT :limit"
    return ask(
        path, sql, {"problem": None if problem is None else str(problem), "limit": -1 if limit is None else limit}
    )


def compiled(path: Path, *, since_s: float = DAY_S) -> list[dict[str, Any]]:
    """GEMMs that torch.compile put inside kernels of its own, compiled in the last since_s seconds, by problem."""
    sql = "SELECT * FROM compiled WHERE last_seen >= ? ORDER BY problem, run, kernel"
    return ask(path, sql, (us(time.time() - since_s),))


def sessions(path: Path) -> list[dict[str, Any]]:
    """Hooked processes, the ones heard of last first. Beside the view's states: `gone`, which only this host knows."""
    found = ask(path, "SELECT * FROM sessions ORDER BY last_seen DESC")
    here = (socket.gethostname(), pid_namespace())
    for row in found:
        same = here[1] is not None and (row["host"], row.get("namespace")) == here
        if same and row["state"] != "ended" and not _is_there(row["pid"]):
            row["state"] = "gone"
    return found


def _is_there(pid: int) -> bool:
    """Whether a process with this pid runs here, or may run."""
    try:
        os.kill(pid, 0)  # 0 sends nothing, it only checks
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    try:  # the process may be hidden from us
        return not life_of(pid)[0]
    except (OSError, IndexError):
        return True


def count_runs(path: Path) -> int:
    """How many labels of workloads the database has."""
    return int(next(iter(ask(path, "SELECT count(*) AS n FROM run")), {"n": 0})["n"])


def generation(path: Path) -> int:
    """The newest publication in the store; 0 before the first."""
    return max((int(row["g"] or 0) for row in ask(path, "SELECT max(generation) AS g FROM publication")), default=0)


def free_bytes(path: Path) -> int:
    """Bytes of the file that are free; they are used again before the file grows."""
    sql = "SELECT freelist_count * page_size AS free FROM pragma_freelist_count, pragma_page_size"
    return sum(int(row["free"]) for row in ask(path, sql))


def publications(path: Path, *, limit: int = 50) -> list[dict[str, Any]]:
    """Generations, newest first: when each was made, how many verdicts came and went, and why."""
    return ask(path, "SELECT * FROM publication ORDER BY generation DESC LIMIT ?", (limit,))


def asked_again(path: Path) -> int:
    """How many problems have a solution in use that waits to be raced again because somebody asked."""
    found = ask(path, ASKED, {"device": None, "environment": None, "stamps": "[]"})
    return int(found[0]["n"]) if found else 0


def environments(path: Path) -> list[dict[str, Any]]:
    """Where problems were seen: environment, device, problems, calls, open_problems (no verdict), failed, last_seen.

    untunable: problems without a verdict that the daemon (its version, its CPUs) cannot tune; they are not among the
    open ones.
    stale: open problems that were not called for a week and that nobody asked for.
    put_off: open problems for which no times could be taken at the last attempt; put_off_reason: why, for one of them.
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
    """Problems that were ever called or wait to be tuned, each with its device; most expensive first."""
    return ask(path, _KNOWN.format(solved="", where="d.calls > 0 OR d.solution_id IS NULL"), _ANY_SHAPE)


def seen(path: Path, shape: tuple[int, int, int] | None = None) -> list[dict[str, Any]]:
    """As `called`, and problems with a solution: for one that serves several M the largest, called or not.

    shape: only problems of this M, N, K.
    """
    values = dict(zip(("m", "n", "k"), shape, strict=True)) if shape else _ANY_SHAPE
    return ask(path, _KNOWN.format(solved=_SOLVED, where="true"), values)


def spelled_like(path: Path, problem: Problem) -> list[Problem]:
    """Problems called, tuned or asked for that differ from this one only in threads, math mode or determinism.

    This problem itself is among them, if it was; problems that only an imported table names are not.
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


def hints(path: Path, problem: Problem) -> list[dict[str, Any]]:
    """The 20 imported rows for this problem in its plain case whose sizes are nearest, the nearest first."""
    p = plain_case(problem)
    sql = (
        "SELECT * FROM hints WHERE kind = 'tuned' AND problem IN (SELECT text FROM problem WHERE rest = :rest) "
        "ORDER BY 1.0 * max(m, :m) / min(m, :m), coalesce(us, 1e300), source, line LIMIT 20"
    )
    return ask(path, sql, {"rest": p.rest, "m": p.m})


def devices(path: Path) -> dict[str, Device]:
    """Every kind of device that was seen, by its key."""
    return {row["key"]: Device(**row) for row in ask(path, "SELECT key, kind, name, arch, units FROM device")}


def frame(path: Path, view: str) -> pd.DataFrame:
    """A promised view as a pandas DataFrame. Raises SettingError for a name that is none."""
    if view not in VIEWS:
        raise SettingError(f"{view!r} is not a view, expected one of {', '.join(VIEWS)}{did_you_mean(view, VIEWS)}")
    import pandas as pd

    conn = open_to_read(path)
    try:
        return pd.read_sql_query(f"SELECT * FROM {view}", conn)  # noqa: S608
    except (sqlite3.Error, UnicodeDecodeError, pd.errors.DatabaseError) as err:
        cause = err.__cause__ if isinstance(err, pd.errors.DatabaseError) else err
        if not isinstance(cause, sqlite3.Error | UnicodeDecodeError):
            raise
        raise error_of(cause, path) from err
    finally:
        conn.close()


def published(path: Path, device_keys: Collection[str] | None = None) -> tuple[int, list[Solution]]:
    """(generation, live solutions) of one moment; None: of all devices."""

    def look(conn: sqlite3.Connection) -> tuple[int, list[Solution]]:
        conn.execute("BEGIN")
        return live_solutions(conn, device_keys)

    none: list[Solution] = []
    return on(path, look, (0, none))
