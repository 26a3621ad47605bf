"""What a command writes where somebody says: never over a device, a link, or anything that gemmtuned itself keeps."""

from __future__ import annotations

import os
import resource
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from command_line import DEVICE, HERE, TUNED, Cli, solution
from store_cases import new_file

from gemmtuned.commands.named_file import target_of
from gemmtuned.configs import triton_json
from gemmtuned.configs.aiter_headers import FAMILIES
from gemmtuned.configs.aiter_write import write_file
from gemmtuned.configs.errors import TableError
from gemmtuned.configs.formats import inductor, vllm_moe
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.temporary import put
from gemmtuned.daemon.publishing.publish import publish
from gemmtuned.db.store import Store, check
from gemmtuned.reports.tuned_files import TunedTable

NOW = time.time()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    store = Store(new_file(home / "tune.db"), locks=home / "locks")
    store.solutions.install(None, [solution(TUNED)], environment=HERE, now_s=NOW)
    publish(store, home / "configs", home / "locks", now_s=NOW)
    store.close()
    (home / "daemon.json").write_text("{}")
    return home


def contents(home: Path) -> dict[str, bytes]:
    """All but what SQLite makes for a reader."""
    found = (path for path in home.rglob("*") if path.is_file() and not path.name.endswith("-shm"))
    return {str(path.relative_to(home)): path.read_bytes() for path in found if path.stat().st_size}


@pytest.mark.parametrize(
    "name", ["tune.db", "tune.db-wal", "link.db", "same.db", "configs/manifest.json", "daemon.json", "locks/mine"]
)
@pytest.mark.parametrize(
    "words", [("report", "-o"), ("db", "backup"), ("tune", "4x64x64", "-o"), ("tune", "4x64x64", "-o2")]
)
def test_no_command_writes_over_what_gemmtuned_keeps(home: Path, call: Cli, words: tuple[str, ...], name: str) -> None:
    (home / "link.db").symlink_to("tune.db")
    os.link(home / "tune.db", home / "same.db")
    before = contents(home)
    done = call(*words, str(home / name))
    assert done.returncode == 2 and name in done.stderr
    assert contents(home) == before and not check(home / "tune.db")


def test_a_folder_to_run_from_is_not_written_over_the_published_tables(home: Path, call: Cli) -> None:
    """With one device's solutions, say, it would take those of all others out of use."""
    before = contents(home)
    for out in (home / "configs", home / "configs/sub"):
        done = call("export", "--format", "gemmtuned", "--force", "--out", str(out))
        assert done.returncode == 2 and "programs load what is published" in done.stderr
    assert contents(home) == before
    assert call("export", "--format", "gemmtuned", "--out", str(home.parent / "elsewhere")).returncode == 0


@pytest.mark.parametrize("words", [("db", "backup"), ("tune", "4x64x64", "-o"), ("tune", "4x64x64", "-o2")])
def test_a_pipe_a_device_and_what_is_open_are_not_replaced_by_a_file(
    home: Path, call: Cli, words: tuple[str, ...]
) -> None:
    """Where root asks for /dev/stdout or /dev/null, all programs of the machine would lose it."""
    os.mkfifo(home.parent / "pipe")
    (home.parent / "out").symlink_to("/proc/self/fd/1")
    for name in ("pipe", "out"):
        done = call(*words, name)
        assert done.returncode == 2 and "is a pipe or a device" in done.stderr
    assert stat.S_ISFIFO((home.parent / "pipe").stat().st_mode) and (home.parent / "out").is_symlink()
    with pytest.raises(typer.BadParameter, match="device"):
        target_of(Path("/dev/null"), Settings.from_env({"GEMMTUNED_HOME": str(home)}))


def test_a_folder_is_no_file_to_write_a_page_to(home: Path, call: Cli) -> None:
    """Some have no name of their own that a new file could be called by while it is written."""
    for folder in (".", "/", "..", str(home)):
        done = call("report", "-o", folder)
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert done.stderr.startswith(f"gemmtuned: {folder}: ") and "another path with --out" in done.stderr


def test_a_page_is_written_into_a_pipe_or_to_what_is_open(home: Path, call: Cli) -> None:
    (home.parent / "out").symlink_to("/proc/self/fd/1")
    done = call("report", "-o", "out")
    assert done.returncode == 0 and (home.parent / "out").is_symlink()
    assert done.stdout.startswith("<!doctype html>") and done.stdout.rstrip().endswith("</html>")
    assert "Open it in a browser" in done.stderr

    os.mkfifo(home.parent / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((home.parent / "pipe").read_text()))
    reader.start()
    assert call("report", "-o", "pipe").returncode == 0
    reader.join()
    assert read[0].startswith("<!doctype html>")


def test_a_file_is_written_behind_its_link(home: Path, call: Cli) -> None:
    (home.parent / "shared").mkdir()
    for name in ("page.html", "copy.db", "table.csv"):
        (home.parent / name).symlink_to(f"shared/{name}")
    assert call("report", "-o", "page.html").returncode == 0
    assert call("db", "backup", "copy.db").returncode == 0

    table = TunedTable(
        target_of(home.parent / "table.csv", Settings.from_env({"GEMMTUNED_HOME": str(home)})), FAMILIES["bf16"]
    )
    table.add(solution(TUNED), DEVICE)
    table.write()

    assert all((home.parent / name).is_symlink() for name in ("page.html", "copy.db", "table.csv"))
    shared = home.parent / "shared"
    assert (shared / "page.html").read_text().startswith("<!doctype html>") and not check(shared / "copy.db")
    assert "2048" in (shared / "table.csv").read_text()


@pytest.mark.parametrize(
    "write",
    [
        lambda path, number: triton_json.write_file(path, {"any": {"BLOCK_SIZE_M": number}}),
        lambda path, number: inductor.write(path, {"key": [{"template_id": "x" * number}]}),
        lambda path, number: vllm_moe.write(path, {"1": {"BLOCK_SIZE_M": number}}),
        lambda path, number: write_file(path, ["M"], [[str(number)]]),
        lambda path, number: put(path, b"x" * number),
    ],
    ids=["tiles", "inductor", "vllm", "aiter", "page"],
)
def test_what_was_written_before_stays_where_the_disk_refuses_and_keeps_its_mode(
    tmp_path: Path, write: Callable[[Path, int], None]
) -> None:
    path = tmp_path / "out"
    write(path, 7)
    path.chmod(0o660)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        with pytest.raises((TableError, OSError)):
            write(path, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["out"]

    write(path, 8)
    assert path.read_bytes() != before and stat.S_IMODE(path.stat().st_mode) == 0o660


def test_a_table_and_a_page_keep_who_may_read_and_write_them(home: Path, call: Cli) -> None:
    page, table = home.parent / "page.html", home.parent / "table.csv"
    assert call("report", "-o", str(page)).returncode == 0
    page.chmod(0o600)
    assert call("report", "-o", str(page)).returncode == 0
    assert stat.S_IMODE(page.stat().st_mode) == 0o600

    table.touch(0o666)
    table.chmod(0o666)
    written = TunedTable(table, FAMILIES["bf16"])
    written.add(solution(TUNED), DEVICE)
    written.write()
    assert stat.S_IMODE(table.stat().st_mode) == 0o666 and table.stat().st_size
