"""`gemmtuned purge`: remove what gemmtuned has written on this machine for this home, before it is uninstalled."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gemmtuned.commands.named_file import LOGS, OF_HOME
from gemmtuned.commands.options import DryRun, Json, settings
from gemmtuned.configs.errors import GemmtunedError, TableError, TryLater
from gemmtuned.configs.settings import Settings
from gemmtuned.hooks.probation import pages_of
from gemmtuned.reports.checks_room import below, size_of
from gemmtuned.reports.render import Column, Report, Table, several, show, size

_DATABASE: Final = ("", *LOGS, ".corrupt-*")
_TABLES: Final = ("manifest.json", "*.jsonl", "bin")  # where the published tables have a folder of their own
_CACHE: Final = ("native", "nvrtc")
# Folders of names that others use, too, and what lies in them where they are ours: else they stay, whole
_CONTENT: Final = {"bin": r"[0-9a-f]{64}|\..*", "configs": r"manifest\.json.*|.*\.jsonl|bin|\..*", "locks": r".*\.lock"}
_COLUMNS: Final = (Column("path", "file or folder", right=False), Column("bytes", "size", size))


def purge(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    keep_cache: Annotated[
        bool, typer.Option("--keep-cache", help="Leave the cache: other homes of yours use it, too.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Remove the database, published tables and cache of this home.

    For good: gemmtuned db backup first keeps the counts. Refused (75) while a daemon or a hooked program runs. Backups,
    and files that gemmtuned did not write, stay. After it, pip uninstall gemmtuned leaves nothing behind.
    """
    here = settings()
    found = _listed(here, keep_cache=keep_cache)
    shared = ""
    if any(Path(row["path"]).parent == here.cache for row in found):
        shared = f"the cache {here.cache} serves all homes of yours: --keep-cache leaves it"
    if found and not dry_run:
        _refuse_while_in_use(here)
        if not yes:
            _ask(found, here, shared)
            _refuse_while_in_use(here)  # somebody may have started one while the question waited
        found = _listed(here, keep_cache=keep_cache)  # to ask the database leaves tune.db-wal and -shm beside it
        for row in found:
            _remove(Path(str(row["path"])))
        _remove_if_empty(here)
    total = sum(row["bytes"] for row in found)
    what = f"{several(len(found), 'file or folder', 'files and folders')}, {size(total)}"
    said = f"{what} {'would be ' if dry_run else ''}removed" if found else f"nothing of gemmtuned's is at {here.home}"
    left = sorted(path.name for path in here.home.iterdir()) if here.home.is_dir() and not dry_run else []
    notes = [said, *([f"left at {here.home}, as gemmtuned did not write it: {', '.join(left)}"] if left else [])]
    refused = _would_be_refused(here) if found and dry_run else ""
    if dry_run:
        notes += [*filter(None, [shared]), *([f"refused now: {refused}"] if refused else [])]
    facts = {"home": str(here.home), "dry_run": dry_run, "bytes": total, "left": left, "refused": refused or None}
    show(Report("purge", [Table("rows", _COLUMNS, found)], facts, notes=notes), as_json=as_json)


def _listed(here: Settings, *, keep_cache: bool) -> list[dict[str, Any]]:
    return [{"path": str(path), "bytes": _bytes_of(path)} for path in _there(here, keep_cache=keep_cache)]


def _there(here: Settings, *, keep_cache: bool) -> Iterator[Path]:
    """What there is of it, each once."""
    searched = [
        (here.home, OF_HOME if _is_home(here) else ()),
        (here.db.parent, tuple(f"{here.db.name}{end}" for end in _DATABASE)),
    ]
    searched += [(here.db.parent, ("ingest-aside.db*", "ingest-refused.db*"))]
    if here.config_dir.parent != here.home and (here.config_dir / "manifest.json").is_file():
        searched.append((here.config_dir, _TABLES))
    if not keep_cache:
        searched.append((here.cache, _CACHE))
    seen = set()
    for folder, patterns in searched:
        for pattern in patterns:
            for path in sorted(folder.glob(pattern)) if folder.is_dir() else ():
                if path not in seen and _is_ours(path):
                    seen.add(path)
                    yield path
    pages = pages_of(here.home / "probation")
    if pages.exists():
        yield pages


def _is_home(here: Settings) -> bool:
    """Whether gemmtuned has ever written there: else what lies under names of ours is somebody's."""
    return here.db.is_file() or (here.home / "configs/manifest.json").is_file() or (here.home / "daemon.json").is_file()


def _is_ours(path: Path) -> bool:
    """Whether nothing lies in it that we would not have written: a home may be set to a folder of somebody's."""
    content = _CONTENT.get(path.name)
    if content is None or path.is_symlink() or not path.is_dir():
        return not path.is_symlink() or path.is_file()
    return all(re.fullmatch(content, inside.name) for inside in path.iterdir())


def _bytes_of(path: Path) -> int:
    return size_of(below(path) if path.is_dir() else [path])[1]


def _refuse_while_in_use(here: Settings) -> None:
    """Raise TryLater where a daemon or a program would go on writing what is removed."""
    from gemmtuned.daemon.status_file import read_notice

    notice = read_notice(here.home)
    if notice and notice["running"]:
        raise TryLater(f"a daemon runs for {here.home} (pid {notice['pid']}): stop it first")
    if here.db.exists():
        from gemmtuned.db import queries

        live = [row for row in queries.sessions(here.db) if row["state"] == "live"]
        if live:
            names = ", ".join(f"{row['run']} (pid {row['pid']})" for row in live[:3])
            raise TryLater(f"{several(len(live), 'hooked program')} of {here.home} still run: {names}. Stop them first")


def _would_be_refused(here: Settings) -> str:
    """Why nothing would be removed now; "" where it would."""
    try:
        _refuse_while_in_use(here)
    except GemmtunedError as err:  # a database that cannot be read, too
        return str(err)
    return ""


def _ask(found: list[dict[str, Any]], here: Settings, shared: str) -> None:
    if not sys.stdin.isatty():
        raise typer.BadParameter("this removes files for good: say --yes, or --dry-run to see which")
    for row in found:
        typer.echo(f"{row['path']}  {size(row['bytes'])}", err=True)
    if shared:
        typer.echo(shared, err=True)
    typer.confirm(f"Remove all of this for {here.home}?", abort=True, err=True)


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as err:
        raise TableError(f"{path}: cannot be removed ({err.strerror or err})") from err


def _remove_if_empty(here: Settings) -> None:
    for folder in (here.home, here.cache):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
