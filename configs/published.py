"""What is published, as those read it who must not lose any of it: line by line, with the state that it came from.

A line of a table that still stands in the next table is equal byte for byte, so comparing a store of thousands of
solutions with what is published costs a set difference, and only lines that differ are parsed.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path

from gemmtuned.configs.errors import GemmtunedError, TableError
from gemmtuned.configs.manifest import MANIFEST, Manifest, read_lines, read_manifest, read_trusted, stem_of
from gemmtuned.configs.solution import Environment, Solution


@dataclass(frozen=True)
class Published:
    """manifest: None when it cannot be used, and the lines are those of the newest table of each stem.

    generation, store_us: the publication of the store that it shows (store_us 0: not known).  created_us: when it was
    written.  unread: rows of tables that cannot be read, and `trouble` says why.
    """

    manifest: Manifest | None
    generation: int
    store_us: int
    created_us: int
    lines: frozenset[str]
    environments: tuple[Environment, ...] = ()
    unread: int = 0
    trouble: str = ""


def read_published(folder: Path) -> Published | None:
    """What is published in this folder; None when nothing ever was.

    Never raises for what lies there; TableError where the folder itself cannot be looked at.
    """
    try:
        manifest = read_manifest(folder)
    except TableError as err:
        return _without_manifest(folder, str(err), str(err))
    if manifest is None:
        found = _without_manifest(folder, f"{folder / MANIFEST} is missing, and tables lie beside its place", "")
        return found if found.lines else None
    lines: list[str] = []
    unread = 0
    trouble = ""
    for file in manifest.files:
        try:
            lines += read_lines(folder, file)
        except TableError as err:  # noqa: PERF203
            whole = _lines_as_named(folder / file.name, file.sha256)
            lines += whole or ()
            unread += file.rows if whole is None else 0
            trouble = trouble or str(err)
    created_us = _created_us(manifest)
    known = frozenset(lines)
    return Published(
        manifest, manifest.generation, manifest.store_us, created_us, known, manifest.environments, unread, trouble
    )


def solutions_in(lines: frozenset[str]) -> tuple[list[Solution], int]:
    """(the solutions of these lines, how many lines are no valid ones)."""
    found = []
    bad = 0
    for line in sorted(lines):
        try:
            found.append(Solution.from_row(json.loads(line)))
        except (ValueError, RecursionError, GemmtunedError):  # noqa: PERF203
            bad += 1
    return found, bad


def _without_manifest(folder: Path, trouble: str, closed: str) -> Published:
    """closed: why the manifest cannot be read. Raises TableError where the tables cannot be, either."""
    newest: dict[str, tuple[int, Path]] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                stem = stem_of(entry.name)
                with suppress(FileNotFoundError):  # a publisher has just removed it
                    if stem is not None:
                        found = entry.stat().st_mtime_ns, folder / entry.name
                        newest[stem] = max(newest.get(stem, found), found)
    except (FileNotFoundError, NotADirectoryError):
        pass  # nothing lies there, or no longer
    except OSError as err:
        raise TableError(closed or f"{folder}: cannot be looked at ({err.strerror or err})") from err
    lines: set[str] = set()
    for _, path in newest.values():
        lines.update(_lines_as_named(path) or ())
    known = frozenset(lines)
    generation = max((s.generation for s in solutions_in(known)[0]), default=0)
    generation = max(generation, _generation_in(folder / MANIFEST))
    created_us = max((when // 1000 for when, _ in newest.values()), default=0)
    return Published(None, generation, 0, created_us, known, trouble=trouble)


def _lines_as_named(path: Path, digest: str = "") -> list[str] | None:
    """The lines of a table that is whole as its name says, or by this hash, whatever else a manifest says of it."""
    try:
        data = read_trusted(path)
    except TableError:
        return None
    found = sha256(data).hexdigest()
    if found != digest and not path.stem.endswith(found[:16]):
        return None
    return data.decode("utf-8", errors="replace").splitlines()


def _generation_in(path: Path) -> int:
    """The number in what is left of a manifest: programs ignore a lower one than they hold."""
    try:
        found = re.search(rb'"generation": ?([0-9]{1,15})\b', read_trusted(path))
    except TableError:
        return 0
    return int(found[1]) if found else 0


def _created_us(manifest: Manifest) -> int:
    try:
        return round(datetime.fromisoformat(manifest.created).timestamp() * 1e6) + 999  # it is written in milliseconds
    except (ValueError, OverflowError):
        return 0
