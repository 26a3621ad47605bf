"""How much of the machine's CPUs other programs use while a command measures something."""

from __future__ import annotations

import os
import time


class Others:
    """Measures how much CPU time other programs use from now on.

    What our own children used is only known once they have ended, so ask then.
    """

    def __init__(self) -> None:
        self._at_s, self._before_s = time.monotonic(), self._used_s()

    def share(self) -> float:
        """The share of all CPUs' time, 0 to 1."""
        span_s = max(time.monotonic() - self._at_s, 1e-3) * (os.cpu_count() or 1)
        return min(max(self._used_s() - self._before_s, 0.0) / span_s, 1.0)

    @staticmethod
    def _used_s() -> float:
        import psutil

        every, own = psutil.cpu_times(), os.times()
        busy_s = every.user + every.nice + every.system
        return float(busy_s - own.user - own.system - own.children_user - own.children_system)


def crowd() -> str:
    """`load 12.0 on 2 CPUs` where more threads want a CPU than there are; "" elsewhere, and where nobody says it."""
    try:
        load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    except OSError:
        return ""
    return f"load {load:.1f} on {cpus} CPUs" if load > cpus else ""
