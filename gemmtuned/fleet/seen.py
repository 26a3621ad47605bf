"""What a host tells of itself: what its programs called and what its verdicts gain, one whole file, its own writer.

People read it (views.py, for coverage --fleet), and those who tune for many (fleet tune).  Counts only ever grow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from gemmtuned import __version__
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Environment
from gemmtuned.fleet.host import Trust
from gemmtuned.fleet.layout import HOSTS, host_of, seen_path
from gemmtuned.fleet.objects import Objects, get_many
from gemmtuned.fleet.record import check_environment, check_number, check_text, described, has, naming, seal, unseal

if TYPE_CHECKING:
    from gemmtuned.db.store import Store

SCHEMA: Final = 1
MAX_BYTES: Final = 16 << 20
MAX_COUNTS: Final = 20_000  # problems of one environment, most expensive first
_FILE: Final = {"schema", "host", "gemmtuned", "updated_us", "environments"}
_ENVIRONMENT: Final = {"environment", "counts", "figures"}
_COUNT: Final = {"problem", "calls", "us", "hits", "covered", "worth", "last_seen_us"}
_FIGURE: Final = {"problem", "mode", "covers", "backend", "config", "us", "baseline_us", "state", "found_by"}
_OF_SOLUTION: Final = _FIGURE - {"problem", "found_by"}


@dataclass(frozen=True, slots=True)
class Seen:
    """One environment of one host.

    counts: of each problem its calls, microseconds a call, hits, which share of its calls is covered (true or false of
    older versions), worth (microseconds a day) and when it was called last.  figures: of each verdict in use there what
    it takes, what torch took, and found_by: the host whose result was checked there, "" where it was searched there.
    """

    host: str
    updated_us: int
    environment: Environment
    counts: list[dict[str, Any]]
    figures: list[dict[str, Any]]


def put(store: Store, objects: Objects, host: str, trust: Trust, *, now_s: float) -> None:
    """Write our own file. Counts of problems that are still known here never fall below what was there."""
    before = {}
    for one in _earlier(objects, host, trust):
        before.update({(one.environment.key, row["problem"]): row["calls"] for row in one.counts})
    environments = []
    for environment in store.hints.known_environments():
        counts = store.fleet_sync.counts(environment, now_s=now_s, limit=MAX_COUNTS)
        for row in counts:
            row["calls"] = max(row["calls"], before.get((environment.key, row["problem"]), 0))
        figures = _figures(store, environment, [row["problem"] for row in counts])
        if counts or figures:
            environments.append({"environment": described(environment), "counts": counts, "figures": figures})
    record = {
        "schema": SCHEMA, "host": host, "gemmtuned": __version__, "updated_us": round(now_s * 1e6),
        "environments": environments,
    }  # fmt: skip
    objects.put(seen_path(host), _sealed(record, trust))


def _sealed(record: dict[str, Any], trust: Trust) -> bytes:
    """The file, with as many problems of each environment as others read, most expensive first."""
    most = MAX_COUNTS
    while len(data := seal(record, trust.key)) > MAX_BYTES and most:
        most //= 2
        for one in record["environments"]:
            one["counts"], one["figures"] = one["counts"][:most], one["figures"][:most]
    return data


def read_all(objects: Objects, trust: Trust) -> tuple[list[Seen], list[str]]:
    """(what all hosts tell, why some are left out)."""
    found: list[Seen] = []
    refused: list[str] = []
    hosts = {entry.path: host for entry in objects.list(HOSTS) if (host := host_of(entry.path)) is not None}
    refused += [
        f"{path}: the host is not in GEMMTUNED_SYNC_HOSTS" for path, host in hosts.items() if not trust.allows(host)
    ]
    allowed = [path for path, host in hosts.items() if trust.allows(host)]
    for path, data in get_many(objects, allowed, limit=MAX_BYTES):
        if isinstance(data, TableError):
            refused.append(str(data))
        elif data is not None:
            _add(found, refused, path, data, hosts[path], trust)
    return found, refused


def _add(found: list[Seen], refused: list[str], path: str, data: bytes, host: str, trust: Trust) -> None:
    try:
        found += read(path, data, host, trust)
    except TableError as err:
        refused.append(str(err))


def read(path: str, data: bytes, host: str, trust: Trust) -> list[Seen]:
    """What this file says. Raises TableError that names it and what is wrong."""
    with naming(path, "a host's file"):
        record = unseal(json.loads(data), trust.key)
        has(record, _FILE, "the record")
        if record["schema"] != SCHEMA or record["host"] != host:
            raise TableError(f"it is of schema {str(record['schema'])[:20]}, by host {str(record['host'])[:80]!r}")
        updated_us = int(check_number(record["updated_us"], "updated_us") or 0)
        return [_one(row, host, updated_us) for row in record["environments"]]


def _one(row: Any, host: str, updated_us: int) -> Seen:
    has(row, _ENVIRONMENT, "an environment")
    for one in row["counts"]:
        has(one, _COUNT, "a count")
        Problem.parse(check_text(one["problem"], "problem", 512))
        for name in _COUNT - {"problem"}:
            check_number(int(one[name]) if isinstance(one[name], bool) else one[name], name)
    for one in row["figures"]:
        has(one, _FIGURE, "a figure")
        Problem.parse(check_text(one["problem"], "problem", 512))
        for name in ("mode", "covers", "backend", "config", "state", "found_by"):
            check_text(one[name], name, 4096)
        for name in ("us", "baseline_us"):
            if not check_number(one[name], name):
                raise TableError(f"{name} is {str(one[name])[:40]!r}, expected a time")
    return Seen(host, updated_us, check_environment(row["environment"]), row["counts"], row["figures"])


def _earlier(objects: Objects, host: str, trust: Trust) -> list[Seen]:
    try:
        data = objects.get(seen_path(host), limit=MAX_BYTES)
        return [] if data is None else read(seen_path(host), data, host, trust)
    except TableError:  # it is written anew
        return []


def _figures(store: Store, environment: Environment, counted: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of figures, at most MAX_COUNTS: those of counted problems first, in their order."""
    rank = {problem: number for number, problem in enumerate(counted)}
    rows = _figure_rows(store, environment)
    return sorted(rows, key=lambda row: rank.get(row["problem"], len(rank)))[:MAX_COUNTS]


def _figure_rows(store: Store, environment: Environment) -> Iterator[dict[str, Any]]:
    hosts = store.fleet_sync.found_by(environment)
    for one in store.solutions.published([environment.device.key])[1]:
        if environment.accepts(one.backend, one.stamp):
            found_by = hosts.get((str(one.problem), one.covers), "")
            yield {
                "problem": str(one.problem), "found_by": found_by, **{name: getattr(one, name) for name in _OF_SOLUTION}
            }  # fmt: skip
