"""A database that `mv` puts in the place of one in use does not get its log, whoever opens it first."""

from __future__ import annotations

import gc
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hooked import opened
from store_cases import add, open_store

from gemmtuned.configs.errors import StoreError
from gemmtuned.db import stale_log
from gemmtuned.db.files import identity
from gemmtuned.db.guest import GuestStore
from gemmtuned.db.migrations import SCHEMA
from gemmtuned.db.store import Store


def calls(path: Path) -> int:
    with closing(sqlite3.connect(path)) as conn:
        return int(conn.execute("SELECT coalesce(sum(calls), 0) FROM demand").fetchone()[0])


def filled(folder: Path) -> tuple[Store, bytearray]:
    """A closed database of many pages, and its bytes."""
    store = open_store(folder)
    for m in range(1, 300):
        add(store, 1, m)
    store.close()
    return store, bytearray(store.path.read_bytes())


def put_in_place(store: Store, tmp_path: Path, *, version: int = SCHEMA) -> None:
    """`mv` of a copy with 100 calls of other problems, while the log holds pages of what lies there."""
    other = open_store(tmp_path / "other")
    for m in range(20, 120):
        add(other, 1, m)
    other.close()
    copy = tmp_path / "other/tune.db"
    with closing(sqlite3.connect(copy)) as conn:
        conn.execute(f"PRAGMA user_version = {version}")
    copy.replace(store.path)


@pytest.mark.parametrize("first", ["a program", "the daemon"])
def test_a_copy_that_is_moved_over_the_database_keeps_its_pages(tmp_path: Path, first: str) -> None:
    store = open_store(tmp_path)
    program = GuestStore(store.path, locks=tmp_path / "locks", timeout_s=30)
    for m in range(1, 9):
        add(store, 5, m)
        add(program, 5, m)
        program.close_between_uses()
    assert Path(f"{store.path}-wal").stat().st_size > 0
    put_in_place(store, tmp_path)

    users: list[Store | GuestStore] = [program, store] if first == "a program" else [store, program]
    for user in users:
        add(user, 1)
    program.close_between_uses()

    assert store.check() == []
    assert calls(store.path) == 102
    assert store.path.with_name(f"tune.db{stale_log.SET_ASIDE}").stat().st_size > 0
    store.close()
    assert list(tmp_path.glob("*.corrupt-*")) == []


def test_the_log_of_a_file_that_was_moved_away_brings_its_last_counts_back(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.checkpoint()
    add(store, 5)
    store.path.rename(tmp_path / "moved.db")
    put_in_place(store, tmp_path)
    add(store, 1)
    store.close()

    (tmp_path / f"tune.db{stale_log.SET_ASIDE}").rename(tmp_path / "moved.db-wal")
    assert calls(tmp_path / "moved.db") == 5


def test_a_new_file_does_not_share_the_memory_of_one_that_was_removed(tmp_path: Path) -> None:
    """SQLite would cut it short under a user that has it mapped, whom that ends with SIGBUS."""
    store = open_store(tmp_path)
    add(store, 5)
    shared = Path(f"{store.path}-shm")
    before = identity(shared)
    store.path.unlink()
    program = GuestStore(store.path, locks=tmp_path / "locks", timeout_s=30)
    add(program, 1)

    assert identity(shared) not in (None, before)
    add(store, 1)
    assert calls(store.path) == 2
    store.close()


def test_a_log_is_known_that_was_empty_when_it_was_opened(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.checkpoint()
    store.close()
    program = GuestStore(store.path, locks=tmp_path / "locks", timeout_s=30)
    program.close_between_uses()
    store.checkpoint()
    add(program, 5)
    program.close_between_uses()
    put_in_place(store, tmp_path)
    add(program, 1)
    program.close_between_uses()
    assert calls(store.path) == 101
    store.close()


def test_a_newer_database_that_is_moved_there_is_left_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    add(store, 5)
    put_in_place(store, tmp_path, version=SCHEMA + 1)
    before = store.path.read_bytes()

    for _ in range(2):
        with pytest.raises(StoreError, match="Upgrade gemmtuned here"):
            add(store, 1)
    store.close()
    assert store.path.read_bytes() == before


def test_a_damaged_database_of_a_newer_version_is_not_built_anew(tmp_path: Path) -> None:
    store, data = filled(tmp_path)
    data[60:64] = (SCHEMA + 1).to_bytes(4, "big")
    data[4096 : len(data) // 2] = os.urandom(len(data) // 2 - 4096)
    store.path.write_bytes(data)

    with pytest.raises(StoreError, match="Upgrade gemmtuned here"):
        store.mend("malformed", store.lies_at())
    assert store.path.read_bytes() == data


@pytest.mark.parametrize(("later", "same"), [(0, True), (3, True), (1 << 31, False)])
def test_a_log_is_known_by_its_salt_and_not_by_its_number_alone(tmp_path: Path, later: int, same: bool) -> None:
    path = tmp_path / "tune.db"
    path.write_bytes(b"one")
    salt = 0xFFFFFFFE
    log = Path(f"{path}-wal")
    log.write_bytes(bytes(16) + salt.to_bytes(4, "big") + bytes(12))
    seen = stale_log.Log()
    seen.note(path, identity(path))
    assert not seen.is_of_another(path, identity(path) or (0, 0))
    path.rename(tmp_path / "before.db")
    path.write_bytes(b"other")
    with log.open("r+b") as file:
        file.write(bytes(16) + ((salt + later) % (1 << 32)).to_bytes(4, "big"))

    assert seen.is_of_another(path, identity(path) or (0, 0)) is same


def test_a_database_that_cannot_be_opened_is_not_left_open(tmp_path: Path) -> None:
    """What would stay open shares the log and its memory with who opens it next, in this process."""
    store, data = filled(tmp_path)
    data[4096:] = bytes(len(data) - 4096)
    store.path.write_bytes(data)
    gc.disable()
    try:
        for _ in range(5):
            with pytest.raises(StoreError, match="damaged"):
                open_store(tmp_path, create=False)
        held = [target for target in opened().values() if target.startswith(str(store.path))]
    finally:
        gc.enable()
    assert held == []
