"""Our own tables in a folder: what a daemon publishes, and what `gemmtuned export --format gemmtuned` writes.

A production host runs from such a folder with GEMMTUNED_DISPATCH=1 and GEMMTUNED_CONFIG_DIR set to it, without a
database; it may be read-only, and belongs to root or to the user who runs the program (configs/manifest.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Final

from gemmtuned.configs.errors import GemmtunedError, TableError
from gemmtuned.configs.hint import Imported
from gemmtuned.configs.launch import binary_of
from gemmtuned.configs.manifest import (
    MANIFEST,
    Manifest,
    read_binary,
    read_manifest,
    read_table,
    write_binary,
    write_tables,
)
from gemmtuned.configs.solution import Solution

FORMAT: Final = "gemmtuned"


def read(folder: Path) -> Imported:
    """Every solution as a hint. Raises TableError for a folder that is none, or not to be trusted."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise TableError(f"{folder}: a folder without {MANIFEST}, expected one that gemmtuned published or exported")
    found = Imported(path=str(folder), format=FORMAT, family=FORMAT, kind="tuned")
    numbers = count(1)  # number the folder's rows, file after file: a store knows a row by its folder and number
    for file in manifest.files:
        solutions, complaints = read_table(folder, file)
        for complaint in complaints:
            found.reject(complaint)
        for solution in solutions:
            found.add(
                next(numbers),
                {**solution.to_row(), "file": file.name},
                problem=solution.problem,
                candidate=solution.candidate,
                us=solution.us,
                solution=solution,
            )
    return found


def write(
    folder: Path, solutions: Sequence[Solution], *, generation: int, binaries: Path
) -> tuple[Manifest, list[tuple[Solution, str]]]:
    """Write a folder a host can run from; (its manifest, what was left out and why).

    binaries: the folder whose `bin` holds the compiled kernels that solutions name.  Raises TableError when the disk
    refuses.
    """
    kept: dict[str, list[Solution]] = {}
    left = []
    for solution in sorted(solutions, key=lambda s: (str(s.problem), s.covers, s.mode, s.backend, s.stamp, s.config)):
        try:
            digest = binary_of(solution.launch) if solution.launch else None
            if digest is not None:
                write_binary(folder, read_binary(binaries, digest))
        except GemmtunedError as err:
            left.append((solution, str(err)))
            continue
        kept.setdefault(f"{solution.problem.family}-{solution.device}", []).append(solution)
    return write_tables(folder, kept, generation=max(generation, 1)), left
