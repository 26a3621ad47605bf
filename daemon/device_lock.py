"""One daemon on a GPU at a time, whoever's it is and whatever its home: a lock file named by the GPU's UUID.

Held while a worker is there, so daemons of several users take turns.  The kernel frees it however its holder dies.  The
folder is one for all users of the machine (`GEMMTUNED_DEVICE_LOCKS`); containers that share a GPU must mount the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from gemmtuned.configs.solution import slug


class DeviceLock:
    """The lock of one device. who: of us, for the other daemon's message."""

    def __init__(self, folder: Path, device_id: str, who: str) -> None:
        self._path = folder / f"gemmtuned-{slug(device_id, 80)}.lock"
        self._who = who
        self._fd: int | None = None

    def take(self) -> str:
        """Hold it; "" when it is ours, else why it is not."""
        if self._fd is not None:
            return ""
        try:
            fd = self._open()
        except OSError as err:
            return f"{self._path}: cannot be opened ({err.strerror or err}). Set GEMMTUNED_DEVICE_LOCKS"
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            with contextlib.suppress(OSError):
                holder = os.pread(fd, 300, 0).decode(errors="replace").strip()
            os.close(fd)
            return f"another gemmtuned daemon tunes on it: {holder or 'it just started'}"
        self._fd = fd
        with contextlib.suppress(OSError):  # another user's file can be locked, but not written
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{self._who}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode(), 0)
        return ""

    def drop(self) -> None:
        """Let it go."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        flags = os.O_NOFOLLOW | os.O_CLOEXEC
        for _ in range(3):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                return os.open(self._path, os.O_RDWR | flags)
            with contextlib.suppress(FileNotFoundError):
                return os.open(self._path, os.O_RDONLY | flags)
            with contextlib.suppress(FileExistsError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o644)
        raise FileNotFoundError(str(self._path))
