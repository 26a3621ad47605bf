"""A file that several processes write: a lock for those of ours, and a look at what others did to it meanwhile.

A write replaces the file by a new one under its name.  Others know nothing of our lock: one may have put another file
in its place since we read it, or hold the old one open and write into it after it is gone.  Both are noticed here; the
time between the last look and the renaming, some microseconds, is all that remains.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Final

from gemmtuned.configs.aiter_csv import MAX_BYTES
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.temporary import create, take_place, temporary_path

KEEP_S: Final = 5.0  # that a file which was replaced is watched: an editor that had it open has written by then
WAIT_S: Final = 30.0  # for another tuner's write, which takes milliseconds
_Facts = tuple[int, int, int]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of our tuners for the files of this folder. Raises TableError when another does not let go of it.

    The folder itself is locked, so that nothing is left beside the user's file.
    """
    try:
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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
                    raise TableError(f"{path}: another tuner has kept its folder locked for {WAIT_S:.0f} s") from None
                time.sleep(0.002)
            except OSError:  # a file system without locks: as before there were any
                break
        yield
    finally:
        os.close(fd)


@dataclass(slots=True)
class _Read:
    """One file that was read: still open, with what it was then."""

    fd: int
    facts: _Facts
    digest: bytes = b""
    since_s: float = 0.0

    def changed(self) -> bool:
        return _facts(os.fstat(self.fd)) != self.facts

    def text(self) -> bytes:
        """All that is in it now; what comes later is compared with this."""
        self.facts = _facts(os.fstat(self.fd))
        os.lseek(self.fd, 0, os.SEEK_SET)
        with os.fdopen(os.dup(self.fd), "rb") as file:
            found = file.read()
        self.facts = (*self.facts[:2], len(found))
        self.digest = hashlib.sha1(found, usedforsecurity=False).digest()
        return found


class Watched:
    """The file as it was read last, and those that were replaced a moment ago: what is written into them is seen."""

    def __init__(self) -> None:
        self._now: _Read | None = None
        self._before: list[_Read] = []

    def open(self, path: Path) -> list[str] | None:
        """The file's lines as it is now; None where it is missing or empty. Raises TableError."""
        if self._now is not None:
            self._before.append(self._now)
            self._now = None
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as err:
            raise TableError(f"{path}: cannot be read ({err.strerror or err})") from err
        facts = _facts(os.fstat(fd))
        if facts[2] > MAX_BYTES or not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise TableError(f"{path}: no file of at most {MAX_BYTES} bytes")
        self._now = _Read(fd, facts, since_s=time.monotonic())
        return _lines(self._now.text()) or None

    def written_after(self) -> list[list[str]]:
        """What somebody has written into files that were replaced: header and new lines of each that was added to.

        All lines of one that was written anew.
        """
        found = []
        for old in self._before:
            if not old.changed():
                continue
            size, digest = old.facts[2], old.digest
            text = old.text()
            added = hashlib.sha1(text[:size], usedforsecurity=False).digest() == digest
            found.append(_lines(text.split(b"\n", 1)[0] + b"\n" + text[size:] if added else text))
        late = time.monotonic() - KEEP_S
        for old in [old for old in self._before if old.since_s < late]:
            self._before.remove(old)
            os.close(old.fd)
        return [lines for lines in found if lines]

    def changed(self) -> bool:
        """Whether somebody has written into a file that we read, after that."""
        read = [*self._before, *([self._now] if self._now is not None else [])]
        return any(one.changed() for one in read)

    def replace(self, path: Path, write: Callable[[Path], None]) -> bool:
        """Put what `write` makes in the file's place, unless another file lies there by now. Raises TableError.

        What was added to the same file meanwhile is seen by written_after.
        """
        new, now = temporary_path(path), self._now
        try:
            os.close(create(new, path))
            write(new)
            there = _at(path)
            if (there and there[0]) != (now.facts[0] if now is not None else None):
                new.unlink()
                return False
            take_place(new, path)
        except (OSError, TableError) as err:
            new.unlink(missing_ok=True)
            if isinstance(err, TableError):
                raise
            raise TableError(f"{path}: cannot be written ({err.strerror or err})") from err
        return True

    def __del__(self) -> None:
        for one in [*self._before, *([self._now] if self._now is not None else [])]:
            os.close(one.fd)


def _lines(text: bytes) -> list[str]:
    return list(StringIO(text.decode("utf-8-sig", errors="replace"), newline=None))


def _facts(status: os.stat_result) -> _Facts:
    return status.st_ino, status.st_mtime_ns, status.st_size


def _at(path: Path) -> _Facts | None:
    try:
        return _facts(path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return None
