"""What changes slowly and costs a question to the database or the system: asked while somebody watches, not often."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.daemon.status_file import SeatNotice
from gemmtuned.daemon.watch.users import Users
from gemmtuned.db import queries, watched

PROGRAMS_S: Final = 1.0
SLOW_S: Final = 5.0  # covered shares, what waits, who uses a device
SHARE: Final = 0.02  # cores that one of these looks may take, however large the database
MOST_PROGRAMS: Final = 40
VERDICTS: Final = 20


class Look:
    """The newest answer to one question, which is asked again every `every_s`, or more seldom where it takes long."""

    def __init__(self, ask: Callable[[], Any], every_s: float, nothing: Any) -> None:
        self._ask = ask
        self._every_s = every_s
        self._next_s = float("-inf")
        self.answer = nothing
        self.trouble = ""  # why it could not be answered last

    def take(self, *, again: bool = False) -> None:
        """Ask, if it is time to; again: in any case."""
        began_s = time.monotonic()
        if began_s < self._next_s and not again:
            return
        try:
            self.answer, self.trouble = self._ask(), ""
        except (GemmtunedError, psutil.Error, OSError) as err:
            self.trouble = str(err)
        took_s = time.monotonic() - began_s
        self._next_s = began_s + max(self._every_s, took_s / SHARE)


class Looks:
    """All of them. seats: what the daemon's devices are now."""

    def __init__(self, database: Path, seats: Callable[[], Sequence[SeatNotice]]) -> None:
        self._database = database
        self._rates = Rates()
        self._generation = -1
        self.programs = Look(self._programs, PROGRAMS_S, {"rows": [], "more": 0, "calls_per_s": None})
        self.covered = Look(lambda: watched.answered(database), SLOW_S, None)
        self.waiting = Look(lambda: watched.open_problems(database), SLOW_S, None)
        self.verdicts = Look(lambda: watched.newest(database, limit=VERDICTS), SLOW_S, [])
        users = Users()
        self.users = Look(lambda: users.of(seats()), SLOW_S / 2, {})

    def take(self, generation: int) -> None:
        """Ask what is due; generation: the newest publication, after which there are new verdicts."""
        self.programs.take()
        self.users.take()
        self.verdicts.take(again=generation != self._generation)
        self._generation = generation
        self.waiting.take()
        self.covered.take()

    def said(self) -> dict[str, Any]:
        """As it goes over the socket."""
        every = (self.programs, self.covered, self.waiting, self.verdicts, self.users)
        return {
            "programs": self.programs.answer,
            "covered": self.covered.answer,
            "waiting": self.waiting.answer,
            "verdicts": self.verdicts.answer,
            "users": self.users.answer,
            "trouble": next((look.trouble for look in every if look.trouble), ""),
        }

    def _programs(self) -> dict[str, Any]:
        there = [row for row in queries.sessions(self._database) if row["state"] != "ended"]
        self._rates.see(there)
        rows = [{**row, "calls_per_s": self._rates.of(row)} for row in there]
        rows.sort(key=lambda row: (row["state"] != "live", -(row["calls_per_s"] or 0.0), -row["last_seen"]))
        rates = [row["calls_per_s"] for row in rows if row["calls_per_s"] is not None]
        shown = [{name: row[name] for name in _SHOWN} for row in rows[:MOST_PROGRAMS]]
        return {"rows": shown, "more": len(rows) - len(shown), "calls_per_s": sum(rates) if rates else None}


_SHOWN: Final = (
    "run",
    "host",
    "pid",
    "rank",
    "path",
    "generation",
    "calls",
    "calls_per_s",
    "state",
    "last_seen",
    "note",
)


class Rates:
    """Calls a second of each process, between its last two reports."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, ...], tuple[int, int, float | None]] = {}

    def see(self, rows: Sequence[dict[str, Any]]) -> None:
        """rows: of the view sessions."""
        seen: dict[tuple[Any, ...], tuple[int, int, float | None]] = {}
        for row in rows:
            key, now = _process(row), (row["calls"], row["last_seen"])
            calls, at_us, rate = self._seen.get(key, (*now, None))
            if now[1] > at_us:
                rate = max(now[0] - calls, 0) / (now[1] - at_us) * 1e6
            seen[key] = (*now, rate)
        self._seen = seen

    def of(self, row: dict[str, Any]) -> float | None:
        """None: not known yet, or the process is not heard of."""
        return self._seen[_process(row)][2] if row["state"] == "live" else None


def _process(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["host"], row["pid"], row["started"]
