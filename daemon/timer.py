"""When a thing that is done again and again is due next."""

from __future__ import annotations


class Timer:
    """Due at once, and then whenever the time that `wait_until` named has come.

    longest_s: that it ever waits.  One that would be due later than that is due: the clock was set back, and nothing
    must wait for hours.
    """

    def __init__(self, longest_s: float = 120.0) -> None:
        self.at_s = float("-inf")
        self._longest_s = longest_s

    def is_due(self, now_s: float) -> bool:
        """Whether that time has come."""
        return not self.at_s - self._longest_s <= now_s < self.at_s

    def wait_until(self, at_s: float) -> None:
        """Be due at this second, longest_s from now at most."""
        self.at_s = at_s

    def hurry(self) -> None:
        """Be due now."""
        self.at_s = float("-inf")
