"""Signals that ask the daemon to stop. They only set a flag, and wake the loop."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator


class StopSignal:
    """Whether a signal has asked to stop. `code` is the exit code to end with, 0 while there was none."""

    def __init__(self, wake_fd: int) -> None:
        self.code = 0
        self._wake_fd = wake_fd

    def handle(self, number: int, frame: object) -> None:
        """Called by Python in the main thread, between two steps of it."""
        self.code = self.code or 128 + number

    @property
    def has_come(self) -> bool:
        """Whether any has come, though the main thread may be held up; for other threads."""
        return bool(self.code or select.select([self._wake_fd], [], [], 0)[0])

    def wait(self, seconds: float, sockets: list[int]) -> None:
        """Wait until a worker sends a message, a signal comes, or the time is over."""
        if not self.code:
            ready, _, _ = select.select([self._wake_fd, *sockets], [], [], seconds)
            if self._wake_fd in ready:
                os.read(self._wake_fd, 512)


@contextlib.contextmanager
def signals() -> Iterator[StopSignal]:
    """While it lasts SIGTERM, SIGINT and SIGHUP set a flag and wake the loop; then the former handlers are restored."""
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    stop = StopSignal(read_fd)
    closed = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)  # nohup has it ignored
    before = [(number, signal.signal(number, stop.handle)) for number in (signal.SIGTERM, signal.SIGINT, *closed)]
    fd_before = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(fd_before)
        for number, handler in before:
            signal.signal(number, handler)
        os.close(read_fd)
        os.close(write_fd)
