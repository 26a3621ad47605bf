"""A file that somebody names for a command to write.

A command writes it whole and then puts it in place by renaming, which would replace what lies there, whatever it is: a
device such as /dev/null for all programs of the machine where root does it, a link by a file, the database by a page.
So a file is written behind links, which stay, into a pipe or device no more than is meant for one, and nowhere where
gemmtuned itself keeps something.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

import typer

from gemmtuned.configs.settings import Settings

# What lies in a home: the rest there, backups among it, is somebody's own
OF_HOME: Final = (
    "configs", "bin", "locks", "probation", "checked", "ingest", "fleet", "fleet-host", "daemon.json", "daemon.sock",
    "budget", "paused", "disabled", "left_out.json", "left_out.lock",
)  # fmt: skip
LOGS: Final = ("-wal", "-shm", "-journal")  # endings of the files beside a database
_MOST_LINKS: Final = 40


def target_of(path: Path, here: Settings) -> Path:
    """Where the file is written: the path, or what a link there leads to.

    Raises typer.BadParameter for what is none that can be written whole, and for gemmtuned's own files.
    """
    if is_stream(path):
        raise typer.BadParameter(f"{path} is a pipe or a device, and this is written whole or not at all: name a file")
    refuse_own(path, here)
    return behind_links(path)


def behind_links(path: Path) -> Path:
    """The path, or what a link there leads to: the link stays, and who reads the other file sees what is written."""
    return _real(path) if path.is_symlink() else path


def is_stream(path: Path) -> bool:
    """Whether it is to be written into, not replaced: a pipe, a device, what this process has open (/dev/stdout)."""
    try:
        kind = path.stat().st_mode
    except OSError:
        return False
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        return True
    for _ in range(_MOST_LINKS):
        if not path.is_symlink():
            return False
        folder = Path(os.path.realpath(path.parent))
        if folder.is_relative_to("/proc"):
            return True
        path = folder / path.readlink()
    return False


def refuse_own(path: Path, here: Settings) -> None:
    """Raise typer.BadParameter where gemmtuned keeps something of its own."""
    real, database = _real(path), _real(here.db)
    if real == database or (path.exists() and here.db.exists() and path.samefile(here.db)):
        raise typer.BadParameter(f"{path} is the database itself")
    if real in [database.with_name(f"{database.name}{end}") for end in LOGS]:
        raise typer.BadParameter(f"{path} is a part of the database")
    tables, home = _real(here.config_dir), _real(here.home)
    if real.is_relative_to(tables):
        raise typer.BadParameter(f"{path}: programs load what is published from {tables}: name another folder")
    if any(real.is_relative_to(home / name) for name in OF_HOME):
        raise typer.BadParameter(f"{path}: gemmtuned keeps its own files there: name another folder")


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
