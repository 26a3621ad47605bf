"""`daemon.json` in the home: what the daemon does and why not something else, for `gemmtuned status`.

A picture for people, replaced whole about every second; nothing depends on it.  It may outlive its daemon, so a
reader asks `read_notice`, which checks that the process still runs, and that it does so for this home.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.read_file import read_small
from gemmtuned.configs.temporary import temporary_path

FILE: Final = "daemon.json"
MOST_BYTES: Final = 4 << 20  # that are read
MOST_NUMBER: Final = 1e15
STALE_NOTICE_S: Final = 30.0  # a daemon speaks every few seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatNotice:
    """One device: what it is used for, and why not for tuning now (reason, empty while tuning)."""

    id: str
    name: str
    device: str
    state: str  # waiting, ready, tuning, stuck
    reason: str
    others: float | None
    clear_s: float
    problem: str = ""
    candidate: str = ""
    worker_pid: int | None = None
    pids: list[int] = field(default_factory=list)  # that the driver names there, without our worker
    left_out: list[str] = field(default_factory=list)  # backends that its worker does without, each with why


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """owner: `host:pid:start`. elsewhere: environments with waiting problems that no worker here can reproduce.

    folder: the home as the file system knows it, which tells a copy of a home from the one that its daemon serves.
    """

    owner: str
    pid: int
    started_s: float
    updated_s: float
    state: str  # waiting, tuning, paused, ready (nothing to tune), stopped
    reason: str
    generation: int
    solved: int
    environment: str = ""
    seats: list[SeatNotice] = field(default_factory=list)
    elsewhere: list[dict[str, Any]] = field(default_factory=list)
    folder: str = ""  # device and inode; "" of an earlier version


def write_notice(home: Path, notice: Notice) -> bool:
    """Replace the file; False when the disk refuses, which is no reason to stop."""
    return replace_file(home / FILE, json.dumps({**asdict(notice), "folder": _folder(home)}, indent=1) + "\n")


def _folder(home: Path) -> str:
    try:
        facts = home.stat()
    except OSError:  # the file cannot be written or read there, either
        return ""
    return f"{facts.st_dev}:{facts.st_ino}"


def replace_file(path: Path, text: str) -> bool:
    """Write a small file whole or not at all; False when the disk refuses."""
    temporary = temporary_path(path)
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return False
    return True


def read_notice(home: Path) -> dict[str, Any] | None:
    """What the daemon of this home said last, with `running`; None when none ever ran or the file is not ours."""
    import psutil

    from gemmtuned.daemon.seats.work_queue import is_dead, is_of_here

    try:
        notice = checked(json.loads(read_small(home / FILE, MOST_BYTES)))
        # of one whose process cannot be looked at only its word counts, for as long as its leases
        is_here = is_of_here(notice["owner"])
        heard = is_here or time.time() - notice["updated_s"] < STALE_NOTICE_S
        running = notice["state"] != "stopped" and not is_dead(notice["owner"]) and heard
        if is_here and notice["folder"] not in ("", _folder(home)):  # the home was copied; its daemon serves the other
            running = False
    except (OSError, ValueError, KeyError, TypeError, RecursionError, psutil.Error):
        return None
    return {**notice, "running": running}


def checked(found: Any) -> dict[str, Any]:
    """What was read, when it is a notice as we write it. Raises KeyError, TypeError or ValueError for anything else."""
    notice = _typed(Notice, found)
    notice["seats"] = [_typed(SeatNotice, seat) for seat in notice["seats"]]
    for row in notice["elsewhere"]:
        if not (isinstance(row["environment"], str) and isinstance(row["problems"], int)):
            raise TypeError("elsewhere")
    return notice


def _typed(kind: type[Notice] | type[SeatNotice], found: Any) -> dict[str, Any]:
    allowed: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
    known = dict(found)
    for one in fields(kind):
        if one.name not in known:  # an earlier version did not say it
            known[one.name] = one.default_factory() if one.default_factory is not MISSING else one.default
        wanted = str(one.type).removesuffix(" | None")
        types = allowed.get(wanted, (list,)) + ((type(None),) if str(one.type).endswith("None") else ())
        value = known[one.name]
        if not isinstance(value, types) or isinstance(value, bool):
            raise TypeError(one.name)
        if isinstance(value, int | float) and not abs(value) < MOST_NUMBER:
            raise ValueError(one.name)
    return known
