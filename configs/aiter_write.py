"""AITER's tables written: whole or not at all, lines ended as AITER ends them."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from gemmtuned.configs.errors import TableError
from gemmtuned.configs.temporary import create, take_place, temporary_path


def write_file(
    path: Path, columns: Sequence[str], rows: Iterable[Sequence[str]], *, separator: str = ",",
    above: Sequence[str] = (), below: Sequence[str] = (),
) -> None:  # fmt: skip
    """Write a table whole or not at all, under a temporary name first. Raises TableError when the disk refuses.

    above, below: lines that stand before the header and after the last row, each with its end.
    """
    temporary = temporary_path(path)
    try:
        with os.fdopen(create(temporary, path), "w", encoding="utf-8", newline="") as file:
            file.writelines(above)
            write_lines(file, columns, rows, separator=separator)
            file.writelines(below)
            file.flush()
            os.fsync(file.fileno())
        take_place(temporary, path)
    except OSError as err:
        temporary.unlink(missing_ok=True)
        raise TableError(f"{path}: cannot be written ({err.strerror or err})") from err


def require_writable(path: Path) -> None:
    """Raise TableError where write_file would, before there is anything to lose."""
    temporary = temporary_path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "is a folder")
        temporary.touch()
        temporary.unlink()
    except OSError as err:
        raise TableError(f"{path}: cannot be written ({err.strerror or err})") from err


def write_lines(file: TextIO, columns: Sequence[str], rows: Iterable[Sequence[str]], *, separator: str = ",") -> None:
    """Header and rows as CSV, lines ended as AITER ends them."""
    writer = csv.writer(file, lineterminator="\n", delimiter=separator)
    writer.writerow(columns)
    writer.writerows(rows)
