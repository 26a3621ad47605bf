"""A store of many problems: 100,000 of one device, a few hundred of them called in each hour of a year, 70,000 tuned.

Written through the store where it is quick, and as rows of its tables where a year would take hours; then rolled up as
the daemon does.
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Device, Environment
from gemmtuned.db.sightings import HOURS as HOURS_KEPT
from gemmtuned.db.store import Store

DEVICE: Final = Device(key="cpu-wide", kind="cpu", name="CPU of many problems", arch="x86_64", units=16)
ENVIRONMENT: Final = Environment(DEVICE, {"torch": "2.13.0", "onednn": "2.13.0/cpu-wide"})
ROWS: Final = (1, 16, 64, 512, 2048)  # of X, in buckets of their own
HOURS: Final = 365 * 24
AN_HOUR: Final = 200  # problems that are called in it
RUNS: Final = ("serve", "embed", "<script>alert(1)</script>")
BATCH: Final = 5000
SAY_S: Final = 5.0  # between two lines of the roll-up's progress

Say = Callable[[str], None]


def problems(count: int) -> list[Problem]:
    """So many different ones, 250 layers for every 1250 of them."""
    sizes = ((128 + 64 * (i % 200), 128 + 64 * (i // 200)) for i in range(-(-count // len(ROWS))))
    return [Problem(m=m, n=n, k=k, dtype="bf16", threads=8) for n, k in sizes for m in ROWS][:count]


def write(folder: Path, *, count: int = 100_000, tuned: int = 70_000, now_s: float | None = None) -> dict[str, int]:
    """Write the store to folder/tune.db; returns how many rows of each kind it holds. Says on stderr how far it is.

    What is cut off leaves no tune.db that would be taken for a whole one: it is written beside its place.
    """
    began_s = time.monotonic()

    def say(what: str) -> None:
        print(f"store: {time.monotonic() - began_s:.0f} s, {what}", file=sys.stderr, flush=True)

    now_s = time.time() if now_s is None else now_s
    new = folder / "unfinished.db"
    for part in ("", "-wal", "-shm"):
        Path(f"{new}{part}").unlink(missing_ok=True)
    store = Store(new, locks=folder / "locks")
    _now(store, problems(count), now_s, say)
    store.close()
    with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as conn:
        conn.execute("BEGIN IMMEDIATE")
        _past(conn, count, int(now_s) // 3600, say)
        _tuned(conn, tuned, int(now_s * 1e6))
        conn.execute("COMMIT")
    store = Store(new, locks=folder / "locks")
    while not store.rollup.roll_up(now_s=now_s, for_s=SAY_S):
        say(f"rolled up as the daemon does, {_hours(new)} different times are left of {HOURS}")
    store.close()
    with contextlib.closing(sqlite3.connect(new)) as conn:
        conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    new.rename(folder / "tune.db")
    say("done")
    return rows(folder)


def _now(store: Store, asked: list[Problem], now_s: float, say: Say) -> None:
    """Calls of this hour: each problem by one of the labels."""
    for run, first in zip(RUNS, range(len(RUNS)), strict=True):
        part = asked[first :: len(RUNS)]
        for i in range(0, len(part), BATCH):
            seen = [
                Sighting(p, "miss", 10 + n % 90, sampled_calls=2, sampled_us=2.0 * (5 + n % 90))
                for n, p in enumerate(part[i : i + BATCH])
            ]
            store.sightings.add(run, ENVIRONMENT, seen, now_s=now_s)
        say(f"{len(part)} problems of a label are written")


def _hours(path: Path) -> int:
    """Times of the year that still have rows of their own: some 60 once all is rolled up."""
    with contextlib.closing(sqlite3.connect(path)) as conn:
        return int(conn.execute(f"SELECT count(*) FROM ({HOURS_KEPT})").fetchone()[0])


def rows(folder: Path) -> dict[str, int]:
    """How many rows of each kind the store there holds."""
    with contextlib.closing(sqlite3.connect(folder / "tune.db")) as conn:
        tables = ("problem", "sighting", "solution", "publication")
        return {name: int(conn.execute(f"SELECT count(*) FROM {name}").fetchone()[0]) for name in tables}


def _past(conn: sqlite3.Connection, count: int, hour: int, say: Say) -> None:
    """Each earlier hour of the year has calls of some problems, the small numbers most often."""
    chance = random.Random(36)
    asked = "SELECT problem_id, environment_id, run_id FROM sighting WHERE hour = ?"
    whose = {problem: (environment, run) for problem, environment, run in conn.execute(asked, (hour,))}
    for ago in range(1, HOURS + 1):
        numbers = {min(int(count * chance.random() ** 3) + 1, count) for _ in range(AN_HOUR)}
        at, outcome = hour - ago, "exact" if ago < HOURS / 2 else "miss"
        conn.executemany(
            "INSERT INTO sighting VALUES (?, ?, ?, ?, ?, 0, ?, 0, 0.0, ?)",
            [(at, n, *whose[n], outcome, 99 + n % 900, at * 3_600_000_000 + 1) for n in sorted(numbers)],
        )
        if ago % 1000 == 0:
            say(f"{ago} of {HOURS} hours are written")
    conn.execute("CREATE TEMP TABLE sums AS SELECT problem_id, sum(calls) AS calls FROM sighting GROUP BY problem_id")
    conn.execute("CREATE UNIQUE INDEX temp.sums_of ON sums (problem_id)")
    conn.execute("UPDATE demand SET calls = (SELECT calls FROM sums s WHERE s.problem_id = demand.problem_id)")


def _tuned(conn: sqlite3.Connection, tuned: int, now_us: int) -> None:
    """The first so many have a verdict, one in five that torch is best, found over the last 300 days."""
    when = [now_us - (tuned - i) * (300 * 86_400_000_000 // tuned) for i in range(tuned)]
    each = 50  # verdicts a publication
    conn.executemany(
        "INSERT INTO publication VALUES (?, ?, ?, 0, 'installed')",
        [(i // each + 1, when[i], each) for i in range(0, tuned, each)],
    )
    conn.executemany(
        "INSERT INTO solution (problem_id, device_id, environment_id, mode, covers, backend, config, stamp, us, "
        "baseline_us, gain_low, err, baseline_err, state, generation, published_us) VALUES (?, 1, 1, 'eager', 'exact', "
        "?, ?, ?, ?, ?, 1.0, 1e-3, 1e-3, ?, ?, ?)",
        [
            (i + 1, *_verdict(i), i // each + 1, when[i // each * each])
            for i in range(tuned)
        ],
    )  # fmt: skip


def _verdict(i: int) -> tuple[object, ...]:
    """(backend, config, stamp, us, baseline_us, state)."""
    base_us = 10.0 + i % 77
    if i % 5 == 0:
        return "torch", "", "2.13.0", base_us, base_us, "default_best"
    return "onednn", "{}", "2.13.0/cpu-wide", base_us / (1.05 + i % 13 / 10), base_us, "published"
