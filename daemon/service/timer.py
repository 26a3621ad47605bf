"""When a thing that is done again and again is due next."""

from __future__ import annotations

from typing import Final

_LONGEST_S: Final = 120.0  # that any of them waits


class Timer:
    """Due at once, and then whenever the time that `wait_until` named has come.

    One that would be due in more than two minutes is due: the clock was set back, and nothing must wait for hours.
    """

    def __init__(self) -> None:
        self.at_s = float("-inf")

    def is_due(self, now_s: float) -> bool:
        """Whether that time has come."""
        return not self.at_s - _LONGEST_S <= now_s < self.at_s

    def wait_until(self, at_s: float) -> None:
        """Be due at this second, two minutes from now at most."""
        self.at_s = at_s

    def hurry(self) -> None:
        """Be due now."""
        self.at_s = float("-inf")
