"""A disk that is full to the last byte, or became read-only: what can be read is read, the rest is told aright."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import says
from store_cases import NEW, found, open_store, problem, saw

from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.open_files import free_bytes
from gemmtuned.db import faults
from gemmtuned.db.store import check

READERS = (["status"], ["coverage"], ["untuned"], ["explain", "8", "1024", "512"], ["gains"], ["db", "check"])
WRITERS = (["withdraw", "8", "1024", "512"], ["retune", "8x1024x512"], ["tune", "fp32:8x64x64"])


@pytest.fixture
def home(small_disk: Path) -> Path:
    """With a problem that is solved, and no program or daemon that has the database open."""
    home = small_disk / "home"
    store = open_store(home)
    store.sightings.add("serve", NEW, [saw(problem(), 7), saw(problem(9), 5)], now_s=os.stat(small_disk).st_mtime)
    store.solutions.install(None, [found(problem())], environment=NEW, now_s=os.stat(small_disk).st_mtime)
    store.close()
    return home


def fill(disk: Path) -> Path:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


@pytest.mark.slow
def test_on_a_disk_without_a_byte_reports_are_read_and_changes_are_told_to_need_room(home: Path) -> None:
    ballast = fill(home.parent)
    assert os.statvfs(home).f_bavail == 0

    for words in READERS:
        done = says(home, *words)
        assert done.returncode == 0, (words, done.stderr)
    assert says(home, "status").stdout.startswith("DISK FULL: no room at ")
    first, then = says(home.parent / "none yet", "status").stdout.splitlines()[:2]
    assert first.startswith("DISK FULL") and then.startswith("No database yet")
    assert json.loads(says(home, "coverage", "--json").stdout)["total"]["calls"] == 12
    for words in WRITERS:
        done = says(home, *words)
        assert (done.returncode, "disk full (0 MiB free). Free space" in done.stderr) == (1, True), (words, done)

    ballast.unlink()
    assert "DISK FULL" not in says(home, "status").stdout
    assert says(home, "withdraw", "8", "1024", "512").returncode == 0


def test_a_disk_without_an_inode_is_called_full_and_not_closed_to_us(home: Path) -> None:
    facts = os.statvfs(home)
    used = facts.f_files - facts.f_ffree
    remounted = subprocess.run(["mount", "-o", f"remount,nr_inodes={used}", str(home.parent)], capture_output=True)
    assert remounted.returncode == 0, remounted.stderr

    with pytest.raises(StoreError, match="all inodes are taken"):
        open_store(home).sightings.add("serve", NEW, [saw(problem(), 7)], now_s=0)
    assert faults.no_room(home / "tune.db")


@pytest.mark.slow
def test_a_file_system_that_became_read_only_is_called_that(home: Path) -> None:
    remounted = subprocess.run(["mount", "-o", "remount,ro", str(home.parent)], capture_output=True)
    assert remounted.returncode == 0, remounted.stderr

    for words in READERS:
        done = says(home, *words)
        assert done.returncode == 0, (words, done.stderr)
    for words in WRITERS:
        done = says(home, *words)
        assert done.returncode == 1 and "file system is read-only" in done.stderr, (words, done)
    with pytest.raises(StoreError, match="mounted for writing"):
        open_store(home).sightings.add("serve", NEW, [saw(problem(), 7)], now_s=0)


def test_a_file_system_that_counts_no_blocks_is_not_full(small_disk: Path) -> None:
    """Such as a tmpfs without a limit, and some of FUSE."""
    unlimited = small_disk / "unlimited"
    unlimited.mkdir()
    assert subprocess.run(["mount", "-t", "tmpfs", "-o", "size=0", "none", str(unlimited)]).returncode == 0
    try:
        assert os.statvfs(unlimited).f_blocks == 0
        home = unlimited / "home"
        store = open_store(home)
        store.sightings.add("serve", NEW, [saw(problem(), 7)], now_s=os.stat(small_disk).st_mtime)
        assert not faults.no_room(store.path)
        store.mend("as a test")
        store.close()
        assert check(home / "tune.db") == []
        assert "DISK FULL" not in says(home, "status").stdout
        assert "FAIL  disk" not in says(home, "doctor", "--quick").stdout
        assert free_bytes(unlimited) is None and free_bytes(small_disk) == os.statvfs(small_disk).f_bavail * 4096
    finally:
        subprocess.run(["umount", "-l", str(unlimited)], check=True)


def test_an_image_that_only_is_read_is_not_called_full(home: Path) -> None:
    fill(home.parent)
    assert faults.no_room(home / "tune.db")
    remounted = subprocess.run(["mount", "-o", "remount,ro", str(home.parent)], capture_output=True)
    assert remounted.returncode == 0, remounted.stderr
    assert not faults.no_room(home / "tune.db")
    assert "DISK FULL" not in says(home, "status").stdout


def test_a_limit_on_memory_is_named_and_not_called_a_bad_disk(tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from store_cases import NEW, open_store, problem, saw
from gemmtuned.configs.errors import StoreError
home = Path(sys.argv[1])

def add():
    store = open_store(home)
    try:
        store.sightings.add("serve", NEW, [saw(problem(), 7)], now_s=1e9)
    finally:
        store.close()

add()
room = [bytes(2000) for _ in range(4000)]
del room[:-1]  # memory of the heap, which SQLite has, but none that is mapped
resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
try:
    add()
    said = "no error"
except StoreError as err:
    said = str(err)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
add()
print(said)
"""
    here = str(Path(__file__).parents[1] / "support")
    command = [sys.executable, "-c", f"import sys; sys.path.append({here!r})\n{code}", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert "out of memory" in done.stdout and "this process may map no more than 1 MiB" in done.stdout, done
    assert "ulimit -v" in done.stdout and "disk" not in done.stdout
