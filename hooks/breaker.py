"""The circuit breaker: many routes failing in a short time mean that something larger is wrong than a route."""

from __future__ import annotations

from typing import Final

MAX_FAILURES: Final = 10  # routes failing within REARM_S before dispatch as a whole is switched off
REARM_S: Final = 300.0


class Breaker:
    """Decides from failures and the time (any clock that only grows) whether dispatch may go on."""

    def __init__(self) -> None:
        self._failed_at_s: list[float] = []
        self._open_until_s: float | None = None

    @property
    def open(self) -> bool:
        """True while dispatch is off."""
        return self._open_until_s is not None

    @property
    def note(self) -> str:
        """What to tell the user while it is open."""
        return f"{MAX_FAILURES} routes failed: dispatch is off for {REARM_S:g} s" if self.open else ""

    def turn(self, now_s: float, failures: int) -> bool:
        """Take in this many new failures; True when that opened it."""
        if self._open_until_s is not None:
            if now_s < self._open_until_s:
                return False
            self._open_until_s = None
        self._failed_at_s = [t for t in self._failed_at_s if now_s - t < REARM_S] + [now_s] * failures
        if len(self._failed_at_s) < MAX_FAILURES:
            return False
        self._failed_at_s.clear()
        self._open_until_s = now_s + REARM_S
        return True
