"""An exchange put together from the settings: the store of this home, the objects at a URL, our name and our trust."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from gemmtuned.configs.errors import TryLater
from gemmtuned.configs.settings import Settings
from gemmtuned.db.lockfile import LockFile
from gemmtuned.fleet.host import host_name, trust
from gemmtuned.fleet.opening import as_text, open_objects
from gemmtuned.fleet.sync import Exchange
from gemmtuned.fleet.times import LEASE_S, MOST_S

LOCK: Final = "fleet.lock"  # in the home


@contextmanager
def exchange(
    here: Settings, url: str, *, claim: bool = False, dry_run: bool = False, lease_s: float = LEASE_S,
    work_s: float = float("inf"), propose: bool = False, is_left: Callable[[], bool] = lambda: False,
) -> Iterator[Exchange]:  # fmt: skip
    """For `with`: ready to run. Raises SettingError for a URL or key that cannot be used, TryLater, StoreError.

    A home makes one exchange at a time: that of a daemon which was killed may be under way while the next one starts,
    and two would take each other's claims for lost.
    """
    url = as_text(url)
    whom, objects = trust(here), open_objects(url, propose=propose)
    from gemmtuned.db.store import Store

    store = Store(here.db, locks=here.locks)
    host, one_at_a_time = host_name(here), LockFile(here.home / LOCK)
    try:
        if not dry_run and not one_at_a_time.acquire(MOST_S):
            raise TryLater(f"another exchange of {here.home} is under way")
        yield Exchange(
            store=store, objects=objects, url=url, host=host, trust=whom, claim=claim, dry_run=dry_run,
            lease_s=lease_s, work_s=work_s, is_left=is_left,
        )  # fmt: skip
    finally:
        one_at_a_time.close()  # which frees it
        store.close()
