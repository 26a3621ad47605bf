"""Names of files are bytes, and need be no text: a home, a page, a backup and a shared folder may have any."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import HERE, TUNED, Cli, environment, solution
from store_cases import new_file

from gemmtuned.daemon.device.device_lock import DeviceLock
from gemmtuned.daemon.publishing.publish import publish
from gemmtuned.db.store import Store, check
from gemmtuned.fleet.opening import as_text, open_objects

NO_TEXT = os.fsdecode(b"\xff\xe9")
NOW = time.time()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / NO_TEXT / "home"
    store = Store(new_file(home / "tune.db"), locks=home / "locks")
    store.solutions.install(None, [solution(TUNED)], environment=HERE, now_s=NOW)
    publish(store, home / "configs", home / "locks", now_s=NOW)
    store.close()
    return home


def test_a_page_and_a_backup_of_such_a_home_are_written_to_such_names(home: Path) -> None:
    page, copy = home.parent / f"{NO_TEXT}.html", home.parent / f"{NO_TEXT}.db"
    for words in (("report", "-o", str(page)), ("db", "backup", str(copy))):
        done = subprocess.run([sys.executable, "-m", "gemmtuned", *words], env=environment(home), capture_output=True)
        assert done.returncode == 0, done.stderr
    assert page.read_text("utf-8").rstrip().endswith("</html>")
    assert check(copy) == []
    assert sorted(path.name for path in home.parent.iterdir()) == sorted(["home", page.name, copy.name])


def test_who_holds_a_device_is_written_down_whatever_the_home_is_called(home: Path) -> None:
    """A daemon and `gemmtuned tune` take the device before they tune."""
    one, two = (DeviceLock(home.parent, "cpu", f"pid {pid}, home {home}") for pid in (1, 2))
    assert one.take() == ""
    assert "pid 1" in two.take()
    one.drop()
    two.drop()


@pytest.mark.parametrize("written", ["raw", "percent"])
def test_a_shared_folder_of_such_a_name_is_that_folder_and_no_other(home: Path, call: Cli, written: str) -> None:
    pytest.importorskip("obstore", reason="the extra [fleet] is not installed")
    folder = home.parent / "shared"
    url = f"file://{folder}" if written == "raw" else folder.as_uri()
    done = call("sync", url, GEMMTUNED_HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert any(path.is_file() for path in folder.rglob("*"))
    assert [path.name for path in home.parent.parent.iterdir() if path.name != "locks"] == [NO_TEXT]
    objects = open_objects(as_text(url))
    assert list(objects.list("results"))


def test_a_path_that_is_too_long_for_sqlite_is_told_as_that(tmp_path: Path, call: Cli) -> None:
    home = tmp_path.joinpath(*["d" * 200] * 3)
    home.mkdir(parents=True)
    done = call("tune", "fp32:8x32x32,threads=1", GEMMTUNED_HOME=str(home))
    assert done.returncode == 1 and "bytes, and SQLite opens none of more than 504" in done.stderr
    assert "Set GEMMTUNED_HOME to a folder with a shorter one" in done.stderr
