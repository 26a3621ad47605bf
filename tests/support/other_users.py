"""Counts of other users: their file beside our store, and a child that is another user."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from store_cases import new_store

from gemmtuned.db.store import Store

T = 1_800_000_000.0


class Two:
    """Our store and the file that others write."""

    def __init__(self, folder: Path) -> None:
        self.ours = new_store(folder / "ours")
        self.path = folder / "ingest" / "ingest.db"
        self.theirs = Store(self.path, locks=folder / "ingest")

    def take(self, now_s: float = T) -> int:
        return self.ours.ingest.take_from(self.path, now_s=now_s)

    def rows(self, sql: str) -> list[tuple[object, ...]]:
        conn = sqlite3.connect(self.ours.path)
        try:
            return conn.execute(sql).fetchall()
        finally:
            conn.close()


def as_user(uid: int, gid: int, act: Callable[[], object], groups: Sequence[int] = ()) -> str:
    """What act gives, or raises, in a child that is this user and in these groups, too."""
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.umask(0o022)
            os.setgroups(groups)
            os.setgid(gid)
            os.setuid(uid)
            said = str(act())
        except BaseException as err:
            said = f"{type(err).__name__}: {err}"
        os.write(write_fd, said.encode()[:60_000])
        os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said
