"""An exception from a signal's handler may come at any point of a call; the next call, and other programs, go on."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from gemmtuned.configs.errors import StoreError
from gemmtuned.db.connect import Connection


class Late(BaseException):
    pass


def cut_off(store: Connection, at: int) -> int:
    """Raise Late at one line of a write of the store's; how many there were."""
    seen = 0

    def local(_: FrameType, event: str, __: Any) -> Any:
        nonlocal seen
        seen += event == "line"
        if seen == at:
            raise Late
        return local

    sys.settrace(lambda frame, *_: local if frame.f_code is Connection._write.__code__ else None)
    try:
        store.write(lambda conn: conn.execute("SELECT 1").fetchall())
    finally:
        sys.settrace(None)
    return seen


def test_a_write_that_is_cut_off_anywhere_leaves_no_transaction(tmp_path: Path) -> None:
    def opened() -> Connection:
        return Connection(tmp_path / "shapes.db", locks=tmp_path, timeout_s=0.2, create=True)

    store, other = opened(), opened()
    lines = cut_off(store, 0)
    assert lines > 5
    for at in range(1, lines + 1):
        with pytest.raises(Late):
            cut_off(store, at)
        assert store.write(lambda _: 1) == 1, at
        assert other.write(lambda _: 2) == 2, at
    store.close()
    other.close()


def test_who_asks_in_the_middle_of_a_write_does_not_undo_it(tmp_path: Path) -> None:
    store = Connection(tmp_path / "shapes.db", locks=tmp_path, timeout_s=0.2, create=True)

    def work(conn: sqlite3.Connection) -> bool:
        with pytest.raises(StoreError):
            store.read(lambda _: 1)
        return conn.in_transaction

    assert store.write(work)
    store.close()


def test_what_is_left_open_is_rolled_back(tmp_path: Path) -> None:
    """The exception may come in the ROLLBACK of another one, too."""
    store = Connection(tmp_path / "shapes.db", locks=tmp_path, timeout_s=0.2, create=True)
    conn = store._handle.ready()
    conn.execute("BEGIN IMMEDIATE")
    assert store.read(lambda _: 1) == 1
    assert not conn.in_transaction
    store.close()
