"""A home with a small database, for tests of the commands that read and change it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from command_line import EVEN, HERE, TUNED, WAITING, solution
from store_cases import new_file

from gemmtuned.configs.sighting import Session, Sighting


def small_home(folder: Path) -> Path:
    """`folder/home`, made anew: its database holds a tuned problem, one that is best as it is, and one that waits."""
    from gemmtuned.configs.solution import Candidate
    from gemmtuned.daemon.publishing.publish import publish
    from gemmtuned.db.store import Store

    home = folder / "home"
    home.mkdir()
    now_s = time.time()
    store = Store(new_file(home / "tune.db"), locks=home / "locks")
    try:
        seen = [Sighting(TUNED, "miss", 1000), Sighting(EVEN, "miss", 10), Sighting(WAITING, "miss", 30)]
        store.sightings.add("serve \x1b[31m[red]", HERE, seen, now_s=now_s - 60)
        started_us = int(now_s * 1e6)
        session = Session(
            host="here", pid=os.getpid(), started_us=started_us, run="serve", path="native", generation=1, errors=2
        )
        store.sightings.beat(session, now_s=now_s)
        work = store.leases.lease_next("test", HERE, now_s=now_s, hold_s=60, problems=[TUNED])
        assert work is not None
        store.trials.add(
            work,
            TUNED,
            Candidate("onednn"),
            phase="confirm",
            us=50.0,
            err=1e-7,
            outcome="ok",
            note="",
            started_us=started_us,
        )
        store.solutions.install(work, [solution(TUNED)], environment=HERE, now_s=now_s)
        best = solution(EVEN, backend="torch", stamp="2.13.0", us=100.0, gain_low=1.0, state="default_best")
        store.solutions.install(None, [best], environment=HERE, now_s=now_s)
        store.sightings.add("serve", HERE, [Sighting(TUNED, "exact", 500)], now_s=now_s)
        publish(store, home / "configs", home / "locks", now_s=now_s)
    finally:
        store.close()
    return home
