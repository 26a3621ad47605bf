"""Run as a process with failing_calls.c preloaded: each call to the disk fails once, in all of a store's life.

python every_call_fails.py FOLDER LIBRARY ERRNO STEP: for every STEPth call of the run without a fault.
Prints how many calls there are, and one line for each that cost something.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from fakes import ENVIRONMENT, solution

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.manifest import read_manifest, read_table
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import Sighting
from gemmtuned.daemon.publishing.publish import publish
from gemmtuned.db.store import Store

T = 1_800_000_000.0


def problem(n: int) -> Problem:
    return Problem(m=8, n=n, k=64, threads=2)


def life(home: Path) -> tuple[int, int]:
    """Count, install, publish, roll up, checkpoint; (calls of flushes that returned, steps that failed)."""
    counted = errors = 0
    store = None
    for step in range(8):
        try:
            store = store or Store(home / "tune.db", locks=home / "locks", timeout_s=1)
            if step % 3 == 0:
                store.sightings.add("r", ENVIRONMENT, [Sighting(problem(64), "exact", 10)], now_s=T)
                counted += 10
            elif step == 1:
                store.solutions.install(None, [solution(problem(100 + step))], environment=ENVIRONMENT, now_s=T + step)
            elif step == 4:
                store.checkpoint()
            elif step == 5:
                store.rollup.roll_up(now_s=T + 40 * 86400)
            publish(store, home / "configs", home / "locks", now_s=T + step)
        except GemmtunedError:  # noqa: PERF203
            errors += 1
    if store is not None:
        store.close()
    return counted, errors


def in_use(home: Path) -> set[int]:
    manifest = read_manifest(home / "configs")
    return (
        {s.problem.n for file in manifest.files for s in read_table(home / "configs", file)[0]} if manifest else set()
    )


def wrong(home: Path, counted: int, before: int) -> str:
    """What the next start finds amiss; "" when nothing."""
    if not in_use(home) >= {64, 65}:
        return f"the table has {sorted(in_use(home))}"
    store = Store(home / "tune.db", locks=home / "locks")
    try:
        publish(store, home / "configs", home / "locks", now_s=T + 100)
        found = store.check()
        calls = store._db.read(lambda conn: conn.execute("SELECT total(calls) FROM demand").fetchone()[0])
        if found or calls < before + counted:
            return f"{found} {calls} of {before + counted} calls"
        return (
            "" if {s.problem.n for s in store.solutions.published()[1]} == in_use(home) else "store and tables differ"
        )
    finally:
        store.close()


def main(folder: Path, library: str, number: int, step: int) -> None:
    logging.disable()
    calls = ctypes.CDLL(library)
    source = folder / "source"
    store = Store(source / "tune.db", locks=source / "locks")
    store.sightings.add("r", ENVIRONMENT, [Sighting(problem(64), "exact", 5)], now_s=T - 20 * 86400)
    store.solutions.install(
        None, [solution(problem(64)), solution(problem(65))], environment=ENVIRONMENT, now_s=T - 100
    )
    publish(store, source / "configs", source / "locks", now_s=T - 100)
    store.close()

    at, total, refused = 0, 1, 0
    began_s = time.monotonic()
    while at <= total and time.monotonic() - began_s < 1000:
        home = folder / "home"
        shutil.copytree(source, home)
        calls.fail_arm(str(home).encode(), ctypes.c_long(at), number)
        counted, errors = life(home)
        refused += errors > 0
        if at == 0:
            total = calls.fail_count()
        calls.fail_arm(b"", ctypes.c_long(0), 0)
        amiss = wrong(home, counted, 5)
        if amiss:
            print(f"call {at}: {amiss}")
        shutil.rmtree(home)
        at += step if at else 1
    print(f"{total} calls, tried to {min(at, total)}, {refused} of them refused a step")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    os._exit(0)
