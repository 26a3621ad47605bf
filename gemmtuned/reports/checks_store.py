"""Doctor's checks of what is shared: the database, the daemon, the programs that are hooked."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from typing import Final

from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.device.advice import advice
from gemmtuned.daemon.status_file import read_notice
from gemmtuned.db import queries
from gemmtuned.db.handle import LONG_LOG_BYTES
from gemmtuned.reports.checks import FAIL, PASS, WARN, Check
from gemmtuned.reports.render import several, size
from gemmtuned.reports.silent_daemon import silence
from gemmtuned.reports.unraced import unraced_found
from gemmtuned.reports.unseen import dropped_calls, dropped_notes, engine_paths

# Before it, a checkpoint that overlaps a write can lose commits ("WAL-reset bug", sqlite.org/wal.html)
WAL_RESET_FIXED: Final = (3, 51, 3)
LOOK_S: Final = 0.5  # at the database, unless told to read all of it
LARGE_FREE_BYTES: Final = 64 << 20


def checks(settings: Settings, *, with_database: bool = True, deep: bool = False) -> Iterator[Check]:
    """SQLite's version, daemon; database file and its log, programs, unless there can be none.

    deep: read the whole database, however long that takes.
    """
    yield _sqlite()
    if with_database:
        yield _database(settings, deep=deep)
        yield from _log(settings)
        yield from salvages(settings)
    yield from _daemon(settings)
    if with_database:
        yield from _programs(settings)


def _sqlite() -> Check:
    found = f"SQLite {sqlite3.sqlite_version}"
    if sqlite3.sqlite_version_info < (3, 37):  # STRICT tables
        return Check("sqlite", FAIL, f"{found}: too old", "use a Python built with SQLite 3.37 or newer")
    if sqlite3.sqlite_version_info < WAL_RESET_FIXED:
        return Check("sqlite", PASS, f"{found}: has the WAL-reset bug; our lock file keeps clear of it")
    return Check("sqlite", PASS, found)


def _database(settings: Settings, *, deep: bool) -> Check:
    if not settings.db.exists():
        return Check("database", PASS, f"{settings.db}: none yet, made by the first hooked program")
    from gemmtuned.db import upkeep

    found = upkeep.check(settings.db) if deep else upkeep.glance(settings.db, for_s=LOOK_S)
    if found:
        more = f" (and {len(found) - 1} more: gemmtuned db check)" if len(found) > 1 else ""
        return Check("database", FAIL, f"{found[0]}{more}", _way_out(found[0]))
    total = settings.db.stat().st_size
    free = queries.free_bytes(settings.db)
    text = f"{settings.db}: {size(total)}"
    if free > max(LARGE_FREE_BYTES, total // 2):
        return Check("database", PASS, f"{text}, {size(free)} of it free", "gemmtuned db vacuum gives it back")
    if found is None:
        return Check("database", PASS, f"{text}, nothing wrong in its first pages", "gemmtuned doctor --deep reads all")
    return Check("database", PASS, f"{text}, sound")


def _way_out(found: str) -> str:
    """What mends the database: the messages of the store name the way out themselves."""
    if any(way in found for way in ("et GEMMTUNED_", "Upgrade gemmtuned", "Free space", "Try again")):
        return "as it says"
    if "not yet" in found:
        return "gemmtuned daemon, or gemmtuned run COMMAND"
    if "cannot be looked at now" in found:
        return "look at the system log: the disk does not answer; the file itself may be sound"
    return (
        "restart gemmtuned daemon: it builds the database anew from what can be read, and sets the damaged file aside"
    )


def salvages(settings: Settings) -> Iterator[Check]:
    """What lies beside the database of salvages."""
    from gemmtuned.db import mend

    found = mend.leftovers(settings.db)
    for one in found:
        if one.kind == mend.CUT_SHORT:
            text = f"a salvage of {settings.db} was cut short: {one.path}"
            yield Check("salvage", WARN, text, "restart gemmtuned daemon: it begins again")
        elif one.kind == mend.OF_AN_OLDER_VERSION:
            text = (
                f"a salvage of an earlier version was cut short, rows of the file set aside may be missing: {one.path}"
            )
            fix = f"gemmtuned db publish brings published solutions back; then rm -r {one.path}"
            yield Check("salvage", WARN, text, fix)
    aside = [one for one in found if one.kind == mend.SET_ASIDE]
    if aside:
        total = size(sum(one.size_bytes for one in aside))
        text = f"{several(len(aside), 'damaged file')} set aside, {total}; the newest {mend.KEEP} are kept"
        yield Check("salvage", PASS, text, f"rm {settings.db}.corrupt-*, when nobody wants to look at them")


def _log(settings: Settings) -> Iterator[Check]:
    wal = settings.db.with_name(settings.db.name + "-wal")
    try:
        wal_bytes = wal.stat().st_size
    except OSError:
        return
    if wal_bytes > LONG_LOG_BYTES:
        fix = "close what keeps the database open for reading (a sqlite3 shell, datasette)"
        yield Check("database log", WARN, f"{wal} has {size(wal_bytes)}: programs keep their counts in memory", fix)


def _daemon(settings: Settings) -> Iterator[Check]:
    """One line for the daemon, one for each of its devices that is not tuned on."""
    notice = read_notice(settings.home)
    if notice is None or not notice["running"]:
        yield Check("daemon", WARN, "not running: nothing new gets tuned", "gemmtuned daemon")
        return
    wrong, fix = silence(notice, time.time())
    if wrong:
        yield Check("daemon", WARN, wrong, fix)
        return
    why = f": {notice['reason']}" if notice["reason"] else ""
    yield Check("daemon", PASS, f"pid {notice['pid']}, {notice['state']}{why}", advice(notice["reason"]))
    for seat in notice["seats"]:
        if seat["reason"]:
            result = WARN if seat["state"] == "stuck" else PASS
            yield Check(seat["name"], result, f"{seat['state']}: {seat['reason']}", advice(seat["reason"]))


def _programs(settings: Settings) -> Iterator[Check]:
    """One line for each live program that has something to say, one for the rest."""
    try:
        rows = queries.sessions(settings.db) if settings.db.exists() else []
        published = queries.generation(settings.db) if rows else 0
    except StoreError as err:
        yield Check("programs", FAIL, str(err))
        return
    live = [row for row in rows if row["state"] == "live"]
    well = 0
    for row in live:
        name = f"{row['run']} (pid {row['pid']} on {row['host']})"
        if row["reload_failures"] and row["generation"] < published:
            found = f"{name}: {row['reload_failures']} times a published table could not be taken up. {row['note']}"
            yield Check("programs", WARN, found, "see the line on published tables")
        elif row["errors"] or row["dropped"]:
            found = f"{name}: {row['errors']} errors, {row['dropped']} calls not counted. {row['note']}"
            yield Check("programs", WARN, found)
        elif row["path"] != "native":
            yield Check(
                "programs", WARN, f"{name}: path {row['path']}. {row['note']}", "see the line on the native hook"
            )
        elif row["note"]:
            yield Check("programs", WARN, f"{name}: {row['note']}")
        else:
            well += 1
    since_us = (time.time() - queries.DAY_S) * 1e6
    for note in dropped_notes(dropped_calls((row for row in rows if row["state"] != "live"), since_us=since_us)):
        yield Check("programs", WARN, note)
    for paths in engine_paths(rows, since_us=since_us):
        yield Check("engines", WARN if paths.left or paths.unseen else PASS, str(paths))
    for found, fix in unraced_found(queries.unraced(settings.db) if rows else ()):
        yield Check("engines", WARN if fix else PASS, found, fix)
    silent = sum(row["state"] in ("silent", "gone") for row in rows)
    yield Check("programs", PASS, f"live and well: {well}; killed, or without their database: {silent}")
