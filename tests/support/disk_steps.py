"""What code has the disk do, in order: what must outlive a loss of power is on the disk before it has its name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def disk_steps() -> Iterator[list[str]]:
    """Steps of this process until the end of the block: "synced NAME" of a file or folder, "NAME -> NAME" of a rename.

    Temporary names (configs/temporary.py) are given as `.tmp`.
    """
    steps: list[str] = []
    sync = os.fsync

    def name(path: Any) -> str:
        found = Path(path).name
        return ".tmp" if found.endswith(".tmp") else found

    def fsync(fd: int) -> None:
        sync(fd)
        steps.append(f"synced {name(os.readlink(f'/proc/self/fd/{fd}'))}")

    def renaming(real: Any) -> Any:
        def rename(self: Path, to: Any) -> Path:
            steps.append(f"{name(self)} -> {name(to)}")
            return real(self, to)  # type: ignore[no-any-return]

        return rename

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        for how in ("rename", "replace"):
            patch.setattr(Path, how, renaming(getattr(Path, how)))
        yield steps
