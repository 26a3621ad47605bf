"""What goes on now: daemon, generations, hooked programs, what waits to be tuned and where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.human_units import duration, moment
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.device.advice import advice
from gemmtuned.daemon.service.rules import paused_until
from gemmtuned.db import migrations
from gemmtuned.db.ask import version_of
from gemmtuned.db.queries import DAY_S
from gemmtuned.reports import left_out
from gemmtuned.reports.checks import Check
from gemmtuned.reports.coverage import frozen_notes
from gemmtuned.reports.environments import abridged
from gemmtuned.reports.on_probation import without_notes
from gemmtuned.reports.render import Column, Report, Row, Table, age, count, percent, several
from gemmtuned.reports.silent_daemon import silence
from gemmtuned.reports.source import disk_full
from gemmtuned.reports.unraced import unfit_notes, unraced_notes
from gemmtuned.reports.unseen import dropped_calls, dropped_notes, engine_paths, unseen_notes
from gemmtuned.reports.why_nothing import why_off


def report(
    settings: Settings,
    *,
    notice: Mapping[str, Any] | None,
    published: int | None,
    generation: int,
    sessions: Sequence[Row],
    covered_time: tuple[float, float],
    environments: Sequence[Row],
    saved_us: float,
    frozen: Sequence[Row] = (),
    unraced: Sequence[Row] = (),
    unfit: Sequence[Row] = (),
    asked_again: int = 0,
    differs: Check | None = None,
    salvages: Sequence[Check] = (),
    now_s: float,
) -> Report:
    """notice: the daemon's. published, generation: of the tables, and of the store. Rows: as db.queries gives them.

    saved_us: GEMM time that all solutions together have saved.  frozen, unraced, unfit: of the views of these names.
    differs: what is to be said of the database beside the published tables.  salvages: of those that did not end.
    asked_again: how many solutions wait to be raced again because somebody asked.
    """
    running = [row for row in sessions if row["state"] != "ended"]
    share = covered_time[0] / covered_time[1] if covered_time[1] else None
    saved = f"saved so far: {duration(saved_us)} of GEMM time (gemmtuned gains)"
    lines = [*_switched_off(settings, now_s), _daemon_line(notice, now_s), _published_line(published, differs)]
    lines += [_covered_line(share), saved, f"home: {settings.home}"]
    daemon: Mapping[str, Any] = notice if notice and notice["running"] else _NO_DAEMON
    elsewhere = daemon["elsewhere"]
    seen = (row["environment"] for row in (*environments, *elsewhere))
    short = abridged(filter(None, (daemon["environment"], *seen)))
    tables = _tables(daemon["seats"], running, _seen_in(environments, short), now_s)
    since_us = (now_s - DAY_S) * 1e6
    dropped, engines = dropped_calls(sessions, since_us=since_us), engine_paths(sessions, since_us=since_us)
    apart = {"frozen": frozen, "unraced": unraced, "unfit": unfit}
    facts: dict[str, Any] = {
        "home": str(settings.home),
        "database": str(settings.db),
        "generation": generation,
        "published_generation": published,
        "published_differs": differs.found if differs else None,
        "daemon": dict(notice) if notice else None,
        "covered_share": share,
        "saved_us": saved_us,
        **{f"{name}_problems": len({row["problem"] for row in rows}) for name, rows in apart.items()},
        "asked_again": asked_again,
        "untunable_problems": sum(row.get("untunable", 0) for row in environments),
        "switched_off": settings.switched_off,
        "engine_paths": [paths.facts for paths in engines],
        "dropped_calls": dropped,
    }
    notes = [f"{check.found}. To mend it: {check.fix}" for check in salvages] + _notes(running, elsewhere, short)
    notes += [*dropped_notes(dropped), *_put_off_notes(environments, short), *left_out.notes(daemon["seats"])]
    notes += [*frozen_notes(frozen), *without_notes(settings.home), *map(str, engines), *unraced_notes(unraced)]
    notes += unfit_notes(unfit)
    notes += unseen_notes(sessions, since_us=since_us) if share is None else ()
    queue = _of_queue(facts["untunable_problems"], asked_again)
    return Report("status", tables, facts=facts, lines=lines, notes=[*notes, *queue])


def _tables(seats: Sequence[Row], running: Sequence[Row], seen: Sequence[Row], now_s: float) -> list[Table]:
    return [
        Table("devices", _SEATS, _with_advice(seats), title="Devices:"),
        Table("sessions", _session_columns(now_s), running, title="Programs:", empty="No hooked program is running."),
        Table("environments", _ENVIRONMENTS, seen, title=_SEEN),
    ]


_NO_DAEMON: Final[Mapping[str, Any]] = {"seats": [], "elsewhere": [], "environment": ""}
_SEEN: Final = "Where problems were seen (gemmtuned untuned lists what waits):"


def _with_advice(seats: Sequence[Row]) -> list[Row]:
    return [{**seat, "advice": advice(seat["reason"])} for seat in seats]


def _seen_in(environments: Sequence[Row], short: Mapping[str, str]) -> list[Row]:
    return [
        {**row, "waiting": row["open_problems"] - row["failed"] - row["stale"], "place": short[row["environment"]]}
        for row in environments
    ]


def _covered_line(share: float | None) -> str:
    if share is None:
        return "No GEMM was recorded in the last 24 h."
    return f"covered now: {percent(share)} of the GEMM time of the last 24 h (gemmtuned coverage)"


def _switched_off(settings: Settings, now_s: float) -> list[str]:
    """Lines that come first: a full disk, another version's database, a pause, programs that run stock torch."""
    lines = list(why_off(settings))
    paused = paused_until(settings.home, now_s)
    if paused is not None:
        until = "" if paused == 0 else f" until {moment(paused, now_s)}"
        lines.insert(0, f"PAUSED{until}: nothing is tuned. Go on with: gemmtuned resume")
    with suppress(StoreError, OSError):  # whoever reads more of it says why
        version = version_of(settings.db) if settings.db.exists() else 0
        if version > migrations.SCHEMA:
            lines.insert(0, f"NEWER: {migrations.too_new(settings.db, version)}")
        elif 0 < version < migrations.SCHEMA:  # an empty file has none
            lines.insert(0, f"OLDER: {settings.db}: {migrations.too_old(version)}")
    return [*disk_full(settings), *lines]


