"""`daemon.json` in the home: what the daemon does and why not something else, for `gemmtuned status`.

A picture for people, replaced whole about every second; nothing depends on it.  It may outlive its daemon, so a
reader asks `read_notice`, which checks that the process still runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from gemmtuned.daemon.work_queue import is_dead, is_of_here

FILE: Final = "daemon.json"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """owner: `host:pid:start`. elsewhere: environments with waiting problems that no worker here can reproduce."""

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


def write_notice(home: Path, notice: Notice) -> bool:
    """Replace the file; False when the disk refuses, which is no reason to stop."""
    return replace_file(home / FILE, json.dumps(asdict(notice), indent=1) + "\n")


def replace_file(path: Path, text: str) -> bool:
    """Write a small file whole or not at all; False when the disk refuses."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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
    try:
        notice = json.loads((home / FILE).read_text())
        # of one whose process cannot be looked at only its word counts, for as long as its leases
        heard = is_of_here(notice["owner"]) or time.time() - notice["updated_s"] < STALE_NOTICE_S
        running = notice["state"] != "stopped" and not is_dead(notice["owner"]) and heard
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return None
    return {**notice, "running": running}
