"""What the operator allows: pause, hours of the day, device time a day, which devices. Pure rules on a given time."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from gemmtuned.configs.errors import SettingError
from gemmtuned.configs.human_units import moment
from gemmtuned.configs.numbers import decimal, whole
from gemmtuned.configs.read_file import read_small
from gemmtuned.daemon.status_file import replace_file

if TYPE_CHECKING:
    from gemmtuned.daemon.device.devices import Monitor

SPENT: Final = "budget"  # in the home: the local day, and the seconds of device time used in it
KEEP_S: Final = 5.0
PAUSED: Final = "paused"  # while this file lies in the home, nothing is tuned; a number in it: until this UTC second
_LAST_S: Final = 4e9  # a pause that would end after 2096 does not end by itself
_HOURS: Final = re.compile(r"([01]?\d|2[0-4])(?::([0-5]\d))?-([01]?\d|2[0-4])(?::([0-5]\d))?")
AnyMonitor = TypeVar("AnyMonitor", bound="Monitor")


@dataclass(frozen=True, slots=True)
class Hours:
    """Spans of local time in which tuning is allowed, as minutes of the day; `22-6` runs over midnight."""

    text: str
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, text: str) -> Hours:
        """`22-6`, `12:30-13,20-24`. Raises SettingError."""
        spans = []
        for part in text.split(","):
            match = _HOURS.fullmatch(part.strip())
            if match is None:
                raise SettingError(f"hours {part.strip()!r}: write 22-6 or 12:30-13,20-24 (local time)")
            start = int(match[1]) * 60 + int(match[2] or 0)
            end = int(match[3]) * 60 + int(match[4] or 0)
            if start > 1440 or end > 1440 or start == end:
                raise SettingError(f"hours {part.strip()!r}: the two must differ and lie between 0 and 24")
            spans.append((start, end))
        return cls(text, tuple(spans))

    def allow(self, minute: int) -> bool:
        """Whether this minute of the day lies in one of the spans."""
        return any(a <= minute < b if a < b else minute >= a or minute < b for a, b in self.spans)


def _local_minute(now_s: float) -> int:
    local = time.localtime(now_s)
    return local.tm_hour * 60 + local.tm_min


def _local_day(now_s: float) -> int:
    local = time.localtime(now_s)
    return local.tm_year * 1000 + local.tm_yday


@dataclass(slots=True)
class Rules:
    """hours: None allows all. budget_s: device seconds a local day that workers may use, all devices together."""

    hours: Hours | None = None
    budget_s: float | None = None
    minute_of: Callable[[float], int] = _local_minute
    day_of: Callable[[float], int] = _local_day
    _used_s: float = field(default=0.0, init=False)
    _day: int | None = field(default=None, init=False)
    _kept_s: float = field(default=0.0, init=False)

    def spend(self, now_s: float, seconds: float) -> None:
        """Workers used their devices for so long."""
        day = self.day_of(now_s)
        if day != self._day:
            self._day, self._used_s = day, 0.0
        self._used_s += seconds

    def remember(self, home: Path) -> None:
        """Go on from what a daemon before this one has used; nothing where that cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            first, second = read_small(home / SPENT).split()
            day, used_s = whole(first), decimal(second)
            if day is not None and used_s is not None and 0 <= used_s < 1e6:  # a damaged file may say anything
                self._day, self._used_s, self._kept_s = day, used_s, used_s

    def keep(self, home: Path, *, now: bool = False) -> None:
        """Write down what was used, for a later daemon that has a budget: every KEEP_S of it, and when it is `now`."""
        fresh = self._used_s < self._kept_s or self._used_s - self._kept_s >= KEEP_S
        if self._day is None or not (fresh or (now and self._used_s != self._kept_s)):
            return
        self._kept_s = self._used_s
        replace_file(home / SPENT, f"{self._day} {self._used_s:.1f}\n")  # a full disk ends no daemon

    def used_s(self, now_s: float) -> float:
        """Device time used today."""
        return self._used_s if self._day == self.day_of(now_s) else 0.0

    def is_spent(self, now_s: float) -> bool:
        """Whether today's budget is used up."""
        return self.budget_s is not None and self._day == self.day_of(now_s) and self._used_s >= self.budget_s

    def why_not(self, now_s: float, home: Path) -> str:
        """Why nothing may be tuned now, or ""."""
        paused = paused_until(home, now_s)
        if paused is not None:
            return "paused" if paused == 0 else f"paused until {moment(paused, now_s)}"
        if self.hours is not None and not self.hours.allow(self.minute_of(now_s)):
            return f"outside the hours allowed ({self.hours.text})"
        if self.is_spent(now_s):
            return f"today's budget of {self.budget_s:g} s of device time is spent"
        return ""


def paused_until(home: Path, now_s: float) -> float | None:
    """None: not paused; 0: until told otherwise; else the UTC second when the pause ends."""
    try:
        text = read_small(home / PAUSED)
    except FileNotFoundError:
        return None
    except OSError:
        return 0.0
    until_s = decimal(text.strip())
    if until_s is None or until_s >= _LAST_S:  # no moment that has a name
        return 0.0
    return until_s if until_s > now_s else None


def allowed(monitors: Sequence[AnyMonitor], names: Sequence[str]) -> list[AnyMonitor]:
    """The monitors of these devices: `cpu`, `cuda:0`, a UUID or its beginning. Raises SettingError for others."""
    chosen: list[AnyMonitor] = []
    for name in names:
        found = [m for m in monitors if name in (m.name, m.id) or (len(name) >= 8 and m.id.startswith(name))]
        if not found:
            there = ", ".join(f"{m.name} ({m.id})" if m.name != m.id else m.name for m in monitors)
            raise SettingError(f"no device {name!r} on this machine, expected of {there}")
        chosen += [m for m in found if m not in chosen]
    return chosen
