"""What a run needs once, made by the first of the forks of side_by_side.py that asks; the others wait, and read it."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest
from side_by_side import folder_of_all


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The folder of this name that `make` has filled; where it failed, who asks next tries again."""
    shared = folder_of_all(factory)
    folder = shared / f"once-{name}"
    with (shared / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            making = factory.mktemp(name)
            make(making)
            making.rename(folder)
    return folder
