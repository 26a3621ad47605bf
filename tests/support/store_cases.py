"""A device, two environments and short ways to say problem, sighting and solution, for the tests of the store."""

import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Device, Environment, Solution
from gemmtuned.db import files
from gemmtuned.db.guest import GuestStore
from gemmtuned.db.store import Store, Work
from gemmtuned.db.upkeep import Examination

CPU = Device(key="cpu-test", kind="cpu", name="Test CPU", arch="x86_64", units=4)
OLD = Environment(CPU, {"torch": "2.12", "onednn": "2.12/cpu-test", "triton": "3.6"})
NEW = Environment(CPU, {"torch": "2.13", "onednn": "2.13/cpu-test", "triton": "3.6"})
HOUR = 3600.0
DAY = 24 * HOUR
_BEGAN_S = time.time()


def open_store(folder: Path, *, timeout_s: float = 30.0, create: bool = True) -> Store:
    """The store of this folder."""
    return Store(folder / "tune.db", locks=folder / "locks", timeout_s=timeout_s, create=create)


def new_store(folder: Path) -> Store:
    """The store of this folder, for tests of what a store does: its file is not made, see `new_file`."""
    return Store(new_file(folder / "tune.db"), locks=folder / "locks")


def new_file(path: Path) -> Path:
    """A database as a store makes it, copied from one that was made before: 6 ms less. One that is there stays."""
    if not path.exists():
        files.make(path)
        path.write_bytes(_pages())
    return path


@cache
def _pages() -> bytes:
    with TemporaryDirectory() as folder:
        open_store(Path(folder)).close()
        return (Path(folder) / "tune.db").read_bytes()


def look_over(store: Store) -> list[str]:
    """As the daemon does: look at every page, and build the file anew if it is damaged. Returns what was wrong."""
    file = store.lies_at()
    if file is None:
        return []
    examination = Examination(store.path)
    while (wrong := examination.result()) is None:
        time.sleep(0.001)
    if wrong:
        store.mend(wrong[0], file)
    return wrong


def problem(m: int = 8, n: int = 1024, k: int = 512, **columns: Any) -> Problem:
    """A dense fp32 problem with 2 threads."""
    return Problem(m=m, n=n, k=k, **{"dtype": "fp32", "threads": 2, **columns})


def saw(p: Problem, calls: int = 1, outcome: str = "miss", *, us: float = 0.0, graph: bool = False) -> Sighting:
    """A sighting; us: the mean of calls that were timed, half of them."""
    sampled = calls // 2 if us else 0
    return Sighting(p, outcome, calls, graph=graph, sampled_calls=sampled, sampled_us=sampled * us)


def found(p: Problem, environment: Environment = NEW, backend: str = "onednn", **columns: Any) -> Solution:
    """A solution that halves the time."""
    values: dict[str, Any] = {
        "device": environment.device.key, "mode": "eager", "covers": "exact", "backend": backend, "config": "{}",
        "stamp": environment.stamps.get(backend, ""), "us": 5.0, "baseline_us": 10.0, "gain_low": 1.8, "err": 1e-6,
        "baseline_err": 1e-6, "state": "published", **columns,
    }  # fmt: skip
    return Solution(problem=p, **values)


def lease(
    store: Store, owner: str = "host:1", *, now_s: float, environment: Environment = NEW, hold_s: float = 60
) -> Work:
    """The next unit, which must be there."""
    work = store.leases.lease_next(owner, environment, now_s=now_s, hold_s=hold_s)
    assert work is not None
    return work


def add(store: Store | GuestStore, calls: int = 1, m: int = 8) -> None:
    """Count calls of one problem of M = m."""
    store.sightings.add("r", NEW, [saw(problem(m), calls)], now_s=_BEGAN_S)
