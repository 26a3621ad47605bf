"""The daemon's look at its database file, where somebody wrote over it in place: `cp`, `rsync --inplace`."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
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


OPEN = """
import sys
from pathlib import Path
from gemmtuned.db.store import Store
folder = Path(sys.argv[1])
Store(folder / "tune.db", locks=folder / "locks").refuse_newer()
"""


@pytest.mark.parametrize("by", ["the look", "a call", "another process", "nobody"])
def test_a_file_that_was_built_anew_was_not_replaced(store: Store, caplog: pytest.LogCaptureFixture, by: str) -> None:
    """One event has one warning: of the process that mends the file, or of the daemon that finds it mended."""
    caretaker, before = Caretaker(store), store.lies_at()
    caretaker.look(1000.0)
    store.close()
    if by == "the look":  # the header and the newest publication can be read
        with store.path.open("r+b") as file:
            file.seek(-8192, os.SEEK_END)
            file.write(os.urandom(8192))
        caretaker.begin(1000.0)
    elif by != "nobody":
        write_over(store.path, SCHEMA)
    if by == "a call":
        add(store, 1)
    elif by == "another process":
        subprocess.run([sys.executable, "-c", OPEN, str(store.path.parent)], check=True)
    elif by == "nobody":
        store.path.rename(store.path.with_name("elsewhere"))
        open_store(store.path.parent)

    for turn in range(200):
        caretaker.look(1002.0 + turn)
        if store.lies_at() != before and turn > 1:
            break
        time.sleep(0.02)
    told = [record.getMessage().split(" path=")[0] for record in caplog.records]
    others = {
        "another process": ["the database was damaged, and another process built it anew"],
        "nobody": ["the database was deleted or replaced, another file lies there"],
    }
    assert told == others.get(by, ["store is damaged", "store was damaged"])


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
