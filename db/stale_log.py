"""The log of a database that lay here before: `mv` puts another file in its place, and leaves the log.

SQLite would take it for the new file's and read its pages over those of that, which is then damaged.  It is recognised
by what was seen of it beside the file before: its number, which a later log may have again, and the first half of its
salt, which rises by one each time a log begins anew and is drawn by chance for another one.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from gemmtuned.configs.unpatched import builtins, os
from gemmtuned.db.files import identity
from gemmtuned.db.lockfile import out_of_the_way

__builtins__ = builtins

SET_ASIDE: Final = ".replaced-wal"  # behind the database's name: one, for who wants the last counts of the file before
_BEGAN_ANEW: Final = 1 << 20  # times at most, in the life of a program


class Log:
    """What a process has seen of the log of its database."""

    def __init__(self) -> None:
        self._db: tuple[int, int] | None = None
        self._log: tuple[int, int] | None = None
        self._salt: int | None = None

    def note(self, path: Path, db: tuple[int, int] | None) -> None:
        """The database at path is open, and is that file: the log beside it is its own, once it holds anything."""
        log = identity(_log_of(path))
        if self._salt is not None and (db, log) == (self._db, self._log):
            return
        salt = _salt(path)
        if identity(path) == db:  # else it was replaced just now, and what was read may be that one's log
            self._db, self._log, self._salt = db, log, salt

    def is_of_another(self, path: Path, db: tuple[int, int]) -> bool:
        """Whether what lies beside this database, which is not open yet, is the log of the file before."""
        if self._db in (None, db) or self._salt is None or identity(_log_of(path)) != self._log:
            return False
        salt = _salt(path)
        return salt is not None and (salt - self._salt) % (1 << 32) < _BEGAN_ANEW


def lies_at(path: Path) -> bool:
    """Whether a log, or what its users share, lies beside where a database would."""
    return any(identity(f"{path}{end}") is not None for end in ("-wal", "-shm"))


def put_away(path: Path) -> Path:
    """Move the log that lies beside this database out of the way, under the lock; what others share goes with it."""
    to = path.with_name(path.name + SET_ASIDE)
    with contextlib.suppress(FileNotFoundError):
        os.replace(_log_of(path), to)
    with contextlib.suppress(FileNotFoundError):
        path.with_name(f"{path.name}-shm").unlink()
    return to


def _log_of(path: Path) -> str:
    return f"{path}-wal"  # a text: it is asked for a dozen times a flush


def _salt(path: Path) -> int | None:
    """The salt of a log that holds anything; None of others.

    SQLite's locks are on the other two files, so closing the log releases none.
    """
    try:
        fd = out_of_the_way(os.open(_log_of(path), os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return None
    try:
        head = os.read(fd, 32)
    finally:
        os.close(fd)
    return int.from_bytes(head[16:20], "big") if len(head) == 32 else None
