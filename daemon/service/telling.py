"""What a daemon says of itself: daemon.json every two seconds, and in the log why nothing is tuned."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gemmtuned.daemon.device.advice import advice
from gemmtuned.daemon.status_file import Notice, SeatNotice, write_notice
from gemmtuned.daemon.timer import Timer

if TYPE_CHECKING:
    from gemmtuned.daemon.seats.seat import Seat
    from gemmtuned.daemon.service.upkeep import Upkeep

logger = logging.getLogger("gemmtuned.daemon")

NOTICE_S: Final = 2.0
WAITS_S: Final = 10.0  # without a device for this long: said in the log
SAY_AGAIN_S: Final = 3600.0
_FIRST: Final = ("tuning", "waiting", "stuck", "ready")  # the state of the daemon: the first of these that a seat is in


class Telling:
    """Keeps daemon.json up to date. home: where it lies; None for a run in the foreground, which writes none."""

    def __init__(self, home: Path | None, owner: str, *, now_s: float) -> None:
        self._home, self._owner, self._started_s = home, owner, now_s
        self._next, self._last_news = Timer(), object()
        self._waits_since_s = now_s
        self._waiting_told: dict[tuple[str, str], float] = {}
        self._forbidden = ""
        self.last: Notice | None = None

    def tell(
        self, now_s: float, seats: Sequence[Seat], upkeep: Upkeep, *, solved: int, forbidden: str, state: str = ""
    ) -> None:
        """Say what goes on, at once where it is news. forbidden: why nothing may be tuned; state: instead of theirs."""
        notices = [seat.notice() for seat in seats]
        states = {notice.state for notice in notices}
        state = state or ("paused" if forbidden else next((s for s in _FIRST if s in states), "waiting"))
        self.last = Notice(
            owner=self._owner,
            pid=os.getpid(),
            started_s=self._started_s,
            updated_s=now_s,
            state=state,
            reason=upkeep.trouble or forbidden or "; ".join(f"{n.name}: {n.reason}" for n in notices if n.reason),
            generation=max(upkeep.generation, 0),
            solved=solved,
            environment=next((seat.environment.key for seat in seats if seat.environment is not None), ""),
            seats=notices,
            elsewhere=upkeep.elsewhere,
        )
        news = (state, solved, [(n.state, n.problem) for n in notices])
        if news == self._last_news and not self._next.is_due(now_s):
            return
        self._last_news = news
        if self._forbidden and not forbidden and state != "stopped":
            # Else the log would end with it, though it waits for something else by now
            logger.info("goes on after=%r", self._forbidden)
            self._waiting_told.clear()
        self._forbidden = forbidden
        self._next.wait_until(now_s + NOTICE_S)
        self._log_waiting(now_s, notices, any(seat.in_use for seat in seats))
        if self._home is not None:
            write_notice(self._home, self.last)

    def _log_waiting(self, now_s: float, notices: Sequence[SeatNotice], in_use: bool) -> None:
        """An operator who looks at the log tomorrow sees why nothing was tuned, once for each reason and hour."""
        waiting = [notice for notice in notices if notice.state in ("waiting", "stuck") and notice.reason]
        if in_use:
            self._waits_since_s = now_s
            return
        if now_s - self._waits_since_s < WAITS_S:
            return
        for notice in waiting:
            # Who it is and how much it uses are left aside: names stand behind a comma or in brackets
            kind = re.sub(r"[\d.]+", "#", re.split(r",| \(", notice.reason)[0])
            if now_s - self._waiting_told.get((notice.id, kind), float("-inf")) >= SAY_AGAIN_S:
                self._waiting_told[notice.id, kind] = now_s
                level = logging.WARNING if notice.state == "stuck" else logging.INFO
                what = advice(notice.reason)
                logger.log(
                    level, "%s device=%s reason=%r what_to_do=%r", notice.state, notice.name, notice.reason, what
                )
