"""Folders of the home, where they cannot be made."""

from __future__ import annotations

import os
import subprocess
import sys
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
