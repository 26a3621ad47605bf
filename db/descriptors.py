"""The descriptors that SQLite has in a program that is not ours, which may close them at any moment: closerange does.

Its next files then get these numbers, and SQLite would go on writing into them.  What SQLite has open is known by
device and inode, so it is looked at before each step that writes.  Microseconds remain between a look and the step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gemmtuned.configs.unpatched import builtins, os

__builtins__ = builtins

_LOOKS: Final = 8192  # descriptors that are looked at; a search that finds nothing until then is given up


class Descriptors:
    """Made before SQLite opens its files, which get the lowest numbers that are free."""

    def __init__(self, path: Path) -> None:
        self._paths = [f"{path}{end}" for end in ("", "-wal", "-shm")]
        self._held: dict[int, tuple[int, int]] = {}
        self._lowest = 0
        try:
            self._lowest = os.open("/", os.O_PATH | os.O_CLOEXEC)
            os.close(self._lowest)
        except OSError:  # none is free: SQLite gets none, either
            pass

    def find(self) -> None:
        """Take those that are open now for SQLite's."""
        wanted = set()
        for path in self._paths:
            try:
                facts = os.stat(path)
                wanted.add((facts.st_dev, facts.st_ino))
            except OSError:  # noqa: PERF203
                pass
        held: dict[int, tuple[int, int]] = {}
        for fd in range(self._lowest, self._lowest + _LOOKS):
            if len(held) == len(wanted):
                break
            which = identity_of(fd)
            if which in wanted and which not in held.values():
                held[fd] = which
        self._held = held

    def are_there(self) -> bool:
        """Whether each is what it was."""
        return all(identity_of(fd) == which for fd, which in self._held.items())


def identity_of(fd: int) -> tuple[int, int] | None:
    """(st_dev, st_ino) of an open file; None where the descriptor is closed."""
    try:
        facts = os.fstat(fd)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino
