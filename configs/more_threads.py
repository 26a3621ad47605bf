"""A thread more, where the system has one: TasksMax= of a service, pids.max of a container and ulimit -u bound them."""

from __future__ import annotations

import logging
import threading

log = logging.getLogger(__name__)


def begin(thread: threading.Thread, without: str) -> bool:
    """Start it. False where there is none to be had, with a warning of what goes on without it."""
    try:
        thread.start()
    except RuntimeError as err:
        log.warning("no thread to be had without_it=%r reason=%r", without, str(err))
        return False
    return True
