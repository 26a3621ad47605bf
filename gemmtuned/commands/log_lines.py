"""Log lines for whoever reads stderr: one who does not (Ctrl-S, a pager, a stuck collector of logs) holds nobody up."""

from __future__ import annotations

import logging
import select
from typing import Final

from gemmtuned.hooks.log_handler import Stderr

WAIT_MS: Final = 50  # for room in the pipe or terminal; then a line is dropped


class LogLines(Stderr):
    """Drops lines that would have to wait, and says how many once there is room again."""

    def __init__(self) -> None:
        super().__init__()
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, or count it."""
        if not self._has_room():
            self._dropped += 1
            return
        dropped, self._dropped = self._dropped, 0
        if dropped:
            text = "log lines dropped count=%d reason='nobody read them'"
            super().emit(logging.LogRecord("gemmtuned", logging.WARNING, __file__, 0, text, (dropped,), None))
        super().emit(record)

    def _has_room(self) -> bool:
        try:
            room = select.poll()
            room.register(self.stream.fileno(), select.POLLOUT)
        except (OSError, ValueError, AttributeError):  # no file, or none any more
            return True
        return bool(room.poll(0 if self._dropped else WAIT_MS))
