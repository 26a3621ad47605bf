"""Moments, spans of time and figures as people read them."""

from __future__ import annotations

import time


def moment(at_s: float, now_s: float) -> str:
    """`23:49`, or `2026-12-02 23:49` on another day; local time."""
    at, now = time.localtime(at_s), time.localtime(now_s)
    return time.strftime("%H:%M" if at[:3] == now[:3] else "%Y-%m-%d %H:%M", at)


def duration(us: float) -> str:
    """Microseconds in the unit a reader would choose: 8.41 us, 12.3 ms, 4.2 s, 1.5 h."""
    if us == 0:
        return "0 us"
    for limit, scale, unit in ((1e3, 1, "us"), (1e6, 1e3, "ms"), (3.6e9, 1e6, "s")):
        if abs(us) < limit * 0.9995:
            return f"{three(us / scale)} {unit}"
    return f"{three(us / 3.6e9)} h"


def span(seconds: float) -> str:
    """A length of time that somebody named, in the unit that it was named in: 45 min, 24 h, 7 days."""
    for least, scale, unit in ((2, 86400, "days"), (1, 3600, "h"), (1, 60, "min")):
        if seconds >= least * scale and seconds % scale == 0:
            return f"{seconds / scale:.0f} {unit}"
    return f"{seconds:g} s"


def three(value: float) -> str:
    """A figure with three digits: 8.41, 12.3, 842."""
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}"
