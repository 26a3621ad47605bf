"""Several questions on one connection: each sees the newest, another file is opened, and nothing stays open."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from hooked import opened
from store_cases import NEW, new_store, problem, saw

from gemmtuned.configs.errors import StoreError
from gemmtuned.db import ask
from gemmtuned.db.look_up import explain
from gemmtuned.db.store import Store


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths that were opened to read."""
    plain, found = ask.connect_read_only, []

    def connect(path: Path) -> sqlite3.Connection:
        found.append(path)
        return plain(path)

    monkeypatch.setattr(ask, "connect_read_only", connect)
    return found


def test_what_was_asked_within_a_question_is_closed_and_not_left_to_be_collected(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ask.connect_read_only
    found: list[sqlite3.Connection] = []

    def connect(path: Path) -> sqlite3.Connection:
        found.append(plain(path))
        return found[-1]

    monkeypatch.setattr(ask, "connect_read_only", connect)
    with ask.kept_open(store.path):
        ask.on(store.path, lambda conn: problems(store.path), 7)
        assert problems(store.path) == 0

    assert len(found) == 2
    for conn in found:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            conn.execute("SELECT 1")


def problems(path: Path) -> int:
    return int(ask.ask(path, "SELECT count(*) AS n FROM problem")[0]["n"])


def test_each_question_sees_what_was_committed_before_it(store: Store, connections: list[Path]) -> None:
    with ask.kept_open(store.path):
        for count in range(3):
            assert problems(store.path) == count
            store.sightings.add("run", NEW, [saw(problem(count + 1))], now_s=time.time())
    assert len(connections) == 1
    assert problems(store.path) == 3 and len(connections) == 2, "after it each question has a connection of its own"


def test_what_is_explained_problem_by_problem_takes_one_connection(store: Store, connections: list[Path]) -> None:
    store.sightings.add("run", NEW, [saw(problem(m)) for m in (1, 2)], now_s=time.time())
    with ask.kept_open(store.path):
        assert all(explain(store.path, problem(m)) for m in (1, 2))
    assert len(connections) == 1


def test_what_is_asked_within_a_question_and_in_other_threads_has_another(
    store: Store, connections: list[Path]
) -> None:
    with ask.kept_open(store.path):
        assert ask.on(store.path, lambda conn: problems(store.path), 7) == 0
        assert len(connections) == 2
        thread = threading.Thread(target=problems, args=(store.path,))
        thread.start()
        thread.join()
        assert len(connections) == 3
        with ask.kept_open(store.path):
            problems(store.path)
        problems(store.path)
    assert len(connections) == 3


def test_another_file_is_opened_and_one_that_is_gone_is_told(tmp_path: Path, connections: list[Path]) -> None:
    for name, count in (("first", 1), ("second", 2)):
        store = new_store(tmp_path / name)
        store.sightings.add("run", NEW, [saw(problem(m + 1)) for m in range(count)], now_s=time.time())
        store.close()
    path = tmp_path / "first/tune.db"
    with ask.kept_open(path):
        assert problems(path) == 1
        for file in (tmp_path / "second").glob("tune.db*"):
            os.replace(file, tmp_path / "first" / file.name)
        assert problems(path) == 2 == len(connections)
        path.unlink()
        with pytest.raises(StoreError, match="no such database"):
            problems(path)


def test_nothing_stays_open_whatever_is_raised(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    path = store.path
    store.close()
    with pytest.raises(ZeroDivisionError), ask.kept_open(path):
        problems(path)
        assert str(path) in opened().values()
        with pytest.raises(StoreError):
            ask.ask(path, "SELECT nothing")
        assert str(path) not in opened().values(), "what failed is opened anew"
        problems(path)
        raise ZeroDivisionError
    assert str(path) not in opened().values()
