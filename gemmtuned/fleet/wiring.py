"""An exchange put together from the settings: the store of this home, the objects at a URL, our name and our trust."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gemmtuned.configs.settings import Settings
from gemmtuned.fleet.host import host_name, trust
from gemmtuned.fleet.opening import open_objects
from gemmtuned.fleet.sync import Exchange
from gemmtuned.fleet.times import LEASE_S


@contextmanager
def exchange(
    here: Settings, url: str, *, claim: bool = False, dry_run: bool = False, lease_s: float = LEASE_S,
    work_s: float = float("inf"), propose: bool = False,
) -> Iterator[Exchange]:  # fmt: skip
    """For `with`: ready to run. Raises SettingError for a URL or key that cannot be used, TryLater, StoreError."""
    whom, objects = trust(here), open_objects(url, propose=propose)
    from gemmtuned.db.store import Store

    store = Store(here.db, locks=here.locks)
    try:
        yield Exchange(
            store=store, objects=objects, url=url, host=host_name(here), trust=whom, claim=claim, dry_run=dry_run,
            lease_s=lease_s, work_s=work_s,
        )  # fmt: skip
    finally:
        store.close()
