"""What a daemon's log says of the work that is left: after each minute of tuning, and how long the rest may take."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.errors import StoreError

if TYPE_CHECKING:
    from gemmtuned.daemon.seats.seat import Seat
    from gemmtuned.db.store import Store

logger = logging.getLogger("gemmtuned.daemon")

LEFT_S: Final = 60.0  # seconds of tuning between two lines


class Remaining:
    """See the module."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tuned_s = self._said_s = 0.0  # seconds of tuning: so far, and at the last line

    def turn(self, now_s: float, passed_s: float, seats: Sequence[Seat], solved: int) -> None:
        """passed_s: since the last turn; solved: verdicts so far, by which the time for the rest is reckoned."""
        if any(seat.tuning for seat in seats):
            self._tuned_s += passed_s
        if not solved or self._tuned_s - self._said_s < LEFT_S:
            return
        self._said_s = self._tuned_s
        environments = {seat.environment.key: seat.environment for seat in seats if seat.environment is not None}
        try:
            found = [self._store.leases.remaining(one, now_s=now_s) for one in environments.values()]
        except StoreError:  # upkeep says that
            return
        left = sum(one.queued + one.leased for one in found)
        if left:
            logger.info("left problems=%d solved=%d eta_s=%.0f", left, solved, self._tuned_s / solved * left)
