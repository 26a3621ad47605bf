"""Brings the published tables in line with the database.

The database decides, and the tables are rendered from it as a whole: if a daemon is killed between commit and rename,
the next one finds that the two differ and publishes again.  But a row is removed only if the database says why.
Solutions that the database has lost (deleted, damaged, replaced by an older copy) are restored from the tables first;
if that fails, nothing is published, and programs keep the tables that they have.

The generation in the manifest only grows, because running programs ignore older ones; the store's generations go on
from the manifest's.

Workers leave compiled kernels in a folder by hash; they are copied beside the tables before a manifest names them.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gemmtuned.configs.errors import TableError, TryLater
from gemmtuned.configs.launch import binary_of
from gemmtuned.configs.manifest import (
    BINARIES,
    Manifest,
    check_owner,
    contents_of,
    is_whole,
    read_binary,
    read_manifest,
    table_file,
    write_binary,
    write_contents,
)
from gemmtuned.configs.open_files import limit_reached
from gemmtuned.configs.published import Published, read_published
from gemmtuned.configs.solution import Solution
from gemmtuned.db.faults import no_locks_error
from gemmtuned.db.lockfile import holder, open_lock, way_out

if TYPE_CHECKING:
    from gemmtuned.db.restore import Standing, TakenBack
    from gemmtuned.db.store import Store

logger = logging.getLogger("gemmtuned.daemon")
WAIT_S: Final = 1.0  # for another publisher: publishing takes milliseconds, and a daemon that is to stop has 2 s
_TRIES: Final = 3  # the database may be replaced between two steps


def publish(store: Store, folder: Path, locks: Path, *, now_s: float, give_up: bool = False) -> Manifest | None:
    """Publish the store's solutions, if they are not published already; None when nothing was ever published.

    Published solutions that the store has lost are restored first.  give_up: publish even if solutions in tables that
    cannot be read are lost by it.  The workers' kernels are in the `bin` of the home, where `locks` is.

    Everything that changes solutions calls this after its commit: the daemon, `gemmtuned tune`, `gemmtuned withdraw`.
    Raises TableError when the disk refuses or solutions in use would be lost; TryLater when another publisher does not
    finish; StoreBusy, StoreError.
    """
    with publishing(locks):
        for one in (folder, folder / BINARIES):
            if os.path.isdir(one):  # noqa: PTH112  Path.is_dir raises where the folder is closed
                check_owner(one)  # else programs would not trust what is written there
        current = _is_current(store, folder)
        if current is not None:
            return current
        for _ in range(_TRIES):
            before, state = _settle(store, folder, now_s=now_s, give_up=give_up)
            new = _rendered(state, locks.parent, folder)
            if before is None and state.generation == 0 and not new:
                return None
            manifest = before.manifest if before is not None else None
            whole = manifest is not None and _holds(folder, manifest, new)
            generation = state.generation
            if before is not None:
                generation = max(generation, before.generation + (not whole))
            # The same number means the same table in the store, the manifest and every program
            if generation > state.generation and not store.solutions.skip_to(
                generation, after=state.generation, now_s=now_s
            ):
                continue  # others have changed the store meanwhile
            if manifest is not None and whole and generation == manifest.generation:
                return manifest
            manifest = write_contents(
                folder, new, generation=generation, now_s=now_s, store_us=store.solutions.publication_us(generation),
                environments=state.environments,
            )  # fmt: skip
            rows = sum(file.rows for file in manifest.files)
            logger.info("published generation=%d files=%d solutions=%d", generation, len(manifest.files), rows)
            return manifest
    raise TryLater(f"{folder}: the database changes faster than it is published. Try again")


def _rendered(state: Standing, home: Path, folder: Path) -> dict[str, bytes]:
    """The contents of the store's tables by stem; their kernels are copied beside them."""
    solutions = [s for s in state.lines.values() if _bring_binary(s, home, folder)]
    line_of = {id(s): line for line, s in state.lines.items()}
    files: dict[str, bytes] = {}
    for stem, group in tables(solutions).items():
        files |= contents_of(stem, (line_of[id(s)] for s in group))
    return files


