"""What all hosts of a fleet tell (seen.py), as rows for people: by host or problem, who waits, whose figures differ.

Times are of a recent day: calls of the days before count half as much for each day, as the queue of a daemon counts
them.  A host's figures are compared where at least MIN_HOSTS have one for the same problem, mode and kernel on devices
of one environment: the median of its ratios to the hosts' median, of torch's time and of the kernel's, is how much
slower its card is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Final

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import DEFAULT_BACKEND
from gemmtuned.fleet import claims
from gemmtuned.fleet.layout import environment_name, unit_name
from gemmtuned.fleet.objects import Objects
from gemmtuned.fleet.seen import Seen

SAVED: Final = 0.3  # share of a call's time that worth expects to be saved (db/fleet_sync.py)
MIN_HOSTS: Final = 3  # with two nobody knows which is the slow one
SLOW: Final = 1.1  # a card that is slower by so much is named
Row = dict[str, Any]


def coverage(reports: Iterable[Seen], by: str) -> list[Row]:
    """Sums over the counts by host, device, family or problem; most time first.

    tuned_problems: those with a verdict for all calls on every host that makes them.
    """
    sums: dict[tuple[str, str], Row] = {}
    hosts: dict[tuple[str, str], set[str]] = defaultdict(set)
    called: dict[tuple[str, str], set[tuple[str, str]]] = defaultdict(set)
    waits: dict[tuple[str, str], set[tuple[str, str]]] = defaultdict(set)
    for one in reports:
        device, folder = one.environment.device.key, environment_name(one.environment)
        for count in one.counts:
            name = {"host": one.host, "device": device, "problem": count["problem"]}.get(by)
            key = name or Problem.parse(count["problem"]).family, "" if by == "device" else device
            row = sums.setdefault(key, {by: key[0], "device": device, **dict.fromkeys(_SUMMED, 0), "updated_us": 0})
            time_us, covered = (count["worth"] or 0.0) / SAVED, float(count["covered"])
            _add(row, calls=count["calls"], hits=count["hits"], time_us=time_us)
            _add(row, covered_calls=covered * count["calls"], covered_time_us=covered * time_us)
            row["updated_us"] = max(row["updated_us"], one.updated_us)
            hosts[key].add(one.host)
            called[key].add((folder, count["problem"]))
            if covered < 1:
                waits[key].add((folder, count["problem"]))
    for key, row in sums.items():
        row.update(hosts=len(hosts[key]), problems=len(called[key]), tuned_problems=len(called[key] - waits[key]))
    return sorted(sums.values(), key=lambda row: (-row["time_us"], row[by], row["device"]))


_SUMMED: Final = ("problems", "tuned_problems", "calls", "hits", "time_us", "covered_calls", "covered_time_us")


def untuned(reports: Iterable[Seen], held: Collection[tuple[str, str]]) -> list[Row]:
    """Problems that hosts wait for, worth most first. held: (environment, unit) that somebody has claimed."""
    sums: dict[tuple[str, str], Row] = {}
    for one in reports:
        folder = environment_name(one.environment)
        for count in one.counts:
            if count["covered"]:
                continue
            key = folder, count["problem"]
            row = sums.setdefault(
                key,
                {"problem": count["problem"], "device": one.environment.device.key, "environment": folder, "hosts": 0,
                 "calls": 0, "worth_us": 0.0, "last_seen_us": 0, "state": "queued"},
            )  # fmt: skip
            _add(row, hosts=1, calls=count["calls"], worth_us=count["worth"] or 0.0)
            row["last_seen_us"] = max(row["last_seen_us"], count["last_seen_us"])
            if any((folder, unit) in held for unit in _units(count["problem"])):
                row["state"] = "claimed"
    return sorted(sums.values(), key=lambda row: (-row["worth_us"], -row["calls"], row["problem"], row["device"]))


def held(
    objects: Objects, reports: Iterable[Seen], *, clock_s: float, key: bytes | None = None
) -> set[tuple[str, str]]:
    """(environment, unit) of the claims that hold. clock_s: by the clock of the store."""
    if not objects.can_claim:
        return set()
    folders = {environment_name(one.environment) for one in reports}
    return {
        (folder, unit)
        for folder in folders
        for unit, claim in claims.read(objects, folder, clock_s=clock_s, key=key).items()
        if claim.left_s > 0
    }


def solutions(reports: Iterable[Seen]) -> list[Row]:
    """Each kernel in use by problem, mode and environment: hosts, their median times, the spread, who found it."""
    rows = []
    for (folder, problem, mode, covers, backend, config), found in _alike(reports).items():
        times = [figure["us"] for _, figure in found]
        finders = sorted({figure["found_by"] or host for host, figure in found})
        us, baseline_us = median(times), median(figure["baseline_us"] for _, figure in found)
        rows.append({
            "problem": problem, "environment": folder, "mode": mode, "covers": covers, "backend": backend,
            "config": config, "hosts": len(found), "us": us, "baseline_us": baseline_us, "speedup": baseline_us / us,
            "least_us": min(times), "most_us": max(times), "spread": max(times) / min(times),
            "slowest": max(found, key=lambda one: float(one[1]["us"]))[0], "found_by": ", ".join(finders),
        })  # fmt: skip
    return sorted(rows, key=lambda row: (row["backend"] == DEFAULT_BACKEND, -row["speedup"], row["problem"]))


def hosts(reports: Sequence[Seen]) -> list[Row]:
    """Each host and environment: what it found and took over, and how its card compares."""
    compared: dict[tuple[str, str], list[tuple[float, str]]] = defaultdict(list)
    for (folder, problem, *_), found in _alike(reports).items():
        if len(found) < MIN_HOSTS:
            continue
        for name in ("us", "baseline_us"):
            middle = median(figure[name] for _, figure in found)
            for host, figure in found:
                compared[host, folder].append((figure[name] / middle, problem))
    rows = []
    for one in reports:
        folder = environment_name(one.environment)
        ratios = compared[one.host, folder]
        rows.append({
            "host": one.host, "device": one.environment.device.key, "environment": folder,
            "updated_us": one.updated_us, "verdicts": len(one.figures),
            "found": sum(not figure["found_by"] for figure in one.figures),
            "taken": sum(bool(figure["found_by"]) for figure in one.figures),
            "compared": len(ratios) // 2, "slower": median(ratio for ratio, _ in ratios) if ratios else None,
            "worst": max(ratios)[0] if ratios else None, "worst_problem": max(ratios)[1] if ratios else None,
        })  # fmt: skip
    return sorted(rows, key=lambda row: (-(row["slower"] or 0.0), row["host"], row["device"]))


def _alike(reports: Iterable[Seen]) -> dict[tuple[str, ...], list[tuple[str, Row]]]:
    """(host, figure) of figures that say the same: environment, problem, mode, covers and kernel."""
    found: dict[tuple[str, ...], list[tuple[str, Row]]] = defaultdict(list)
    for one in reports:
        for row in one.figures:
            names = (row["problem"], row["mode"], row["covers"], row["backend"], row["config"])
            found[(environment_name(one.environment), *names)].append((one.host, row))
    return found


def _units(text: str) -> tuple[str, str]:
    """Names of the units that a problem may be tuned with: its own, and its bucket's."""
    problem = Problem.parse(text)
    bucket = problem.filed("fine")
    return unit_name(problem, "exact"), unit_name(bucket, "fine")


def _add(row: Row, **more: float) -> None:
    for name, value in more.items():
        row[name] += value


def counts_rows(reports: Iterable[Seen]) -> list[Row]:
    """Every count with host and environment, for people's own tools."""
    return [{**_of(one), **_problem(row), **row} for one in reports for row in one.counts]


def figures_rows(reports: Iterable[Seen]) -> list[Row]:
    """Every figure with host and environment, for people's own tools."""
    return [{**_of(one), **_problem(row), **row} for one in reports for row in one.figures]


def _of(one: Seen) -> Row:
    return {
        "host": one.host, "updated_us": one.updated_us, "device": one.environment.device.key,
        "environment": environment_name(one.environment),
    }  # fmt: skip


def _problem(row: Mapping[str, Any]) -> Row:
    return Problem.parse(row["problem"]).row()
