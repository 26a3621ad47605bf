"""pytest catches what is logged by a handler on each logger that keeps its messages from the root, six times a test.

torch has some forty of those, and 250 others are walked through: it was half of what an empty test took, 1 ms.  Ours,
which a test may keep from the root, and the root itself are all that tests look at.
"""

from __future__ import annotations

import logging
from typing import Any

import _pytest.logging

OURS = "gemmtuned"


class CatchingLogs:
    """What stands in for pytest's `catching_logs`: the handler is on the root, and on our logger where it has to be.

    level: of the handler, and of the root where that says less; None leaves both as they are.
    """

    def __init__(self, handler: Any, level: int | None = None) -> None:
        self.handler, self._level = handler, level
        self._on: list[logging.Logger] = []
        self._before = 0

    def __enter__(self) -> Any:
        root, ours = logging.getLogger(), logging.getLogger(OURS)
        self._on = [root] if ours.propagate else [root, ours]
        for logger in self._on:
            logger.addHandler(self.handler)
        if self._level is not None:
            self.handler.setLevel(self._level)
            self._before = root.level
            root.setLevel(min(root.level, self._level))
        return self.handler

    def __exit__(self, *error: object) -> None:
        if self._level is not None:
            logging.getLogger().setLevel(self._before)
        for logger in self._on:
            logger.removeHandler(self.handler)


def take_place() -> None:
    """For all of this run."""
    _pytest.logging.catching_logs = CatchingLogs  # type: ignore[assignment, misc]
