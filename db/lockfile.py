"""One lock file around every write and every checkpoint of a database.

SQLite before 3.51.3 can lose committed pages when a write and a checkpoint of two connections overlap
(sqlite.org/wal.html#walresetbug), and its own busy handler is unfair: with this lock in front eight writers wait at
most a tenth as long.  The kernel frees it when its holder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import time
from pathlib import Path


class LockFile:
    """An exclusive lock between processes and between the threads of this one. Not re-entrant.

    A forked child drops its copy of the descriptor (`after_fork`): a copy left open would keep the lock held after
    the parent was killed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._thread = threading.Lock()

    def acquire(self, timeout_s: float) -> bool:
        """True once it is ours, False when others held it for all of timeout_s. Raises OSError."""
        deadline = time.monotonic() + timeout_s
        if not self._thread.acquire(timeout=max(timeout_s, 0)):
            return False
        try:
            if self._fd is None:
                self._fd = _open(self.path)
            pause_s = 0.0005
            while True:
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:  # noqa: PERF203
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        self._thread.release()
                        return False
                    time.sleep(min(pause_s, left_s))
                    pause_s = min(pause_s * 1.5, 0.008)
                else:
                    return True
        except BaseException:
            self._thread.release()
            raise

    def release(self) -> None:
        """Give it back; only its holder may call this."""
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._thread.release()

    def close(self) -> None:
        """Give the descriptor back. The lock must not be held."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def after_fork(self) -> None:
        """In the child: forget what the parent holds. Closing a copy does not free the parent's lock."""
        self._thread = threading.Lock()
        self.close()


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags)
        with contextlib.suppress(FileExistsError):  # another was faster
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            os.fchmod(fd, file_mode(path.parent))  # whatever the umask: a group may share it
            return fd


def file_mode(folder: Path) -> int:
    """Mode of a new file: the group may write it where it may write the folder.

    It may read it where the folder is handed on to the group (setgid) and readable.
    """
    mode = folder.stat().st_mode
    if mode & stat.S_IWGRP:
        return 0o660
    return 0o640 if mode & stat.S_ISGID and mode & stat.S_IRGRP else 0o600
