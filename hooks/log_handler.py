"""Our warnings in a program that has not set up logging: one line each on stderr, which says who speaks.

Python's own last resort prints the bare message.  As soon as the program has a handler, that one is left to it.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, TextIO

from gemmtuned.configs.stderr_lines import say

if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # it takes no parameter before Python 3.11


class Stderr(_StreamHandler):
    """Writes to what sys.stderr is at the moment: a progress bar puts itself below the lines."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class StderrLines(logging.Handler):
    """Writes `gemmtuned: <message>`; silent when anybody else handles our records."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line, whatever happens."""
        if logging.getLogger().handlers or len(logging.getLogger("gemmtuned").handlers) > 1:
            return
        try:
            cause = f": {record.exc_info[1]!r}" if record.exc_info else ""
            say(f"{record.getMessage()}{cause}")
        except Exception:
            self.handleError(record)


def speak_up() -> None:
    """Have warnings of the logger `gemmtuned` shown in any case; a second call changes nothing."""
    logger = logging.getLogger("gemmtuned")
    if not any(isinstance(handler, StderrLines) for handler in logger.handlers):
        logger.addHandler(StderrLines(logging.WARNING))
