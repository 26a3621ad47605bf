"""Keeps the hook's thread from reading the counters while a benchmark does."""

from __future__ import annotations

import sys
from typing import Any

from gemmtuned.configs.frame_lock import Running


class Paused(Running):
    """No flush runs until `resume`. Raises RuntimeError where one is going on that does not end."""

    def __init__(self, hook: Any) -> None:
        super().__init__(sys._getframe())
        if not hook.flusher.pause(self):
            raise RuntimeError("a flush that reads the same counters does not end")

    def is_over(self) -> bool:
        """Whether `resume` was called."""
        return self.done

    def resume(self) -> None:
        """Let flushes run."""
        self.done = True
