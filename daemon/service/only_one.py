"""One daemon of a home at a time, by a lock that the kernel frees however its holder ends."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from gemmtuned.configs.errors import StoreError, TableError
from gemmtuned.configs.manifest import make_folder
from gemmtuned.configs.open_files import limit_reached
from gemmtuned.configs.settings import Settings
from gemmtuned.db.descriptors import identity_of
from gemmtuned.db.faults import store_error
from gemmtuned.db.lockfile import STOPPED, holder, lies_at, open_lock, way_out

logger = logging.getLogger("gemmtuned.daemon")


class AnotherRuns(Exception):
    """The daemon's lock is held."""


class OnlyDaemon:
    """The lock that makes us the one daemon of this home. Raises AnotherRuns, TableError."""

    def __init__(self, settings: Settings) -> None:
        self._home, self._path = settings.home, settings.locks / "daemon.lock"
        self._said = ""
        self._fd = self._take()

    def mind(self) -> None:
        """Take the lock that lies there now, where ours was removed with the home: another daemon could hold that one.

        Raises AnotherRuns when one does.
        """
        if lies_at(self._path) == identity_of(self._fd):
            return
        try:
            fd = self._take()
        except (TableError, StoreError) as err:  # tried again at the next turn
            if str(err) != self._said:
                logger.warning("the lock of this daemon was removed, and cannot be made anew reason=%r", str(err))
            self._said = str(err)
            return
        os.close(self._fd)
        self._fd, self._said = fd, ""
        logger.warning(
            "the home was removed or replaced under this daemon path=%s: it goes on in a new one", self._home
        )

    def close(self) -> None:
        """Let it go."""
        os.close(self._fd)

    def _take(self) -> int:
        path = self._path
        try:
            make_folder(self._home)
            fd = open_lock(path)
        except OSError as err:
            full = limit_reached(err)
            if full:
                raise TableError(f"{path}: cannot be made: {full}") from err
            help_ = way_out(err) or ". Set GEMMTUNED_HOME to a folder of your own"
            raise TableError(f"{path}: cannot be made ({err.strerror or err}){help_}") from err
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"pid {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode(), 0)
            except BlockingIOError as err:
                raise AnotherRuns(f"another daemon runs for {self._home}: {_holder(path, fd)}") from err
            except OSError as err:
                raise store_error(err, path) from err
        except BaseException:
            os.close(fd)
            raise
        return fd


@contextlib.contextmanager
def only_daemon(settings: Settings) -> Iterator[OnlyDaemon]:
    """Hold the lock that makes us the one daemon of this home; the kernel frees it however we die."""
    lock = OnlyDaemon(settings)
    try:
        yield lock
    finally:
        lock.close()


def _holder(path: Path, fd: int) -> str:
    """What the other daemon wrote there, and who holds the lock if that is somebody else."""
    said = os.pread(fd, 200, 0).decode(errors="replace").strip() or "it just started"
    found = holder(path)
    if found and not said.startswith(found.partition(" (")[0] + ","):
        return f"its lock {path} is held by {found}; the last daemon to hold it: {said}"
    return f"{said}, {found}" if STOPPED in found else said
