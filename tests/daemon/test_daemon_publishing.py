"""Publishing in a thread: whatever it ends with is said, so that the daemon waits before it tries again."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_cases import open_store

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.publishing import beside_the_loop as publishing


def test_an_error_that_nobody_foresaw_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(publishing, "publish", fails)
    monkeypatch.setattr(publishing, "FEW", -1)
    store = open_store(tmp_path)
    beside = publishing.Publishing(store, Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)}))
    beside.begin(1000.0)
    beside.wait()

    with pytest.raises(TableError, match="RuntimeError: can't start new thread"):
        beside.result()
    store.close()


def test_what_was_published_of_another_file_says_nothing_about_the_one_that_lies_there_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is built anew while a thread publishes: rows that it lost are taken back by the next publication."""
    monkeypatch.setattr(publishing, "FEW", -1)
    store = open_store(tmp_path)
    beside = publishing.Publishing(store, Settings.from_env({"GEMMTUNED_HOME": str(tmp_path)}))
    beside.forget()
    beside.begin(1000.0)
    beside.wait()
    beside.forget()
    assert beside.result() is None
    beside.begin(1000.0)
    beside.wait()
    assert beside.result() == store.generation()
    store.close()
