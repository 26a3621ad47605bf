"""Tell systemd that we are ready and alive: one datagram to the socket it names, nothing where it names none."""

from __future__ import annotations

import contextlib
import socket
from typing import Final

from gemmtuned.configs.settings import notify_socket, watchdog_s

EXTEND_S: Final = 30  # from now on


class ServiceManager:
    """address: of the socket, "" outside of systemd.  watchdog_s: it wants a sign of life at least this often."""

    def __init__(self, address: str | None = None, every_s: float | None = None) -> None:
        self._address = notify_socket() if address is None else address
        every_s = watchdog_s() if every_s is None else every_s
        self._every_s = every_s / 3 if every_s else None  # late once or twice is no reason to be killed
        self._alive_at_s = self._busy_at_s = float("-inf")

    def ready(self, status: str) -> None:
        """Started: units that wait for us may start."""
        self._send(f"READY=1\nSTATUS={status}")

    def not_started(self, why: str) -> None:
        """Why we leave before we were ready: a unit then fails with that as its status, whatever the exit code."""
        self._send(f"STATUS={why}")

    def alive(self, now_s: float, status: str) -> None:
        """Called at every turn, monotonic seconds; sends now and then."""
        if self._every_s is not None and now_s >= self._alive_at_s:
            self._alive_at_s = now_s + self._every_s
            self._send(f"WATCHDOG=1\nSTATUS={status}")

    def busy(self, now_s: float, status: str) -> None:
        """Called all the time in what takes longer than a turn, also before we are ready: no limit shall end us."""
        if self._address and now_s >= self._busy_at_s:
            self._busy_at_s = now_s + 5.0
            self._send(f"WATCHDOG=1\nEXTEND_TIMEOUT_USEC={EXTEND_S * 1_000_000}\nSTATUS={status}")

    def stopping(self) -> None:
        """On the way out."""
        self._send("STOPPING=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
        ):
            sock.setblocking(False)  # one who does not read must not hold us up
            sock.connect(address)
            sock.send(text.replace("\n\n", "\n").encode(errors="replace")[:4096])