def _of_queue(untunable: int, asked_again: int) -> Iterator[str]:
    """untunable: problems that cannot be tuned here; asked_again: solutions that `retune` named."""
    if untunable:
        yield f"{several(untunable, 'problem')} cannot be tuned here (gemmtuned untuned says which and why)."
    if asked_again:
        wait = "solution waits" if asked_again == 1 else "solutions wait"
        yield (
            f"{count(asked_again)} {wait} to be raced again, as somebody asked (gemmtuned retune), or a program that "
            "calls an engine's operator: gemmtuned daemon does it before all else, with --once, too."
        )


_SEATS = (
    Column("name", "device", right=False),
    Column("state", "state", right=False),
    Column("problem", "problem", lambda text: text or "-", right=False),
    Column("candidate", "candidate", lambda text: text or "-", right=False),
    Column("others", "used by others", percent),
    Column("reason", "why", lambda text: text or "", right=False),
    Column("advice", "what to do", lambda text: text or "", right=False),
)
_ENVIRONMENTS = (
    Column("problems", "problems", count),
    Column("calls", "calls ever", count),
    Column("waiting", "to be tuned", count),
    Column("stale", "not called for a week", count),
    Column("failed", "left out", count),
    Column("place", "environment", right=False),
)


def _session_columns(now_s: float) -> tuple[Column, ...]:
    return (
        Column("run", "program", right=False),
        Column("host", "host", right=False),
        Column("pid", "pid"),
        Column("role", "part", lambda role: role or "", right=False),
        Column("rank", "rank"),
        Column("path", "path", right=False),
        Column("generation", "generation", count),
        Column("calls", "its calls", count),
        Column("state", "state", right=False),
        Column("last_seen", "heard of", lambda us: age(now_s - us / 1e6)),
        Column("note", "note", lambda note: note or "", right=False),
    )


_LEFT: Final = "(it was killed, the machine went down, or it runs in another container)"


def _daemon_line(notice: Mapping[str, Any] | None, now_s: float) -> str:
    if notice is None:
        return "daemon: never ran here. Start it: gemmtuned daemon"
    if not notice["running"]:
        heard = age(now_s - notice["updated_s"])
        left = "not running" if notice["state"] == "stopped" else f"not running {_LEFT}"
        return f"daemon: {left}, last heard of {heard}. Start it: gemmtuned daemon"
    wrong, fix = silence(notice, now_s)
    if wrong:
        return f"daemon: {wrong}. {fix[:1].upper()}{fix[1:]}"
    why = f" ({notice['reason']})" if notice["reason"] not in ("", notice["state"]) else ""
    return f"daemon: {notice['state']}{why}, pid {notice['pid']}, {several(notice['solved'], 'problem')} solved so far"


def _published_line(published: int | None, differs: Check | None) -> str:
    if differs is not None:
        return f"published: {differs.found}. To mend it: {differs.fix}"
    return "published: nothing yet" if published is None else f"published: generation {published}"


def _put_off_notes(environments: Sequence[Row], short: Mapping[str, str]) -> list[str]:
    return [
        f"{count(row['put_off'])} of {several(row['open_problems'] - row['failed'], 'problem')} to be tuned tried, "
        f"and {row['put_off_reason']} (gemmtuned untuned lists them): {short[row['environment']]}"
        for row in environments
        if row["put_off"]
    ]


def _notes(running: Sequence[Row], elsewhere: Sequence[Row], short: Mapping[str, str]) -> list[str]:
    notes = []
    for what, one, meaning in (
        ("errors", "error", "in the hook: the calls went to stock torch"),
        ("reload_failures", "published table", "not taken up: gemmtuned doctor says why"),
    ):
        total = sum(row[what] or 0 for row in running)
        if total:
            notes.append(f"{several(total, one)} {meaning}.")
    generations: dict[str, set[int]] = {}
    for row in running:
        if row["state"] == "live" and row.get("rank") is not None:
            generations.setdefault(row["run"], set()).add(row["generation"])
    notes += [
        f"The ranks of {run} hold tables of generations {', '.join(map(str, sorted(seen)))}: let all of them call "
        "gemmtuned.reload(group) at one point."
        for run, seen in generations.items()
        if len(seen) > 1
    ]
    notes += [
        f"for a daemon of another environment: {several(row['problems'], 'problem')}. Start one there: "
        f"{short[row['environment']]}"
        for row in elsewhere
    ]
    return notes
