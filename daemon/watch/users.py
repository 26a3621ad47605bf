"""Who uses the devices, by name and process id: for people who wonder why nothing is tuned now."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import psutil

from gemmtuned.daemon.device.neighbours import gpu_holders
from gemmtuned.daemon.device.process_use import cpu_seconds, name_of_process
from gemmtuned.daemon.status_file import SeatNotice

MOST: Final = 5  # names for each device
LEAST: Final = 0.02  # cores: less is not worth a name


class Users:
    """Remembers what each process had used at the last look, so that a share can be worked out."""

    def __init__(self) -> None:
        self._used_s: dict[int, float] = {}
        self._at_s: float | None = None

    def of(self, seats: Sequence[SeatNotice]) -> dict[str, list[dict[str, Any]]]:
        """{pid, name, cores} of each user by device id, the busiest first; cores: how many it used since the last look.

        Our own processes are left out.  On a GPU those that the driver names; where it names none, as in a container,
        those that hold any GPU open, as far as we may look.
        """
        ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        shares = self._shares(ours)
        found: dict[str, list[dict[str, Any]]] = {}
        for seat in seats:
            if seat.id == "cpu":
                busy = sorted((pid for pid, cores in shares.items() if cores >= LEAST), key=lambda pid: -shares[pid])
                found[seat.id] = _named(busy[:MOST], shares)
                continue
            pids: Iterable[int] = (pid for pid in seat.pids if pid not in ours)
            if not seat.pids:
                pids = (pid for pid in gpu_holders() if pid is not None)
            found[seat.id] = _named(list(pids)[:MOST], shares)
        return found

    def _shares(self, ours: set[int]) -> dict[int, float]:
        now_s, used_s = time.monotonic(), dict(cpu_seconds())
        span_s = now_s - self._at_s if self._at_s is not None else 0.0
        before, self._used_s, self._at_s = self._used_s, used_s, now_s
        if span_s <= 0:
            return {}
        return {
            pid: max(used - before[pid], 0.0) / span_s
            for pid, used in used_s.items()
            if pid in before and pid not in ours
        }


def _named(pids: Iterable[int], shares: dict[int, float]) -> list[dict[str, Any]]:
    return [
        {"pid": pid, "name": name_of_process(pid), "cores": round(shares[pid], 3) if pid in shares else None}
        for pid in pids
    ]
