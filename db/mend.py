"""A damaged database is replaced completely or not at all: a new one is built beside it, then renamed into its place.

    .salvage-tune.db/copy.db      the damaged file with its log, as a copy on which repairs are tried
    .salvage-tune.db/build.db     the new database while it is written
    .salvage-tune.db/report.json  which file it was made from, and the outcome
    .salvage-tune.db/new.db       build.db, once it is complete and on the disk: from here on only renames are left
    tune.db.corrupt-<UTC>         the damaged file, kept, and beside it its log and its report

Until the renames the damaged file stays where it is, unchanged: a kill or a full disk at any byte costs only time.  The
next process that opens the database finds what was begun, and finishes the renames or builds again.  The caller holds
the lock file and has no connection open.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final, cast

from gemmtuned._testing import faults
from gemmtuned.configs import clock
from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.open_files import free_bytes
from gemmtuned.configs.read_file import read_small
from gemmtuned.configs.temporary import be_like
from gemmtuned.db import salvage
from gemmtuned.db.files import folder_of_salvage, identity, salvage_is_finished

CUT_SHORT: Final = "cut short"
OF_AN_OLDER_VERSION: Final = "of an older version, cut short"
SET_ASIDE: Final = "set aside"
MOST_BYTES: Final = 1 << 20  # per report
KEEP: Final = 3  # damaged files that are kept; older ones are removed when another one comes
_COPY_BYTES: Final = 4 << 20  # between two beats
Beat = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a salvage. lost_calls: calls whose rows could not be read, by what is left of the ledger.

    ledger_whole: whether the whole ledger is left; if not, an unknown number of calls more may be lost.
    """

    reason: str
    set_aside: str
    salvaged_rows: int
    lost_calls: int
    ledger_whole: bool

    @property
    def lost(self) -> str:
        """For a log."""
        return f"{self.lost_calls}{'' if self.ledger_whole else ' more_lost=unknown'}"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file of a salvage beside the database. kind: one of the three above."""

    kind: str
    path: Path
    size_bytes: int


def rebuild(path: Path, *, reason: str, beat: Beat) -> Report:
    """Build a new database from what can be read of the damaged one, and put it in its place.

    beat is called every few milliseconds.  If it raises, or on OSError and sqlite3.Error, which are raised, too, the
    damaged file stays as it is.
    """
    folder = folder_of_salvage(path)
    try:
        _clear(folder)
        _build(path, folder, reason, beat)
    except BaseException:
        with contextlib.suppress(OSError):
            _clear(folder)
        raise
    return _swap(path, folder)


def finish(path: Path) -> Report | None:
    """Finish the renames that a killed process had begun; None when there are none.

    A new database that was built from a file which has changed since is removed.
    """
    folder = folder_of_salvage(path)
    if not salvage_is_finished(path):
        return None
    source = _report(folder)["source"]
    now = _facts(path)
    same = now is None or (now["db"] == source["db"] and now["wal"] in (None, source["wal"]))
    if not same:
        _clear(folder)
        return None
    return _swap(path, folder)


def leftovers(path: Path) -> list[Leftover]:
    """The files of salvages beside the database, finished or not; the newest first."""
    found = []
    ours = folder_of_salvage(path)
    for folder in path.parent.glob(".salvage-*"):
        if folder.is_dir() and (folder == ours or (folder / "copy.db").exists()):
            kind = CUT_SHORT if folder == ours else OF_AN_OLDER_VERSION
            found.append(Leftover(kind, folder, sum(f.stat().st_size for f in folder.iterdir())))
    return found + [
        Leftover(SET_ASIDE, aside, sum(f.stat().st_size for f in _with_its_files(aside)))
        for aside in _set_aside_before(path)
    ]


def kept_as(path: Path, file: tuple[int, int]) -> Path | None:
    """Where the file lies now that was at path and found damaged, if a new one was put in its place."""
    return next((aside for aside in _set_aside_before(path) if identity(aside) == file), None)


def _build(path: Path, folder: Path, reason: str, beat: Beat) -> None:
    source = _facts(path)
    if source is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    needed = 2 * (source["db"][1] + (source["wal"][1] if source["wal"] else 0))
    free = free_bytes(path.parent)
    if free is not None and free < needed:
        raise OSError(errno.ENOSPC, f"salvage needs {needed >> 20} MiB, {free >> 20} MiB are free")
    folder.mkdir(mode=0o700)
    build = folder / "build.db"
    new = sqlite3.connect(build, isolation_level=None)
    try:
        for pragma in (
            "journal_mode = MEMORY",
            "synchronous = OFF",
            "foreign_keys = ON",
        ):  # OFF would keep rows that are refused
            new.execute(f"PRAGMA {pragma}").fetchall()
        rows, lost, whole = salvage.copy(lambda to: _copy(path, to, beat), folder, new, beat)
    finally:
        new.close()
    (folder / "copy.db").unlink(missing_ok=True)
    be_like(build, path.stat())
    _sync(build)
    when = datetime.fromtimestamp(clock.now_s(), timezone.utc).strftime("%Y%m%dT%H%M%S.%fZ")
    report = Report(reason, f"{path.name}.corrupt-{when}", rows, lost, whole)
    (folder / "report.json").write_text(json.dumps({**asdict(report), "source": source}) + "\n", encoding="utf-8")
    _sync(folder / "report.json")
    faults.point("salvage.rename_build")
    build.rename(folder / "new.db")
    _sync(folder)


def _swap(path: Path, folder: Path) -> Report:
    """Do the renames. Each may be repeated, so after a kill between two the next process that opens goes on here."""
    raw = _report(folder)
    report = Report(**{name: raw[name] for name in Report.__slots__})
    aside = path.with_name(report.set_aside)
    for end in ("-wal", "-shm"):  # before the database: a new one must not find an old log
        faults.point("salvage.rename_log")
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + end).rename(f"{aside}{end}")
    if not aside.exists() and path.exists():
        faults.point("salvage.link")
        try:
            os.link(path, aside)  # a link, so that there always is a file at the path
        except OSError:  # a file system without links
            path.rename(aside)
    faults.point("salvage.rename_new")
    (folder / "new.db").replace(path)
    try:
        _sync(path.parent)
    finally:
        tidy(path)
    return report


def _report(folder: Path) -> dict[str, Any]:
    """The report of a salvage. Raises StoreError if it cannot be read, so that the new database is not removed."""
    path = folder / "report.json"
    try:
        found = {"ledger_whole": True, **json.loads(read_small(path, MOST_BYTES))}  # version 0.2.0 wrote no such field
        if not {*Report.__slots__, "source"} <= found.keys() or not {"db", "wal"} <= found["source"].keys():
            raise KeyError
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise StoreError(
            f"{path}: cannot be read, so a salvage that was cut short cannot be ended. Move {folder} away; new.db in "
            "it, if there is one, is what was salvaged"
        ) from err
    return cast("dict[str, Any]", found)


def tidy(path: Path) -> None:
    """Remove what is left if a kill came after the last rename."""
    folder = folder_of_salvage(path)
    report = folder / "report.json"
    if not report.exists() or (folder / "new.db").exists() or (folder / "build.db").exists():
        return
    with contextlib.suppress(OSError, StoreError):
        aside = _report(folder)["set_aside"]
        report.rename(path.with_name(f"{aside}.json"))
        _clear(folder)
        _remove_old(path)


def _copy(path: Path, to: Path, beat: Beat) -> None:
    """Copy the damaged file and its log to `to`, so that repairs do not change the damaged file."""
    for end in ("", "-wal", "-shm"):
        target = to.with_name(to.name + end)
        target.unlink(missing_ok=True)
        source = path.with_name(path.name + end)
        if end == "-shm" or not source.exists():
            continue
        faults.point("salvage.copy")
        with source.open("rb") as old, target.open("wb") as new:
            # By pread, as SQLite reads: a disk that refuses it has no damaged file
            while data := os.pread(old.fileno(), _COPY_BYTES, new.tell()):
                faults.point("salvage.write")
                new.write(data)
                beat()


def _facts(path: Path) -> dict[str, Any] | None:
    """Facts that identify a state of the file: inode, size and time of the database and of its log."""

    def of(one: Path) -> list[int] | None:
        try:
            facts = one.stat()
        except FileNotFoundError:
            return None
        return [facts.st_ino, facts.st_size, facts.st_mtime_ns]

    db = of(path)
    return None if db is None else {"db": db, "wal": of(path.with_name(path.name + "-wal"))}


def _sync(path: Path) -> None:
    faults.point("salvage.fsync")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _clear(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _set_aside_before(path: Path) -> list[Path]:
    """The damaged files that were kept, the newest first."""
    names = [p for p in path.parent.glob(f"{path.name}.corrupt-*Z") if p.is_file()]
    return sorted(names, key=lambda p: p.name, reverse=True)


def _with_its_files(aside: Path) -> list[Path]:
    return [p for end in ("", "-wal", "-shm", ".json") if (p := aside.with_name(aside.name + end)).exists()]


def _remove_old(path: Path) -> None:
    for aside in _set_aside_before(path)[KEEP:]:
        for file in _with_its_files(aside):
            file.unlink(missing_ok=True)
