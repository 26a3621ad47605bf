"""What all hosts of a fleet tell, as reports: coverage, what waits, what was gained, and whose card is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gemmtuned.configs.human_units import duration
from gemmtuned.configs.solution import DEFAULT_BACKEND, Candidate
from gemmtuned.fleet import views
from gemmtuned.fleet.objects import Objects
from gemmtuned.fleet.seen import Seen
from gemmtuned.reports.coverage import share
from gemmtuned.reports.render import TIMES, Column, Report, Table, age, count, factor, more, percent, several

_WINDOW: Final = "a recent day (each day before counts half as much as the next)"
_EMPTY: Final = "No host tells anything there yet: gemmtuned sync URL, or a daemon with GEMMTUNED_SYNC, writes it."
_OLD_S: Final = 3600.0  # a daemon tells its counts every ten minutes


def coverage(seen: Sequence[Seen], *, by: str, weight: str, limit: int | None, now_s: float) -> Report:
    """by: host, device, family or problem. weight: time or calls. limit: rows to show, None or 0: all."""
    rows = views.coverage(seen, by)
    for row in rows:
        row["covered_share"] = share(row[f"covered_{_AMOUNT[weight]}"], row[_AMOUNT[weight]])
        row["hit_share"] = share(row["hits"], row["calls"])
    total = {name: sum(row[name] for row in rows) for name in ("calls", "hits", "time_us", "covered_time_us")}
    total["covered_calls"] = sum(row["covered_calls"] for row in rows)
    amount = _AMOUNT[weight]
    facts: dict[str, Any] = {
        "by": by, "weight": weight, "hosts": len({one.host for one in seen}),
        "total": {
            **total, "covered_share": share(total[f"covered_{amount}"], total[amount]),
            "hit_share": share(total["hits"], total["calls"]),
        },
    }  # fmt: skip
    columns = (
        Column(by, by, right=False),
        *(() if by == "device" else (Column("device", "device", right=False),)),
        *(() if by == "host" else (Column("hosts", "hosts", count),)),
        *(() if by == "problem" else (Column("problems", "problems", count), Column("tuned_problems", "tuned", count))),
        Column("calls", "calls", count),
        Column("time_us", "GEMM time a day", duration),
        Column("covered_share", "covered now", percent),
        Column("hit_share", "hits at the call", percent),
        *((Column("updated_us", "reported", lambda us: age(now_s - us / 1e6)),) if by == "host" else ()),
    )
    lines = []
    if rows:
        covered, hit = facts["total"]["covered_share"] or 0.0, facts["total"]["hit_share"] or 0.0
        of = f"GEMM time of {_WINDOW}" if weight == "time" else "calls ever counted"
        lines = [
            f"{several(facts['hosts'], 'host')}: {percent(covered)} of the {of} has a verdict where it was called",
            f"observed: {percent(hit)} of {several(total['calls'], 'call')} hit a solution at the time",
        ]
    shown = rows[:limit] if limit else rows
    notes = [*more(shown, rows), *_silent(seen, now_s)]
    return Report("coverage", [Table("rows", columns, shown, empty=_EMPTY)], facts, lines=lines, notes=notes)


_AMOUNT: Final = {"time": "time_us", "calls": "calls"}


def untuned(seen: Sequence[Seen], objects: Objects, *, limit: int, now_s: float, key: bytes | None = None) -> Report:
    """What hosts wait for, worth most to all of them first. limit: rows to show, 0: all; key: of the fleet."""
    held = views.held(objects, seen, clock_s=now_s, key=key)
    rows = views.untuned(seen, held)
    shown = rows[:limit] if limit else rows
    columns = (
        Column("problem", "problem", right=False),
        Column("device", "device", right=False),
        Column("hosts", "hosts", count),
        Column("calls", "calls", count),
        Column("worth_us", "may save a day", duration),
        Column("state", "state", right=False),
        Column("last_seen_us", "seen", lambda us: age(now_s - us / 1e6)),
    )
    states = {state: sum(row["state"] == state for row in rows) for state in ("queued", "claimed")}
    empty = "Every problem that hosts tell of has a verdict there." if seen else _EMPTY
    notes = more(shown, rows)
    if states["claimed"]:
        notes.append(f"{several(states['claimed'], 'problem')} claimed: some host tunes it, and sends what it finds")
    facts = {"total": len(rows), "states": states, "hosts": len({one.host for one in seen})}
    return Report("untuned", [Table("rows", columns, shown, empty=empty)], facts, notes=[*notes, *_silent(seen, now_s)])


def gains(seen: Sequence[Seen], *, every: bool, limit: int, now_s: float) -> Report:
    """Kernels in use with who found them and how hosts differ, then the hosts, the slowest card first."""
    rows = views.solutions(seen)
    chosen = rows if every else [row for row in rows if row["backend"] != DEFAULT_BACKEND]
    for row in rows:
        row["route"] = str(Candidate(row["backend"], row["config"]))
    shown = chosen[:limit] if limit else chosen
    hosts = views.hosts(seen)
    slow = [row for row in hosts if (row["slower"] or 0.0) >= views.SLOW]
    tables = [
        Table("rows", _SOLUTIONS, shown, empty="No host tells of a solution yet."),
        Table("hosts", _hosts_columns(now_s), hosts, title="hosts, the slowest card first", empty=_EMPTY),
    ]
    facts = {"total": len(chosen), "faster": sum(row["backend"] != DEFAULT_BACKEND for row in rows), "slow": len(slow)}
    notes = [*more(shown, chosen), *map(_slow_note, slow)]
    if hosts and not any(row["compared"] for row in hosts):
        notes.append(f"cards are compared where {views.MIN_HOSTS} hosts have a figure for the same kernel and problem")
    return Report("gains", tables, facts, notes=notes)


_SOLUTIONS: Final = (
    Column("problem", "problem", right=False),
    Column("mode", "mode", right=False),
    Column("route", "runs", right=False),
    Column("hosts", "hosts", count),
    *TIMES,
    Column("spread", "hosts differ", factor),
    Column("found_by", "found by", right=False),
)


def _hosts_columns(now_s: float) -> tuple[Column, ...]:
    return (
        Column("host", "host", right=False),
        Column("device", "device", right=False),
        Column("verdicts", "verdicts", count),
        Column("found", "found here", count),
        Column("taken", "of others", count),
        Column("compared", "compared", count),
        Column("slower", "times of others'", factor),
        Column("updated_us", "reported", lambda us: age(now_s - us / 1e6)),
    )


def _slow_note(row: Mapping[str, Any]) -> str:
    return (
        f"{row['host']}: its {row['device']} takes {factor(row['slower'])} the time of others of its environment "
        f"({several(row['compared'], 'figure')}; most for {row['worst_problem']}, {factor(row['worst'])}): look at its "
        "clocks, cooling and neighbours"
    )


def _silent(seen: Sequence[Seen], now_s: float) -> list[str]:
    """Hosts that have reported nothing for a while."""
    newest: dict[str, int] = {}
    for one in seen:
        newest[one.host] = max(newest.get(one.host, 0), one.updated_us)
    old = sorted(host for host, us in newest.items() if now_s - us / 1e6 > _OLD_S)
    if not old:
        return []
    others = f" and {len(old) - 5} more" if len(old) > 5 else ""
    return [f"{several(len(old), 'host')} reported nothing for an hour or more: {', '.join(old[:5])}{others}"]
