"""The daemon's socket `daemon.sock` in the home: who connects gets what goes on, as one JSON text, and that is all.

The loop hands over its newest notice; a thread answers from memory, and another one asks the database and the system
while somebody watches.  Neither can keep the loop from its work, and no answer names what the asker could not read in
the home: it is given to the daemon's own user and to root.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.more_threads import begin
from gemmtuned.daemon.status_file import Notice
from gemmtuned.daemon.watch.looks import Looks
from gemmtuned.db.lockfile import lies_at

logger = logging.getLogger("gemmtuned.daemon")

FILE: Final = "daemon.sock"
SCHEMA: Final = "gemmtuned.watch/1"
WATCHED_S: Final = 10.0  # after the last question nothing is looked up any more
SEND_S: Final = 1.0  # who does not read in this time gets no answer
_TURN_S: Final = 0.25
_PAUSE_S: Final = 0.05  # after an error, which may come again at once
_PEER: Final = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)


class Watch:
    """Answers until closed. Where no socket can be made, that is logged, and each `tell` tries again."""

    def __init__(self, home: Path, database: Path) -> None:
        self._newest: tuple[Notice, float] | None = None
        self._looks = Looks(database, lambda: self._newest[0].seats if self._newest else [])
        self._asked_s = float("-inf")
        self._watched = threading.Event()
        self._closing = False
        self._end_fd, self._wake_fd = os.pipe2(os.O_CLOEXEC)
        self._path = home / FILE
        self._socket: socket.socket | None = None
        self._which: tuple[int, int] | None = None  # the socket's file
        self._said_why = ""  # no socket could be made
        self._open()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._answer, self._look)]
        self._threads = [thread for thread in self._threads if begin(thread, "gemmtuned top gets no answer")]

    def tell(self, notice: Notice, *, used_today_s: float) -> None:
        """What the daemon does now; used_today_s: device time of today, all devices together.

        Where the socket's file has gone, with the home perhaps, another is made: only the daemon of this home calls.
        """
        self._newest = (notice, used_today_s)
        if self._socket is None or lies_at(self._path) != self._which:
            self._open()

    def _open(self) -> None:
        try:
            made = _listen(self._path)
        except OSError as err:
            if str(err) != self._said_why:
                logger.warning("no socket for gemmtuned top path=%s reason=%r", self._path, str(err))
            self._said_why = str(err)
            return
        before, self._socket = self._socket, made
        self._which, self._said_why = lies_at(self._path), ""
        os.write(self._wake_fd, b"\0")
        if before is not None:
            before.close()

    def close(self) -> None:
        """Stop answering; the socket's file is gone."""
        self._closing = True
        os.close(self._wake_fd)
        self._watched.set()
        for thread in self._threads:
            thread.join(2.0)
        if self._socket is not None:
            self._socket.close()
            with contextlib.suppress(OSError):
                self._path.unlink()
        os.close(self._end_fd)

    def _said(self) -> dict[str, Any]:
        newest = self._newest
        notice, used_s = (asdict(newest[0]), newest[1]) if newest else (None, 0.0)
        answer = {"schema": SCHEMA, "now_s": time.time(), "notice": notice}
        return {**answer, "used_today_s": used_s, **self._looks.said()}

    def _answer(self) -> None:
        while not self._closing:
            listening = self._socket
            try:
                waited = [self._end_fd] if listening is None else [self._end_fd, listening.fileno()]
                ready, _, _ = select.select(waited, [], [])
                if self._end_fd in ready:
                    os.read(self._end_fd, 64)
                elif listening is not None:
                    self._answer_one(listening)
            except (OSError, ValueError):  # who asked is gone, or does not read; no more files; another socket is used
                time.sleep(_PAUSE_S)

    def _answer_one(self, listening: socket.socket) -> None:
        asker, _ = listening.accept()
        with asker:
            if not _may_read(asker):
                return
            self._asked_s = time.monotonic()
            self._watched.set()
            asker.settimeout(SEND_S)
            asker.sendall(json.dumps(self._said()).encode())

    def _look(self) -> None:
        while not self._closing:
            self._watched.wait()
            while not self._closing and time.monotonic() - self._asked_s < WATCHED_S:
                self._looks.take(self._newest[0].generation if self._newest else -1)
                time.sleep(_TURN_S)
            if not self._closing and time.monotonic() - self._asked_s >= WATCHED_S:
                self._watched.clear()


def _listen(path: Path) -> socket.socket:
    """A listening socket at path, for its owner alone; whoever made the one that lies there is no more.

    Raises OSError, also when something else lies there.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(f"{path} is no socket of ours")
        path.unlink()
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with short(path) as name:
            made.bind(name)
        path.chmod(0o600)
        made.listen(16)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


@contextlib.contextmanager
def short(path: Path) -> Iterator[str]:
    """A name of this path that fits the 108 bytes of a socket's address, good while it is open."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        by_number = f"/proc/self/fd/{folder}"
        yield f"{by_number}/{path.name}" if os.path.isdir(by_number) else str(path)  # noqa: PTH112
    finally:
        os.close(folder)


def _may_read(asker: socket.socket) -> bool:
    """Whether our own user asks, or root."""
    _, uid, _ = _PEER.unpack(asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return uid in (0, os.geteuid())
