"""What the look-up of one problem finds, step by step, and why each step that finds nothing does not."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs import engine_races
from gemmtuned.configs.human_units import duration
from gemmtuned.configs.padding import COVERS, padded_m
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import CROWDED, LIVE_STATES, Candidate, Device, Environment
from gemmtuned.configs.tunable import why_not
from gemmtuned.db.abilities import reason
from gemmtuned.db.ask import on
from gemmtuned.db.leases import STALE_US
from gemmtuned.db.row_ids import current_stamps, rows, us

_FILED: Final = """
SELECT s.*, h.key AS device
FROM solution s JOIN problem b ON b.id = s.problem_id JOIN device h ON h.id = s.device_id
WHERE b.rest = ? AND b.m = ? AND s.covers = ? AND h.key = ?
ORDER BY s.retired_generation IS NOT NULL, s.generation DESC
"""
_WHERE: Final = """
SELECT e.id, e.key AS environment, h.key AS device, h.kind, h.name, h.arch, h.units, u.tunable,
    u.calls, c.us, c.measured_us IS NULL AND c.sampled_us IS NULL AS by_size,
    u.covers, u.unit_m, u.asked_us, u.last_seen_us,
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
_OF_SOLUTION: Final = ("backend", "config", "state", "stamp", "us", "baseline_us", "generation", "beside")


def explain(path: Path, problem: Problem, *, environment: Environment | None = None) -> list[dict[str, Any]]:
    """What the look-up of this problem finds, step by step, and why each step that finds nothing does not.

    One row for each step (exact, fine, coarse) and solution filed there, in look-up order, for the given environment or
    for each in which the problem was seen.  Columns: environment, device, covers, m, backend, config, state, stamp,
    us, baseline_us, generation, beside, chosen (the one that runs), why.  A last row, covers `queue`, says what is
    being done about it.
    """

    def look(conn: sqlite3.Connection) -> list[dict[str, Any]]:
        seen = rows(conn, _WHERE, (problem.rest, problem.m))
        environments = [environment] if environment is not None else [_environment(conn, s) for s in seen]
        found: list[dict[str, Any]] = []
        for one in environments:
            steps = _steps(conn, problem, one)
            found += steps
            here = next((s for s in seen if s["environment"] == one.key), None)
            hit = any(step["chosen"] for step in steps)
            found.append(_row(one.key, one.device.key, "queue", problem.m, why=_queue(problem, here, hit=hit)))
        return found

    return on(path, look, [])


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
            if s["beside"]:
                text += f"; raced beside {engine_races.shown(s['beside'])}"
            known = {name: s[name] for name in _OF_SOLUTION}
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


def _queue(problem: Problem, here: dict[str, Any] | None, *, hit: bool) -> str:
    if here is None and why_not(problem):
        return reason(problem)
    if here is None:
        return "never seen in this environment: run a program that calls it with GEMMTUNED=1, or gemmtuned tune"
    seen = "1 call" if here["calls"] == 1 else f"{here['calls']:,} calls"
    each = f"{duration(here['us'])} each by torch's own kernel"
    # nobody has timed it: without a word the figure would look like one of a clock
    calls = (
        f"{seen} seen, about {each} (by its size alone, not timed yet)" if here["by_size"] else f"{seen} seen, {each}"
    )
    if hit:
        return calls
    unit = "" if here["covers"] == "exact" else f", to be tuned with its bucket up to M={here['unit_m']}"
    now = us(time.time())
    if why_not(problem) or not here["tunable"]:
        return f"{calls}: {reason(problem)}"
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
    empty = dict.fromkeys(_OF_SOLUTION)
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
