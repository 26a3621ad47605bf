"""The times of a fleet, each by a rule from those before it; fleet_host.py of the tests shrinks them by the same rules.

    a request, with its tries, ends within              REQUEST_S
    an exchange begins nothing more after               WORK_S
    and is ended at                                     MOST_S = WORK_S + 2 * REQUEST_S
    so a name older than this is complete               SLACK_S = MOST_S + REQUEST_S
    a daemon that no exchange reached for               ALONE_S = 3 * EVERY_S      tunes what it likes
    a claim holds for                                   LEASE_S > ALONE_S + MOST_S

An exchange under way counts as reached: however long one takes (MOST_S at most), a daemon does not take itself for cut
off because of it (Mark).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

REQUEST_S: Final = 60.0  # three tries of 20 s (buckets.py)
WORK_S: Final = 120.0
MOST_S: Final = WORK_S + 2 * REQUEST_S
SLACK_S: Final = MOST_S + REQUEST_S
EVERY_S: Final = 60.0
ALONE_S: Final = 3 * EVERY_S
LEASE_S: Final = 1800.0
KILL_S: Final = 10.0  # what ending a child and noting it may take


@dataclass(frozen=True, slots=True)
class Pace:
    """How a daemon exchanges: every every_s, after soonest_s when it has nothing left that it claimed.

    An exchange that brought nothing then doubles that, up to every_s: while others tune the last problems, a thousand
    hosts that wait for them ask once a minute.
    retry_s: after an exchange that failed, twice as long after each further one, up to every_s / 2: who waits for the
    others to be reached again waits for less than every_s.  Each wait is up to a fifth longer or shorter, so that
    hosts started together do not all ask in one second.
    """

    every_s: float = EVERY_S
    soonest_s: float = 5.0
    retry_s: float = 5.0
    look_s: float = 1.0
    lease_s: float = LEASE_S
    work_s: float = WORK_S
    most_s: float = MOST_S
    alone_s: float = ALONE_S

    def wait_s(self, failed: int, *, asked: bool, fruitless: int = 0) -> float:
        """How long after the begin of an exchange the next begins.

        failed: exchanges that failed since one did not.  fruitless: those since one sent, fetched or claimed something.
        """
        if failed:
            wait_s = min(self.retry_s * 2.0 ** min(failed - 1, 16), max(self.every_s / 2, self.retry_s))
        else:
            wait_s = min(self.soonest_s * 2.0 ** min(fruitless, 16), self.every_s) if asked else self.every_s
        return wait_s * random.uniform(0.8, 1.2)  # noqa: S311


PACE: Final = Pace()


@dataclass(slots=True)
class Mark:
    """Until when a daemon leases only what it has claimed, by the clock of this host: each method gives the new time.

    A first exchange counts as one that may succeed: a daemon that starts waits for it.
    """

    pace: Pace
    until_s: float = 0.0
    _reached_s: float | None = field(default=None, init=False)  # when an exchange succeeded last
    _is_first: bool = field(default=True, init=False)

    def begin(self, now_s: float) -> float:
        """An exchange begins: who is not alone by now will not be while it lasts."""
        if self._is_first or now_s < self.until_s:
            self.until_s = max(self.until_s, now_s + self.pace.most_s + KILL_S)
        self._is_first = False
        return self.until_s

    def reached(self, now_s: float, *, claims: bool = True) -> float:
        """An exchange succeeded. claims: False where nothing can be claimed: then a daemon tunes what it likes."""
        self._reached_s = now_s if claims else None
        self.until_s = now_s + self.pace.alone_s if claims else 0.0
        return self.until_s

    def failed(self) -> float:
        """An exchange failed: what counts is when one last did not."""
        self.until_s = 0.0 if self._reached_s is None else self._reached_s + self.pace.alone_s
        return self.until_s
