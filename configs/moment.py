"""A moment as people read it."""

from __future__ import annotations

import time


def moment(at_s: float, now_s: float) -> str:
    """`23:49`, or `2026-12-02 23:49` on another day; local time."""
    at, now = time.localtime(at_s), time.localtime(now_s)
    return time.strftime("%H:%M" if at[:3] == now[:3] else "%Y-%m-%d %H:%M", at)
