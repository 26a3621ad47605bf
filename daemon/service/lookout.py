"""A second look at devices and signals, from a thread of its own, while a turn of the daemon's loop is held up.

A disk may take a second for each fsync, and to store a verdict and publish it takes up to nine of them.  Python and
SQLite let other threads run meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.more_threads import begin
from gemmtuned.daemon.service.signals import StopSignal

if TYPE_CHECKING:
    from gemmtuned.daemon.service.service import Daemon

logger = logging.getLogger("gemmtuned.daemon")
HELD_UP_S: Final = 0.15  # turns take milliseconds
EACH_S: Final = 0.1
AT_REST_S: Final = 1.0  # without a worker that others could want to leave
HANGS_S: Final = 60.0  # then it is not said any more that the daemon is well


class Lookout:
    """Minds the turns of one daemon, as a context. alive: called meanwhile, for those who want signs of life."""

    def __init__(self, daemon: Daemon, stop: StopSignal, alive: Callable[[], object] = lambda: None) -> None:
        self._daemon, self._stop, self._alive = daemon, stop, alive
        self._since_s: float | None = None  # when the turn began that is being done, monotonic
        self._over, self._runs = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="gemmtuned-lookout", daemon=True)

    def __enter__(self) -> Lookout:
        self._runs = begin(self._thread, "a slow disk holds up what others wait for")
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._runs:
            self._thread.join()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """One turn, which is minded."""
        self._since_s = time.monotonic()
        try:
            yield
        finally:
            self._since_s = None

    def _run(self) -> None:
        while not self._over.wait(EACH_S if self._daemon.has_workers else AT_REST_S):
            since_s = self._since_s
            held_up_s = 0.0 if since_s is None else time.monotonic() - since_s
            if held_up_s > HELD_UP_S:
                try:
                    self._daemon.mind(time.time(), leave=self._stop.has_come)
                    if held_up_s < HANGS_S:
                        self._alive()
                except Exception:  # the turn itself looks at all of it again
                    logger.exception("the second look at devices failed while the disk was slow")
