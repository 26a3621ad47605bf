"""Folders of the home, where they cannot be made."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gemmtuned.configs.open_files import make_folders


def test_a_file_system_that_has_no_such_folders_is_an_error(tmp_path: Path) -> None:
    """Of a missing folder and of one that takes none, mkdir says the same."""
    for folder in ("/proc/gemmtuned", "/proc/gemmtuned/a/b"):
        with pytest.raises(FileNotFoundError):
            make_folders(Path(folder))


def test_a_folder_that_was_deleted_takes_none(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from gemmtuned.configs.open_files import make_folders
os.rmdir(os.getcwd())
try:
    make_folders(Path("a/b"))
except FileNotFoundError:
    print("not found")
"""
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run([sys.executable, "-c", code], cwd=gone, capture_output=True, text=True, timeout=60)

    assert done.stdout == "not found\n", done


def test_folders_are_open_to_their_owner_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o777)
    try:
        make_folders(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)

    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "b" / "c")] == [0o700, 0o700]


AT_ONCE = """
import os, sys
from multiprocessing import Barrier, Process
from pathlib import Path
from gemmtuned.configs.open_files import make_folders

def work(all_here):
    if os.geteuid() == 0:
        os.seteuid(65534)  # root may enter any folder
    os.umask(0o777)
    for i in range(100):
        all_here.wait()
        make_folders(Path(sys.argv[1], str(i), "b", "c"))

all_here = Barrier(4)
workers = [Process(target=work, args=(all_here,)) for _ in range(4)]
for one in workers:
    one.start()
for one in workers:
    one.join(5)
    if one.exitcode != 0:
        all_here.abort()
print([one.exitcode for one in workers])
"""


@pytest.fixture
def anybodys() -> Iterator[Path]:
    """A folder that another user can come to, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def test_processes_that_make_the_same_folders_at_once_do_not_meet_closed_ones(anybodys: Path) -> None:
    """Between making a folder and opening it a process with a strict umask keeps all others out."""
    done = subprocess.run(
        [sys.executable, "-c", AT_ONCE, str(anybodys)], capture_output=True, text=True, timeout=120, check=False
    )

    assert done.stdout == "[0, 0, 0, 0]\n", done.stderr[-2000:]


def test_a_folder_that_stays_closed_is_an_error(anybodys: Path) -> None:
    shut = anybodys / "shut"
    code = """
import os, sys
from pathlib import Path
from gemmtuned.configs.open_files import make_folders
if os.geteuid() == 0:
    os.chown(sys.argv[1], 65534, 65534)
    os.seteuid(65534)
os.chmod(sys.argv[1], 0)
try:
    make_folders(Path(sys.argv[1], "a"))
except PermissionError:
    print("closed")
"""
    shut.mkdir()
    done = subprocess.run([sys.executable, "-c", code, str(shut)], capture_output=True, text=True, timeout=60)

    assert done.stdout == "closed\n", done.stderr
