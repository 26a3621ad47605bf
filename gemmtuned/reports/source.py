"""Where reports get their rows: the database, or the one line that says there is none yet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gemmtuned.configs.errors import GemmtunedError, StoreError, TableError
from gemmtuned.configs.manifest import read_manifest
from gemmtuned.configs.settings import Settings
from gemmtuned.reports.published import standing
from gemmtuned.reports.render import Report, Table

if TYPE_CHECKING:
    from gemmtuned.db.store import Store


def no_database(command: str, settings: Settings, *tables: str, **facts: Any) -> Report:
    """What a read command answers before any program was counted: nothing, and how to begin.

    Raises StoreError when there can be no database: its folder is a file.
    """
    from gemmtuned.db.faults import no_folder_error

    below_a_file = no_folder_error(settings.db)
    if below_a_file is not None:
        raise below_a_file
    lost = standing(settings)
    line = f"No database yet at {settings.db}. A program started with GEMMTUNED=1 makes it: gemmtuned run COMMAND"
    if lost is not None:
        line = f"{lost.found[:1].upper()}{lost.found[1:]}. To mend it: {lost.fix}"
    empty = [Table(key, (), ()) for key in tables]
    return Report(command, empty, facts={**facts, "database": None}, lines=[*disk_full(settings), line])


def disk_full(settings: Settings) -> list[str]:
    """The line that comes first where programs cannot keep what they count; else none."""
    from gemmtuned.db.faults import no_room

    if not no_room(settings.db):
        return []
    return [f"DISK FULL: no room at {settings.db.parent}, so counts of programs are lost. Free some space"]


def of_database(report: Report, settings: Settings) -> Report:
    """The report, naming the database that it is of, as `no_database` does."""
    return replace(report, facts={**report.facts, "database": str(settings.db)})


def refuse_none(settings: Settings) -> None:
    """Raise StoreError when there is no database."""
    if not settings.db.exists():
        raise StoreError(f"no database at {settings.db} yet: gemmtuned run COMMAND makes it")


@contextmanager
def writer(settings: Settings) -> Iterator[Store]:
    """The store, opened for writing; never made here. Raises StoreError when there is none."""
    refuse_none(settings)
    from gemmtuned.db.store import Store

    store = Store(settings.db, locks=settings.locks, create=False)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def curator(settings: Settings, *, give_up: bool = False) -> Iterator[Store]:
    """As `writer`, for those who change what is in use: what the store has lost of the tables is back in it first.

    give_up: not what can be had back only in part; the caller publishes at once.  Where there is no database, and
    something is published, it is made from that.  Raises as `publish` does.
    """
    from gemmtuned.configs.published import read_published
    from gemmtuned.daemon.publishing.publish import take_back
    from gemmtuned.db.store import Store

    if not settings.db.exists():
        published = read_published(settings.config_dir)
        if published is None or not (published.lines or published.unread):
            refuse_none(settings)
        Store(settings.db, locks=settings.locks).close()
    with writer(settings) as store:
        if not give_up:
            take_back(store, settings.config_dir, settings.locks, now_s=time.time())
        yield store


def put_in_use(store: Store, settings: Settings, done: str = "", *, give_up: bool = False) -> tuple[int, bool]:
    """Publish what the store holds whenever the tables differ from it: (generation, whether they did).

    done: what the caller did before, "withdrawn"; an error says that it is not yet published.
    Raises TableError, TryLater, StoreError.
    """
    from gemmtuned.daemon.publishing.publish import publish

    before = _published_generation(settings)
    try:
        manifest = publish(store, settings.config_dir, settings.locks, now_s=time.time(), give_up=give_up)
    except GemmtunedError as err:
        if not done:
            raise
        how = "Try again: gemmtuned db publish, or the same command. A running daemon does it by itself"
        raise type(err)(f"{done}, not yet published: {err}. {how}") from err
    generation = manifest.generation if manifest else store.solutions.generation()
    return generation, manifest is not None and generation != before


def _published_generation(settings: Settings) -> int | None:
    try:
        manifest = read_manifest(settings.config_dir)
    except TableError:
        return None
    return manifest.generation if manifest else None


def left_undone(generation: int) -> list[str]:
    """The note of a command that changed nothing, and published what an earlier one could not."""
    return [f"generation {generation} is published now: what was changed before, and could not be published then"]
