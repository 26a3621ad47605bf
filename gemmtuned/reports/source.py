"""Where reports get their rows: the database, or the one line that says there is none yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gemmtuned.configs.errors import StoreError
from gemmtuned.configs.settings import Settings
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
    line = f"No database yet at {settings.db}. A program started with GEMMTUNED=1 makes it: gemmtuned run COMMAND"
    empty = [Table(key, (), ()) for key in tables]
    return Report(command, empty, facts={**facts, "database": None}, lines=[line])


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
