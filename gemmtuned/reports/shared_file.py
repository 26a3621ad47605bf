"""A file that several processes write: a lock for those of ours, and a look at what others did to it meanwhile.

A write replaces the file by a new one under its name.  Others know nothing of our lock: one may have put another file
in its place since we read it, or hold the old one open and write into it after it is gone.  Both are noticed here; the
time between the last look and the renaming, some microseconds, is all that remains.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Final

from gemmtuned.configs.aiter_csv import MAX_BYTES
from gemmtuned.configs.errors import TableError

WAIT_S: Final = 30.0  # for another tuner's write, which takes milliseconds
_Facts = tuple[int, int, int]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone among those that write this file with us. Raises TableError when another does not let go of it."""
    name = path.with_name(f".{path.name}.lock")
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as err:
        raise TableError(f"{path}: cannot be written ({err.strerror or err})") from err
    try:
        until = time.monotonic() + WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TableError(f"{path}: another tuner has kept it locked for {WAIT_S:.0f} s ({name})") from None
                time.sleep(0.01)
            except OSError:  # a file system without locks: as before there were any
                break
        yield
    finally:
        os.close(fd)


class Watched:
    """The file as it was read last, held open: what is written into it later is seen."""

    def __init__(self) -> None:
        self._fd = -1
        self._facts: _Facts | None = None

    def open(self, path: Path) -> list[str] | None:
        """Its lines as it is now; None where there is none, or nothing in it. Raises TableError."""
        self._close()
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as err:
            raise TableError(f"{path}: cannot be read ({err.strerror or err})") from err
        return self._lines(path) or None

    def written_after(self) -> list[str] | None:
        """The lines of the file that was replaced, where somebody has written into it since."""
        if self._fd < 0 or not self.changed():
            return None
        return self._lines(Path()) or None

    def changed(self) -> bool:
        """Whether somebody has written into the file that we read last."""
        return self._fd >= 0 and _facts(os.fstat(self._fd)) != self._facts

    def replace(self, path: Path, write: Callable[[Path], None]) -> bool:
        """Put what `write` makes in the file's place, unless it is no longer what was read. Raises TableError."""
        new = path.with_name(f".{path.name}.{os.getpid()}.new")
        write(new)
        try:
            if _at(path) != self._facts or self.changed():
                new.unlink()
                return False
            new.replace(path)
        except OSError as err:
            new.unlink(missing_ok=True)
            raise TableError(f"{path}: cannot be written ({err.strerror or err})") from err
        return True

    def _lines(self, path: Path) -> list[str]:
        self._facts = _facts(os.fstat(self._fd))
        if self._facts[2] > MAX_BYTES:
            raise TableError(f"{path}: {self._facts[2]} bytes, at most {MAX_BYTES} are read")
        os.lseek(self._fd, 0, os.SEEK_SET)
        with os.fdopen(os.dup(self._fd), "rb") as file:
            text = file.read().decode("utf-8-sig", errors="replace")
        return list(StringIO(text, newline=None))

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._facts = -1, None

    def __del__(self) -> None:
        self._close()


def _facts(stat: os.stat_result) -> _Facts:
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _at(path: Path) -> _Facts | None:
    try:
        return _facts(path.stat())
    except FileNotFoundError:
        return None
