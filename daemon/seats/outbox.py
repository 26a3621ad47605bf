"""What a seat has to write to the store: taken off only once written, so a busy store delays and loses nothing."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from gemmtuned.configs.errors import StoreError
from gemmtuned.daemon.seats.work_queue import HOLD_S

logger = logging.getLogger("gemmtuned.daemon")


class Outbox:
    """Writers wait in a row; each is called with the time and may raise StoreError."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[float], object]] = deque()
        self._since_s: float | None = None  # since when the store refuses
        self.trouble = ""
        self.overdue = False  # results were dropped: the lease they belong to has lapsed

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def append(self, write: Callable[[float], object]) -> None:
        """To be written after all that waits."""
        self._waiting.append(write)

    def write(self, now_s: float) -> bool:
        """Write what waits; False when the store cannot take it now."""
        self.overdue = False
        while self._waiting:
            try:
                self._waiting[0](now_s)
            except StoreError as err:
                if self._since_s is None or now_s < self._since_s:
                    self._since_s = now_s
                    logger.warning("store not written, tried again each turn reason=%r", str(err))
                elif now_s > self._since_s + HOLD_S:  # the lease has lapsed: it will be measured anew
                    logger.error("results dropped count=%d reason=%r", len(self._waiting), str(err))
                    self._waiting.clear()
                    self.overdue = True
                self.trouble = str(err)
                return False
            self._waiting.popleft()
            self._since_s = None
            self.trouble = ""
        return True
