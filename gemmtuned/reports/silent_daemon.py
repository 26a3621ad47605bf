"""A daemon that runs and does not speak: what it may be, and what a person can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemmtuned.configs.processes import is_stopped
from gemmtuned.daemon.seats.work_queue import is_of_here
from gemmtuned.daemon.status_file import STALE_NOTICE_S
from gemmtuned.reports.render import age


def silence(notice: Mapping[str, Any], now_s: float) -> tuple[str, str]:
    """(what is wrong, what to do) of a daemon that runs; ("", "") for one that speaks.  notice: as read_notice says."""
    pid, silent_s = notice["pid"], now_s - notice["updated_s"]
    if is_of_here(notice["owner"]) and is_stopped(pid):
        return f"pid {pid} is stopped (SIGSTOP), last heard of {age(silent_s)}", f"let it go on: kill -CONT {pid}"
    if silent_s > STALE_NOTICE_S:
        return f"pid {pid} last spoke {age(silent_s)}", f"look at pid {pid}: it hangs, or its disk is full"
    return "", ""
