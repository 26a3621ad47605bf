"""`gemmtuned purge` removes what gemmtuned wrote and nothing else; `status --watch` shows it again and again."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path

import pytest
from store_cases import NEW, found, new_store, open_store, problem, saw
from typer.testing import CliRunner, Result

from gemmtuned.cli import build
from gemmtuned.commands import status
from gemmtuned.configs.sighting import Session
from gemmtuned.daemon.publishing.publish import publish
from gemmtuned.daemon.seats.left_out import Pieces


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with a database, tables, a cache, and two files that are somebody's own."""
    home, cache = tmp_path / "home", tmp_path / "cache"
    for name in ("native", "mine"):
        (cache / name).mkdir(parents=True)
        (cache / name / "file").write_text("12345678")
    monkeypatch.setenv("GEMMTUNED_HOME", str(home))
    monkeypatch.setenv("GEMMTUNED_CACHE", str(cache))
    store = new_store(home)
    store.sightings.add("serve", NEW, [saw(problem(), 100)], now_s=time.time())
    store.solutions.install(None, [found(problem())], environment=NEW, now_s=time.time())
    publish(store, home / "configs", home / "locks", now_s=time.time())
    store.backup(home / "tune-20260101T000000Z.db")
    store.close()
    (home / "daemon.json").write_text("{}")
    return home


def call(*words: str) -> Result:
    return CliRunner().invoke(build(), list(words))


def files(folder: Path) -> list[str]:
    """All but what SQLite makes for a reader."""
    found = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return sorted(name for name in found if not name.endswith(("-wal", "-shm")))


def test_only_what_gemmtuned_wrote_is_removed_and_only_when_it_is_asked_for(home: Path) -> None:
    before = files(home.parent)
    assert call("purge").exit_code == 2 and "--yes" in call("purge").stderr
    planned = json.loads(call("purge", "--dry-run", "--json").stdout)
    assert files(home.parent) == before and str(home / "tune.db") in [row["path"] for row in planned["rows"]]
    assert planned["bytes"] > 8 and planned["refused"] is None
    notes = call("purge", "--dry-run").output
    assert f"the cache {home.parent / 'cache'} serves all homes of yours: --keep-cache" in notes
    assert "refused" not in notes and "cache" not in call("purge", "--dry-run", "--keep-cache").output

    done = call("purge", "--yes")

    assert done.exit_code == 0 and "tune-20260101T000000Z.db" in done.stdout
    assert files(home) == ["tune-20260101T000000Z.db"]
    assert files(home.parent / "cache") == ["mine", "mine/file"]
    assert call("purge", "--yes").exit_code == 0
    (home / "tune-20260101T000000Z.db").unlink()
    assert "nothing of gemmtuned's" in call("purge", "--yes").stdout


def test_what_a_daemon_has_left_out_goes_with_the_home(home: Path) -> None:
    Pieces(home).blame("import of bad", "bad", "killed by SIGABRT", doubtful=False)
    assert {"left_out.json", "left_out.lock"} <= set(files(home))
    assert call("purge", "--yes").exit_code == 0
    assert files(home) == ["tune-20260101T000000Z.db"]


def test_what_sqlite_makes_while_purge_looks_goes_with_the_database(home: Path) -> None:
    """The programs have closed it, so nothing lies beside it until purge asks it who runs."""
    (home / "tune-20260101T000000Z.db").unlink()
    assert not list(home.glob("tune.db-*"))
    done = call("purge", "--yes")
    assert done.exit_code == 0 and "left at" not in done.output
    assert not home.exists()


def test_folders_of_somebody_with_names_of_ours_stay(home: Path, tmp_path: Path) -> None:
    """GEMMTUNED_HOME may be set to a folder that had others' files before, a user's own for one."""
    (home / "bin").mkdir(exist_ok=True)
    (home / "bin/backup.sh").write_text("theirs")
    (home / "locks").mkdir(exist_ok=True)
    (home / "locks/door.txt").write_text("theirs")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/kept").write_text("theirs")
    (home / "fleet").symlink_to(tmp_path / "elsewhere", target_is_directory=True)

    done = call("purge", "--yes")

    assert done.exit_code == 0, done.output
    assert (home / "bin/backup.sh").exists() and (home / "locks/door.txt").exists()
    assert (tmp_path / "elsewhere/kept").exists() and (home / "fleet").is_symlink()
    assert not (home / "configs").exists() and "bin" in done.output


def test_a_folder_that_was_never_a_home_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bin/deploy.sh", "configs/mine/prod.yaml", "fleet/cars.csv", "tables/train.jsonl", "tables/bin/tool"):
        (tmp_path / "user" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "user" / name).write_text("theirs")
    before = files(tmp_path / "user")
    monkeypatch.setenv("GEMMTUNED_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("GEMMTUNED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GEMMTUNED_CONFIG_DIR", str(tmp_path / "user/tables"))

    assert call("purge", "--yes").exit_code == 0
    assert files(tmp_path / "user") == before


def test_the_cache_can_stay(home: Path) -> None:
    assert call("purge", "--yes", "--keep-cache").exit_code == 0
    assert not (home / "tune.db").exists() and (home.parent / "cache/native/file").exists()


def test_what_is_in_use_is_not_removed(home: Path) -> None:
    before = files(home)
    store = open_store(home)
    here = Session(
        host=platform.node(), pid=os.getpid(), started_us=int(time.time() * 1e6), run="serve", path="native",
        generation=1,
    )  # fmt: skip
    store.sightings.beat(here, now_s=time.time())
    store.close()
    refused = call("purge", "--yes")
    assert refused.exit_code == 75 and "serve (pid" in refused.stderr and files(home) == before
    planned = call("purge", "--dry-run")
    assert planned.exit_code == 0 and "refused now: 1 hooked program of" in planned.output


def test_what_it_would_remove_is_told_of_a_database_that_cannot_be_read_too(home: Path) -> None:
    (home / "tune.db").write_bytes(b"\0no database" * 1000)
    planned = json.loads(call("purge", "--dry-run", "--json").stdout)

    assert str(home / "tune.db") in [row["path"] for row in planned["rows"]]
    assert "damaged" in planned["refused"]


def test_status_is_shown_again_and_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []

    def sleep(seconds: float) -> None:
        turns.append(seconds)
        if len(turns) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", sleep)
    done = call("status", "--watch")
    assert done.exit_code == 130 and done.stdout.count("published: generation 1") == 3