def take_back(store: Store, folder: Path, locks: Path, *, now_s: float) -> None:
    """Restore published solutions that the store has lost, before anything is changed in it. Raises as `publish`."""
    if _is_current(store, folder) is not None:
        return
    before = read_published(folder)
    if before is None:
        return
    state = store.restore.standing(before)
    if state.behind or state.lost or state.short:
        with publishing(locks):
            _settle(store, folder, now_s=now_s)


def _settle(store: Store, folder: Path, *, now_s: float, give_up: bool = False) -> tuple[Published | None, Standing]:
    """(what is published, the store compared with it), once the store accounts for every published row."""
    before = read_published(folder)
    if before is None:
        return None, store.restore.standing(None)
    for _ in range(_TRIES):
        state = store.restore.standing(before)
        if state.short and not give_up:
            raise TableError(
                f"{folder}: {state.short} solutions of generation {before.generation} cannot be read "
                f"({before.trouble}), and the database does not have them: nothing is published, programs keep the "
                "table that they hold. Put the file or a backup of the database back, or give them up: gemmtuned db "
                "publish --give-up"
            )
        if not state.behind and not state.lost:
            if before.trouble:
                logger.warning("published tables not usable, written anew reason=%r", before.trouble)
            return before, state
        _say(store.restore.take_back(before, now_s=now_s), before, state)
    raise TableError(
        f"{folder}: the database loses rows while it is compared with generation {before.generation}: nothing is "
        "published, programs keep the table that they hold. Look at: gemmtuned doctor"
    )


def _say(done: TakenBack, before: Published, state: Standing) -> None:
    why = "the database is lost or older" if state.behind else "the database has lost rows"
    logger.warning(
        "taken back from published tables generation=%d solutions=%d superseded=%d retired=%d unusable=%d reason=%r",
        before.generation, done.back, done.superseded, done.gone, state.invalid, why,
    )  # fmt: skip


def _bring_binary(solution: Solution, home: Path, folder: Path) -> bool:
    """Copy the kernel that a solution names beside the tables; False if there is none, so it cannot be published."""
    if not solution.launch:
        return True
    try:
        digest = binary_of(solution.launch)
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


def _is_current(store: Store, folder: Path) -> Manifest | None:
    """What is published, if it surely is what the store has: the same publication, as many rows, all files whole."""
    try:
        manifest = read_manifest(folder)
    except TableError:
        return None
    if manifest is None or not manifest.store_us:
        return None
    rows = sum(file.rows for file in manifest.files)
    launches = store.restore.launches_at(manifest.generation, manifest.store_us, solutions=rows)
    if launches is None or not all(is_whole(folder, file) for file in manifest.files):
        return None
    try:
        for digest in {binary_of(launch) for launch in launches} - {None}:
            read_binary(folder, str(digest))
    except TableError:
        return None
    return manifest


def _holds(folder: Path, manifest: Manifest, new: Mapping[str, bytes]) -> bool:
    """Whether the files are whole and have the store's content."""
    wanted = [table_file(stem, content) for stem, content in sorted(new.items())]
    return list(manifest.files) == wanted and all(is_whole(folder, file) for file in wanted)


@contextlib.contextmanager
def publishing(locks: Path) -> Iterator[None]:
    """Hold the lock of publishers, of which one works at a time; it is freed when its holder dies."""
    try:
        fd = open_lock(locks / "publish.lock")
    except OSError as err:
        raise TableError(
            f"{locks}/publish.lock: cannot be opened ({limit_reached(err) or err.strerror or err}){way_out(err)}"
        ) from err
    try:
        until = time.monotonic() + WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as err:
                if time.monotonic() > until:
                    found = holder(locks / "publish.lock")
                    who = f"another process has been publishing for {WAIT_S:g} s" + (f": {found}" if found else "")
                    raise TryLater(f"{locks}/publish.lock: {who}") from err
                time.sleep(0.01)
            except OSError as err:
                raise no_locks_error(locks / "publish.lock", err) from err
        yield
    finally:
        os.close(fd)
