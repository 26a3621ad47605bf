"""Starts and ends the worker of one device: held back after failures, alone on its device, ended for good.

A worker that is not gone STUCK_S after its SIGKILL is stuck in a driver.  Until it is gone it keeps the device's lock,
and nothing is started beside it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from gemmtuned.configs.errors import WorkerFailed
from gemmtuned.configs.solution import Environment
from gemmtuned.daemon.device.attribution import GOING_S
from gemmtuned.daemon.device.device_lock import Lock
from gemmtuned.daemon.seats import installed
from gemmtuned.daemon.seats.worker import Tuner
from gemmtuned.daemon.timer import Timer

logger = logging.getLogger("gemmtuned.daemon")

RESTS_S: Final = 60.0  # an unused worker holds 300 MiB; starting one takes seconds
START_AGAIN_S: Final = 5.0  # after a worker that never said hello; doubles each time
LONGEST_WAIT_S: Final = 600.0
STUCK_S: Final = 5.0
HELD_S: Final = 30.0  # how often it is seen that the lock is still ours
TAKEN_S: Final = 1.0  # how often a device that another daemon uses is asked for


class Keeper:
    """See the module. lock: shared with the daemons of others; always: start whether or not it can be had."""

    def __init__(self, device_id: str, make_worker: Callable[[str], Tuner], *, lock: Lock | None, always: bool) -> None:
        self.worker: Tuner | None = None
        self.make_worker = make_worker
        self.failed_starts = 0  # in a row
        self._failure = ""  # why none can be started
        self._stuck = ""  # why the last one cannot be ended
        self.taken = ""  # which other daemon tunes here
        self._device_id = device_id
        self._lock = lock
        self._always = always
        self._gone: Tuner | None = None  # killed, and not gone yet
        self._gone_s: float | None = None  # since when
        self._start = Timer(LONGEST_WAIT_S)
        self._needed_s = float("-inf")
        self._look = Timer(HELD_S)
        self._packages = installed.packages()  # when the last one started

    @property
    def trouble(self) -> str:
        """Why the last one cannot be ended, or none be started; "" where all is well."""
        return self._stuck or self._failure

    def start(self, now_s: float) -> None:
        """Start one, if it is time to and nobody else tunes here."""
        if not self._start.is_due(now_s):
            return
        self.taken = self._lock.take() if self._lock is not None else ""
        if self.taken and not self._always:
            self._start.wait_until(now_s + TAKEN_S)
            return
        self._look.wait_until(now_s + HELD_S)
        self._packages = installed.packages()
        try:
            self.worker = self.make_worker(self._device_id)
        except WorkerFailed as err:
            self.failed(str(err), now_s)

    def lost_lock(self, now_s: float) -> str:
        """Which other daemon holds the lock of a device where our worker is; "" when none does, or we need not go.

        The file may have been removed, and another daemon have locked a new one.
        """
        if self.worker is None or self._lock is None or self._always or not self._look.is_due(now_s):
            return ""
        self._look.wait_until(now_s + HELD_S)
        self.taken = self._lock.lost()
        return self.taken

    def failed(self, reason: str, now_s: float) -> None:
        """It never said hello: the next start waits, longer each time."""
        self.end()
        reason = ": ".join(filter(None, (installed.what_changed(), reason)))
        self.failed_starts += 1
        wait_s = min(START_AGAIN_S * 2 ** (self.failed_starts - 1), LONGEST_WAIT_S)
        self._start.wait_until(now_s + wait_s)
        self._failure = f"{reason}; next start from {time.strftime('%H:%M:%S', time.localtime(self._start.at_s))} on"
        logger.warning("worker start failed device=%s retry_s=%.0f reason=%r", self._device_id, wait_s, reason)

    def lost(self, now_s: float) -> None:
        """It died or was killed at work: what it held of the device must be gone before the next one comes."""
        self.end()
        if self._device_id != "cpu":
            self._start.wait_until(now_s + GOING_S)

    def said_hello(self) -> None:
        """It is well."""
        self.failed_starts = 0
        self._failure = ""

    def hurry(self) -> None:
        """Tell it to go, without waiting: whoever has several to end tells all of them first. From any thread."""
        if (worker := self.worker) is not None:
            worker.terminate()

    def end(self) -> None:
        """End it and all it started."""
        worker, self.worker = self.worker, None
        if worker is not None and not worker.stop():
            self._gone, self._gone_s = worker, None
        elif self._lock is not None and self._gone is None:
            self._lock.drop()

    def is_stuck(self, now_s: float) -> bool:
        """Whether a killed worker is still there: a moment at most, or where the CPUs are full a little longer."""
        if self._gone is None:
            return False
        if self._gone.stop():
            self._gone = None
            self._stuck = ""
            if self._lock is not None:
                self._lock.drop()
            return False
        if self._gone_s is None or now_s < self._gone_s:
            self._gone_s = now_s
        elif now_s - self._gone_s >= STUCK_S and not self._stuck:
            self._stuck = f"worker {self._gone.pid} cannot be killed: it is stuck in a driver of {self._device_id}"
            logger.error("worker stuck device=%s pid=%d", self._device_id, self._gone.pid)
        return True

    def retire(self, now_s: float, *, needed: bool) -> None:
        """End a worker that nobody has needed for a while, or that has imported packages older than an upgrade."""
        if self.worker is None or needed or self._needed_s > now_s:
            self._needed_s = now_s
        elif self.worker.environment is not None and (now_s - self._needed_s > RESTS_S or self._is_outdated()):
            self.end()

    def known(self, environment: Environment | None) -> Environment | None:
        """The environment of the last worker; None if the next one may have another, and has not said so yet."""
        return None if self.worker is None and self._is_outdated() else environment

    def _is_outdated(self) -> bool:
        """Whether packages were installed or upgraded since the last worker started.

        Where one has only gone, another version of it may be on its way: no worker could start meanwhile.
        """
        return not installed.packages() <= self._packages
