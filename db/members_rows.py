"""What members' rows stand for, and whether it can be true: nothing of a file that others write is simply believed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, Final, TypeVar

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import OUTCOMES, Session
from gemmtuned.configs.solution import Device, Environment
from gemmtuned.db.members_file import MembersFile
from gemmtuned.db.row_ids import plain, problem_of

T = TypeVar("T")
LARGEST: Final = 1 << 20  # M, N, K
LARGEST_BYTES: Final = 64e9
MOST_CALLS: Final = 1 << 40  # per row, which is an hour
MOST_US: Final = 1e15
HOUR_US: Final = 3_600_000_000
SOON_US: Final = 1_000_000  # a beat later than this is none


@dataclass(frozen=True)
class Named:
    """What a row's numbers stand for in the members' file."""

    problem: Problem
    environment: Environment
    run: str


class Names:
    """Looked up once for each look at the file."""

    def __init__(self, file: MembersFile) -> None:
        self._file = file
        self._problems: dict[int, Problem | None] = {}
        self._environments: dict[int, Environment | None] = {}
        self._runs: dict[int, str] = {}

    def of(self, row: tuple[Any, ...]) -> Named | None:
        """None for what is not valid."""
        problem = cached(self._problems, row[0], self._problem)
        environment = cached(self._environments, row[1], self._environment)
        if problem is None or environment is None:
            return None
        return Named(problem, environment, cached(self._runs, row[2], self._file.run))

    def _problem(self, number: int) -> Problem | None:
        row = self._file.problem(number)
        return None if row is None else valid(row)

    def _environment(self, number: int) -> Environment | None:
        found = self._file.environment(number)
        if found is None:
            return None
        device, stamps = found
        names = {name: plain(device[name], 200) for name in ("key", "kind", "name", "arch")}
        if not 0 <= device["units"] <= LARGEST:
            return None
        stamps = {plain(backend, 200): plain(stamp, 1000) for backend, stamp in stamps.items()}
        environment = Environment(Device(**names, units=device["units"]), stamps)
        return environment if len(environment.key) <= 8192 else None


def is_valid(row: tuple[Any, ...], now_us: int) -> bool:
    """Whether the figures of a sighting can be true."""
    hour, outcome, graph, calls, sampled_calls, sampled_us = row[3:9]
    return (
        0 <= hour <= now_us // HOUR_US + 1
        and outcome in OUTCOMES
        and graph in (0, 1)
        and 0 <= sampled_calls <= calls <= MOST_CALLS
        and isfinite(sampled_us)
        and 0 <= sampled_us <= MOST_US
    )


def valid(row: dict[str, Any]) -> Problem | None:
    """The problem in a row; None for what is none, or larger than any model's."""
    try:
        problem = problem_of(row)
    except (GemmtunedError, TypeError, ValueError):
        return None
    small = max(problem.m, problem.n, problem.k) <= LARGEST and problem.bytes <= LARGEST_BYTES
    return problem if small else None


def session_of(row: dict[str, Any], now_us: int) -> Session | None:
    """The session in a row; None where a value is none that a program would write."""
    known = {f.name: row[f.name] for f in fields(Session) if row.get(f.name) is not None}
    for name, value in known.items():
        if not isinstance(
            value, str if name in ("host", "run", "path", "note", "namespace", "role", "operators") else int
        ):
            return None
        if isinstance(value, int) and not 0 <= value < 1 << 53:
            return None
        if isinstance(value, str):
            known[name] = plain(value, {"note": 4096, "role": 60, "operators": 8192}.get(name, 200))
    if known["started_us"] > now_us + SOON_US:
        return None
    known["active_us"] = min(known.get("active_us", 0), now_us)
    return Session(**known)


def cached(known: dict[Any, T], key: Any, find: Callable[[Any], T]) -> T:
    """What was found for this key, asked for once."""
    if key not in known:
        known[key] = find(key)
    return known[key]
