"""Fetching: results of other hosts are listed, and those of units that wait here are read, worth most first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.hint import Hint, plain_case
from gemmtuned.configs.solution import DEFAULT_BACKEND, Candidate
from gemmtuned.db.fleet import ForeignResult
from gemmtuned.fleet import record
from gemmtuned.fleet.layout import result_floor, result_parts
from gemmtuned.fleet.objects import get_many
from gemmtuned.fleet.record import Result
from gemmtuned.fleet.times import SLACK_S

if TYPE_CHECKING:
    from gemmtuned.fleet.sync import Here

FETCH: Final = 2000  # results that one exchange reads at most
BATCH: Final = 128  # results that are read and stored together: an exchange that ends early keeps whole batches
FULL_S: Final = 86_400.0  # how often all names are listed, and not only those since the last exchange
FORMAT: Final = "fleet"
SEEDS: Final = 4  # the fastest of the trials that came with a result


def listed(here: Here) -> dict[str, str]:
    """Names of results that this home has not listed before, each with its unit; from now on they count as listed.

    A visit and a dry run note nothing, and so get all names.
    """
    exchange, turn = here.exchange, here.turn
    after, full_s = ("", 0.0) if turn.is_visit else exchange.store.fleet_sync.position(here.environment)
    if not 0 <= turn.now_s - full_s < FULL_S or not turn.claims_hold:
        after, full_s = "", turn.now_s
    found = dict(record.listed(exchange.objects, here.name, after=after))
    if exchange.dry_run or turn.is_visit:
        return found
    position = result_floor(here.name, turn.clock_s - SLACK_S)
    new = exchange.store.fleet_sync.move(here.environment, position, found, full_s=full_s)
    return {path: found[path] for path in new}


def wanted(here: Here, new: Mapping[str, str]) -> list[str]:
    """Names of results that were not fetched yet, of units that wait to be tuned here, worth most first."""
    store = here.exchange.store
    if here.turn.is_visit or here.exchange.dry_run:
        found = store.fleet_sync.unknown([path for path, unit in new.items() if unit in here.open])
    else:
        found = store.fleet_sync.new(here.environment, here.open)
    rank = {unit: number for number, unit in enumerate(here.open)}
    return sorted(found, key=lambda path: (rank[_unit(path)], path))


def fetch(here: Here, new: Mapping[str, str]) -> set[str]:
    """Read the results that are wanted, and store them. Returns the units of those left for the next exchange."""
    turn, todo = here.turn, wanted(here, new)
    fetched = 0
    while fetched < min(len(todo), FETCH) and not turn.is_over:
        batch = todo[fetched : fetched + BATCH]
        _take(here, batch)
        fetched += len(batch)
    turn.done.left += len(todo) - fetched
    return {_unit(path) for path in todo[fetched:]}


def _take(here: Here, paths: Sequence[str]) -> None:
    exchange, done = here.exchange, here.turn.done
    found: list[ForeignResult] = []
    hints: list[Hint] = []
    missing: list[str] = []
    for path, data in get_many(exchange.objects, paths, limit=record.MAX_BYTES):
        if data is None:  # pruned meanwhile
            missing.append(path)
            continue
        one, result = _read(here, path, data)
        found.append(one)
        if result is not None:
            hints += hints_of(result)
        if one.reason:
            done.refused.append(f"{path}: {one.reason}" if path not in one.reason else one.reason)
    exchange.store.fleet_sync.take(here.environment, found, gone=missing, now_s=here.turn.now_s)
    for hint in hints:
        exchange.store.hints.add([hint], source=hint.source, now_s=here.turn.now_s)
    done.fetched += sum(not one.reason for one in found)


def _read(here: Here, path: str, data: bytes | TableError) -> tuple[ForeignResult, Result | None]:
    """(what the store keeps of an object, the result in it); where it cannot be used the first says why."""
    trust = here.exchange.trust
    try:
        if isinstance(data, TableError):
            raise data
        result = record.read(path, data, key=trust.key)
    except TableError as err:
        return ForeignResult(path, reason=str(err)), None
    if not trust.allows(result.host):
        return ForeignResult(path, result.host, reason=f"host {result.host} is not in GEMMTUNED_SYNC_HOSTS"), None
    reason = ""
    for one in result.solutions:
        if not here.environment.accepts(one.backend, one.stamp):
            reason = f"{one.backend} is of another version ({one.stamp}): a seed and no more"
    unit = here.open[result.unit]
    return ForeignResult(path, result.host, unit, result.solutions, seeds_of(result), reason), result


def seeds_of(result: Result) -> tuple[Candidate, ...]:
    """The fastest candidates that its host tried, torch's own left out.

    Where the result says that torch's own is best, the check here races these, to see whether that holds.
    """
    ran = (one for one in result.trials if one["us"] and one["outcome"] in ("ok", "slower"))
    named = (Candidate(one["backend"], one["config"]) for one in sorted(ran, key=lambda one: float(one["us"])))
    return tuple(dict.fromkeys(one for one in named if one.backend != DEFAULT_BACKEND))[:SEEDS]


def hints_of(result: Result) -> Iterable[Hint]:
    """The result's solutions as hints, which seed searches at sizes nearby."""
    for line, one in enumerate(result.solutions, 1):
        yield Hint(
            format=FORMAT, family=one.problem.family, kind="tuned", line=line,
            source=f"fleet: {result.host} {result.unit}", row=_text(result, line - 1), problem=plain_case(one.problem),
            candidate=one.candidate, arch=result.environment.device.arch, units=result.environment.device.units,
            us=one.us,
        )  # fmt: skip


def _text(result: Result, number: int) -> str:
    return record.canonical({"device": result.environment.device.key, **result.solutions[number].to_row()}).decode()


def _unit(path: str) -> str:
    parts = result_parts(path)
    assert parts is not None, path
    return parts[1]
