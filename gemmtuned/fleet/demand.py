"""What the hosts of a fleet wait for, worth most first: the counts that each of them tells, as units of tuning.

A host asks for a result by its unit, so the units here are formed as each host's own database forms them
(db/leases.py): of one host's counts, and only then put together with those of the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Environment
from gemmtuned.db.fleet import Unit
from gemmtuned.db.leases import STALE_US
from gemmtuned.db.store import Store
from gemmtuned.fleet.layout import unit_name
from gemmtuned.fleet.seen import MAX_COUNTS, Seen

EXACT: Final = 3  # up to this many exact sizes of a bucket are tuned each for itself; more are one unit


@dataclass(frozen=True)
class Wanted:
    """A unit that at least one host waits for.

    environment: as the host that wrote last describes it.  sizes: the exact sizes that were called, with their calls.
    worth: microseconds a day that all hosts together would save, expected.
    """

    environment: Environment
    unit: Unit
    sizes: Mapping[Problem, int]
    worth: float
    hosts: frozenset[str]

    @property
    def name(self) -> str:
        """What its claims and results are called, in the folder of its environment."""
        return unit_name(self.unit.problem, self.unit.covers)

    @property
    def key(self) -> tuple[str, str]:
        """(environment, unit): two environments may wait for the same unit."""
        return self.environment.key, self.name


@dataclass
class _Sum:
    environment: Environment
    updated_us: int = 0
    worth: float = 0.0
    sizes: dict[Problem, int] = field(default_factory=lambda: defaultdict(int))
    hosts: set[str] = field(default_factory=set)


def wanted(reports: Iterable[Seen], *, now_s: float) -> list[Wanted]:
    """The units without a verdict on the hosts that tell this, worth most first. now_s: as UTC seconds."""
    sums: dict[tuple[str, Problem, str], _Sum] = {}
    for one in reports:
        for problem, covers, sizes, worth in _units(one, stale_us=round(now_s * 1e6) - STALE_US):
            total = sums.setdefault((one.environment.key, problem, covers), _Sum(one.environment))
            if one.updated_us > total.updated_us:
                total.environment, total.updated_us = one.environment, one.updated_us
            total.worth += worth
            total.hosts.add(one.host)
            for size, calls in sizes.items():
                total.sizes[size] += calls
    found = [
        Wanted(s.environment, Unit(problem, covers, s.worth), dict(s.sizes), s.worth, frozenset(s.hosts))
        for (_, problem, covers), s in sums.items()
    ]
    return sorted(found, key=lambda one: (-one.worth, -sum(one.sizes.values()), one.name))


def of_store(store: Store, host: str, *, now_s: float) -> list[Seen]:
    """What this host would tell now."""
    updated_us = round(now_s * 1e6)
    return [
        Seen(host, updated_us, environment, store.fleet_sync.counts(environment, now_s=now_s, limit=MAX_COUNTS), [])
        for environment in store.hints.known_environments()
    ]


def _units(one: Seen, *, stale_us: int) -> Iterable[tuple[Problem, str, dict[Problem, int], float]]:
    """(filed under, covers, sizes, worth) of what this host waits for."""
    buckets: dict[Problem, list[tuple[Problem, Mapping[str, float]]]] = defaultdict(list)
    for row in one.counts:
        problem = Problem.parse(row["problem"])
        buckets[problem.filed("fine")].append((problem, row))
    for bucket, members in buckets.items():
        waits = [(p, row) for p, row in members if not row["covered"] and row["last_seen_us"] >= stale_us]
        if len(members) > EXACT and waits:
            sizes = {p: int(row["calls"]) for p, row in members}
            yield bucket, "fine", sizes, sum(row["worth"] or 0.0 for _, row in waits)
        elif waits:
            yield from ((p, "exact", {p: int(row["calls"])}, row["worth"] or 0.0) for p, row in waits)
