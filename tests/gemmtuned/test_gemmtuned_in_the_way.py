"""A file, or a link that leads nowhere, where a folder of the home would have to be: named, with the way out."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from command_homes import small_home
from command_line import Cli
from other_users import as_user

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.settings import Settings
from gemmtuned.daemon.publishing.publish import publishing
from gemmtuned.db.store import Store
from gemmtuned.hooks.native.build import build
from gemmtuned.reports import checks_hook

KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "file": (Path.touch, "{} is a file"),
    "link": (lambda path: path.symlink_to("gone/x"), "{} is a link to gone/x, which is no folder"),
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return small_home(tmp_path)


def in_place_of(folder: Path, kind: str) -> str:
    """Put it there; what is said of it."""
    for one in folder.glob("*"):
        one.unlink()
    if folder.is_dir():
        folder.rmdir()
    make, said = KINDS[kind]
    make(folder)
    return said.format(folder)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    "args", [("db", "vacuum"), ("db", "publish"), ("retune", "8", "512", "512"), ("daemon", "--once")]
)
def test_a_command_names_what_lies_in_place_of_the_locks(
    call: Cli, home: Path, kind: str, args: tuple[str, ...]
) -> None:
    said = in_place_of(home / "locks", kind)

    done = call(*args)

    assert done.returncode == 1 and f"({said}). Move it away, or set GEMMTUNED_HOME" in done.stderr, done.stderr
    assert "cannot be opened for writing" not in done.stderr, "the database itself can be"


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("name", ["locks", "bin", "checked", "ingest", "probation"])
def test_doctor_finds_what_lies_in_place_of_a_folder(call: Cli, home: Path, kind: str, name: str) -> None:
    said = in_place_of(home / name, kind)

    found = {check["name"]: check for check in json.loads(call("doctor", "--quick", "--json").stdout)["checks"]}

    assert found["home"]["result"] == "FAIL" and said in found["home"]["found"] and "move it" in found["home"]["fix"]


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_builds_the_hook_names_what_lies_in_place_of_its_cache(tmp_path: Path, kind: str) -> None:
    said = in_place_of(tmp_path / "cache", kind)
    with pytest.raises(GemmtunedError) as err:
        build(tmp_path / "cache")
    assert f"({said}). Set GEMMTUNED_CACHE" in str(err.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_cache_that_is_closed_to_us_is_named() -> None:
    with tempfile.TemporaryDirectory(prefix="gemmtuned-cache-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "native").mkdir(mode=0o700)
        settings = Settings.from_env({"GEMMTUNED_HOME": folder, "GEMMTUNED_CACHE": folder})

        said = as_user(54400, 54400, lambda: [check for check in checks_hook.checks(settings, quick=True) if check.fix])

    assert f"{folder}/native is closed to uid 54400" in said and "set GEMMTUNED_CACHE to a folder" in said, said
    assert "rm -r" not in said


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_locks_that_are_closed_to_us_are_named() -> None:
    def held(locks: Path) -> None:
        with publishing(locks):
            pass

    with tempfile.TemporaryDirectory(prefix="gemmtuned-locks-", dir="/var/tmp") as folder:
        home = small_home(Path(folder))
        for path in (Path(folder), home, *home.glob("tune.db*")):
            os.chown(path, 54400, 54400)
        (home / "locks").chmod(0o700)

        vacuumed = as_user(54400, 54400, lambda: Store(home / "tune.db", locks=home / "locks").vacuum())
        published = as_user(54400, 54400, lambda: held(home / "locks"))

    assert vacuumed.startswith(f"StoreError: {home}/tune.db: its lock {home}/locks/tune.db.lock cannot be opened")
    assert published.startswith(f"TableError: {home}/locks/publish.lock: cannot be opened (Permission denied)")
    for said in (vacuumed, published):
        assert "Give uid 54400 write access to it and its folder" in said
