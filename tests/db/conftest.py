"""A store, ours beside the file that others write, and a disk of 2 MiB, for every test of this folder."""

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from other_users import Two
from store_cases import new_store

from gemmtuned.db.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    one = new_store(tmp_path)
    yield one
    one.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    both = Two(tmp_path)
    yield both
    both.ours.close()
    both.theirs.close()


@pytest.fixture
def small_disk() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="gemmtuned-full-"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        folder.rmdir()
        pytest.skip("no right to mount a tmpfs here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()
