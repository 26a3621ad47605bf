"""Doctor's checks of what grows: each kind of file that gemmtuned keeps, with its size and what bounds it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.manifest import BINARIES
from gemmtuned.configs.settings import Settings
from gemmtuned.db import queries
from gemmtuned.reports.checks import PASS, WARN, Check
from gemmtuned.reports.render import several, size

MANY_RUNS: Final = 10_000
LARGE_INGEST_BYTES: Final = 256 << 20  # the daemon moves it out at 16 MiB


def checks(settings: Settings) -> Iterator[Check]:
    """One line for each kind that is there."""
    home, folder = settings.home, settings.config_dir
    found = {
        "kernels": [*_files(home / BINARIES), *(_files(folder / BINARIES) if folder != home else ())],
        "tables": [path for path in _files(folder) if path.suffix in (".jsonl", ".json")],
        "probation marks": _files(home / "probation"),
        "caches": below(settings.cache),
    }
    bounds = {
        "kernels": "what no solution names goes after a week, while a daemon runs",
        "tables": "those of the newest two publications are kept",
        "probation marks": "they go with the next generation",
        "caches": f"built anew when needed: rm -r {settings.cache}",
    }
    for kind, paths in found.items():
        number, total = size_of(paths)
        if number:
            yield Check("room", PASS, f"{kind}: {several(number, 'file')}, {size(total)}; {bounds[kind]}")
    yield from _ingest(settings)
    yield from _runs(settings)


def _ingest(settings: Settings) -> Iterator[Check]:
    """What members left, and what of it waits in the home."""
    _, total = size_of([settings.ingest, Path(f"{settings.ingest}-wal")])
    if total:
        text = f"counts of other users: {size(total)} in {settings.ingest}"
        fix = "start gemmtuned daemon: it takes them, and moves the file out once a day or above 16 MiB"
        yield Check(
            "room", WARN if total > LARGE_INGEST_BYTES else PASS, text, fix if total > LARGE_INGEST_BYTES else ""
        )
    for name, what, fix in (
        ("ingest-aside.db", "is being taken in", ""),
        ("ingest-refused.db", "held what no gemmtuned wrote, and is kept to be looked at", "rm it"),
    ):
        number, total = size_of([settings.db.with_name(name)])
        if number:
            text = f"a file of other users' counts {what}: {size(total)}, {settings.db.with_name(name)}"
            yield Check("room", WARN if fix else PASS, text, fix)


def _runs(settings: Settings) -> Iterator[Check]:
    """Labels with a job's number in them never end."""
    if not settings.db.exists():
        return
    try:
        number = queries.count_runs(settings.db)
    except StoreError:
        return  # the line on the database says why
    if number > MANY_RUNS:
        fix = "set GEMMTUNED_RUN to a name of the workload, without numbers of jobs"
        yield Check("room", WARN, f"{number} run labels: each keeps rows of its own for every problem and day", fix)
    elif number:
        yield Check("room", PASS, f"run labels: {number}")


def _files(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(folder.iterdir())
    return []


def below(folder: Path) -> Iterator[Path]:
    """All files in a folder and in those in it."""
    for path, _, names in os.walk(folder):
        yield from (Path(path, name) for name in names)


def size_of(paths: Iterable[Path]) -> tuple[int, int]:
    """(regular files, bytes they take); a file with two names counts once."""
    seen: dict[tuple[int, int], int] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            facts = path.lstat()
            if stat.S_ISREG(facts.st_mode):
                seen[facts.st_dev, facts.st_ino] = facts.st_size
    return len(seen), sum(seen.values())
