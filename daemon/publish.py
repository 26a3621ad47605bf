"""Bring the published tables in line with the database.

The database decides, the tables are its picture: they are rendered from it whole, so a daemon killed between commit
and rename is healed by the next one, which finds that the two differ.  The generation in the manifest only ever
grows, because running programs ignore one older than they hold; when the database was lost or a table is written anew,
the store's count goes on from the manifest's.

Compiled kernels lie where workers left them, by hash; they are copied beside the tables before a manifest names them.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.errors import TableError, TryLater
from gemmtuned.configs.launch import read_launch
from gemmtuned.configs.manifest import Manifest, read_binary, read_manifest, read_table, write_binary, write_tables
from gemmtuned.configs.solution import Solution

if TYPE_CHECKING:
    from gemmtuned.db.store import Store

logger = logging.getLogger("gemmtuned.daemon")
WAIT_S: Final = 1.0  # publishing takes milliseconds; a daemon told to stop has 2 s


def publish(store: Store, folder: Path, locks: Path, *, now_s: float) -> Manifest | None:
    """Write what the store holds, if it is not there already; None when nothing was ever published.

    The workers' kernels are in the `bin` of the home, where `locks` is.
    Whoever changes solutions calls this after the commit: the daemon, `gemmtuned tune`, `gemmtuned withdraw`.
    Raises TableError when the disk refuses, TryLater when another publisher does not finish, StoreBusy, StoreError.
    """
    with _lock(locks):
        generation, solutions = store.published()
        solutions = [s for s in solutions if _bring_binary(s, locks.parent, folder)]
        before = _read(folder)
        if before is None and generation == 0 and not solutions:
            return None
        if before is not None and before.generation >= generation:
            whole = _holds(folder, before, solutions)
            wanted = before.generation if whole else before.generation + 1
            if wanted > generation:  # the same number means the same table in the store, the manifest and every program
                store.skip_to(wanted, now_s=now_s)
                generation = wanted
            if whole:
                return before
        manifest = write_tables(folder, tables(solutions), generation=generation, now_s=now_s)
    logger.info("published generation=%d files=%d solutions=%d", generation, len(manifest.files), len(solutions))
    return manifest


def _bring_binary(solution: Solution, home: Path, folder: Path) -> bool:
    """Have the kernel that a solution names beside the tables, whole; False when there is none: it is not published."""
    if not solution.launch:
        return True
    try:
        digest = read_launch(solution.launch).get("binary")
    except TableError as err:
        logger.warning("solution left out problem=%s reason=%r", solution.problem, str(err))
        return False
    if digest is None:
        return True
    try:
        read_binary(folder, digest)
    except TableError:
        try:
            data = read_binary(home, digest)
        except TableError as err:
            logger.warning("solution left out problem=%s reason=%r", solution.problem, str(err))
            return False
        write_binary(folder, data)
    return True


def tables(solutions: list[Solution]) -> dict[str, list[Solution]]:
    """Solutions by table, one for each family and device; rows in a fixed order, so equal content is equal bytes."""
    out: dict[str, list[Solution]] = {}
    for solution in sorted(solutions, key=lambda s: (str(s.problem), s.covers, s.mode, s.backend, s.stamp, s.config)):
        out.setdefault(f"{solution.problem.family}-{solution.device}", []).append(solution)
    return out


def _read(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except TableError as err:
        logger.warning("manifest not usable, written anew reason=%r", str(err))
        return None


def _holds(folder: Path, manifest: Manifest, solutions: list[Solution]) -> bool:
    """Whether the files are whole and say what the store says."""
    found: list[Solution] = []
    for file in manifest.files:
        try:
            rows, complaints = read_table(folder, file)
        except TableError as err:
            logger.warning("table not usable, written anew reason=%r", str(err))
            (folder / file.name).unlink(missing_ok=True)  # a file of that name would be taken for good
            return False
        if complaints:
            return False
        found += rows
    return tables(found) == tables(solutions)


@contextlib.contextmanager
def _lock(locks: Path) -> Iterator[None]:
    """One publisher at a time; the kernel frees the lock when its holder dies."""
    try:
        locks.mkdir(parents=True, exist_ok=True)
        fd = os.open(locks / "publish.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as err:
        raise TableError(f"{locks}: cannot take the publish lock ({err.strerror or err})") from err
    try:
        until = time.monotonic() + WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as err:
                if time.monotonic() > until:
                    raise TryLater(
                        f"{locks}/publish.lock: another process has been publishing for {WAIT_S:g} s"
                    ) from err
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)
