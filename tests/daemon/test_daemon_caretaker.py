"""The daemon's look at its database file, where somebody wrote over it in place: `cp`, `rsync --inplace`."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_cases import NEW, add, found, open_store, problem

from gemmtuned.configs.errors import StoreError
from gemmtuned.daemon.service.caretaker import Caretaker
from gemmtuned.db import queries
from gemmtuned.db.migrations import SCHEMA
from gemmtuned.db.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    one = open_store(tmp_path)
    for m in range(1, 100):
        add(one, 2, m)
    one.solutions.install(None, [found(problem())], environment=NEW, now_s=1000.0)
    one.checkpoint()
    yield one
    one.close()


def write_over(path: Path, version: int) -> None:
    """With a file of this schema that cannot be read: the same name, number and size."""
    data = bytearray(path.read_bytes())
    data[60:64] = version.to_bytes(4, "big")
    data[100:8192] = os.urandom(8092)
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, data, 0)
    os.close(fd)


def test_what_cannot_be_read_any_more_is_mended_at_once_and_not_a_day_later(store: Store) -> None:
    """What the daemon has open knows its old pages, and would go on with them."""
    caretaker = Caretaker(store)
    assert not caretaker.look(1000.0)
    write_over(store.path, SCHEMA)

    assert caretaker.look(1002.0)
    add(store, 1)
    assert store.check() == []


def test_what_a_newer_version_wrote_and_cannot_be_read_is_said_to_be_that(store: Store) -> None:
    caretaker = Caretaker(store)
    assert not caretaker.look(1000.0)
    write_over(store.path, SCHEMA + 1)
    before = store.path.read_bytes()

    assert caretaker.look(1002.0)
    for now_s in (1004.0, 1006.0):
        with pytest.raises(StoreError, match="Upgrade gemmtuned here"):
            caretaker.look(now_s)
    assert store.path.read_bytes() == before


def test_a_database_that_could_not_be_asked_was_not_written_over(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caretaker = Caretaker(store)
    assert not caretaker.look(1000.0)
    add(store, 1)
    store.checkpoint()

    def fails(path: Path) -> int:
        raise StoreError(f"{path}: cannot be opened: too many open files") from sqlite3.OperationalError(
            "unable to open"
        )

    with monkeypatch.context() as patch:
        patch.setattr(queries, "generation", fails)
        with pytest.raises(StoreError, match="too many open files"):
            caretaker.look(1002.0)
    assert not caretaker.look(1004.0)
    assert "written over" not in caplog.text
