"""What files of ours must not change for the program: its standard streams, and what is in its root folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.unpatched import builtins, os

__builtins__ = builtins

_STREAMS = 3


def root() -> tuple[int, int]:
    """Which folder `/` is; chroot and pivot_root change it."""
    facts = os.stat("/")
    return facts.st_dev, facts.st_ino


def stay_out(path: Path, began: tuple[int, int]) -> None:
    """Raise GemmtunedError where the file's folder would have to be made under another root than the first."""
    if root() != began and not path.parent.is_dir():
        raise GemmtunedError(f"the program has changed its root folder, and there is no {path.parent} in the new one")


@contextmanager
def streams_kept() -> Iterator[None]:
    """While SQLite has files open: it gives /dev/null, for good, the number of each standard stream that is closed."""
    ours: dict[int, int] = {}
    try:
        while not all(map(_is_open, range(_STREAMS))):
            number = os.memfd_create("gemmtuned")
            ours[number] = os.fstat(number).st_ino
        yield
    finally:
        for number, inode in ours.items():
            if _is_open(number, inode):  # else the program has put something else there
                os.close(number)


def _is_open(number: int, inode: int | None = None) -> bool:
    try:
        return inode in (None, os.fstat(number).st_ino)
    except OSError:
        return False
