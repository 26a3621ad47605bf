"""One daemon of a home at a time, by a lock that the kernel frees however its holder ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.manifest import make_folder
from gemmtuned.configs.settings import Settings
from gemmtuned.db.faults import no_folder, store_error
from gemmtuned.db.lockfile import holder, open_lock


class AnotherRuns(Exception):
    """The daemon's lock is held."""


@contextlib.contextmanager
def only_daemon(settings: Settings) -> Iterator[None]:
    """Hold the lock that makes us the one daemon of this home; the kernel frees it however we die."""
    path = settings.locks / "daemon.lock"
    try:
        make_folder(settings.home)
        fd = open_lock(path)
    except OSError as err:
        in_the_way = no_folder(path)
        why = f"{in_the_way} is a file" if in_the_way else err.strerror or err
        raise TableError(f"{path}: cannot be made ({why}). Set GEMMTUNED_HOME to a folder of your own") from err
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            raise AnotherRuns(f"another daemon runs for {settings.home}: {_holder(path, fd)}") from err
        except OSError as err:
            raise store_error(err, path) from err
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def _holder(path: Path, fd: int) -> str:
    """What the other daemon wrote there, and who holds the lock if that is somebody else."""
    said = os.pread(fd, 200, 0).decode(errors="replace").strip() or "it just started"
    found = holder(path)
    if found and not said.startswith(found.partition(" (")[0] + ","):
        return f"its lock {path} is held by {found}; the last daemon to hold it: {said}"
    return said
