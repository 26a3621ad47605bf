"""A store of many problems: 100,000 of one device, a few hundred of them called in each hour of a year, 70,000 tuned.

Written through the store where it is quick, and as rows of its tables where a year would take hours; then rolled up as
the daemon does.
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
import time
from pathlib import Path
from typing import Final

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Device, Environment
from gemmtuned.db.store import Store

DEVICE: Final = Device(key="cpu-wide", kind="cpu", name="CPU of many problems", arch="x86_64", units=16)
ENVIRONMENT: Final = Environment(DEVICE, {"torch": "2.13.0", "onednn": "2.13.0/cpu-wide"})
ROWS: Final = (1, 16, 64, 512, 2048)  # of X, in buckets of their own
HOURS: Final = 365 * 24
AN_HOUR: Final = 200  # problems that are called in it
RUNS: Final = ("serve", "embed", "<script>alert(1)</script>")
BATCH: Final = 5000


def problems(count: int) -> list[Problem]:
    """So many different ones, 250 layers for every 1250 of them."""
    sizes = ((128 + 64 * (i % 200), 128 + 64 * (i // 200)) for i in range(-(-count // len(ROWS))))
    return [Problem(m=m, n=n, k=k, dtype="bf16", threads=8) for n, k in sizes for m in ROWS][:count]


def write(folder: Path, *, count: int = 100_000, tuned: int = 70_000, now_s: float | None = None) -> dict[str, int]:
    """Write the store to folder/tune.db; returns how many rows of each kind it holds. Some minutes."""
    now_s = time.time() if now_s is None else now_s
    asked = problems(count)
    store = Store(folder / "tune.db", locks=folder / "locks")
    for run, first in zip(RUNS, range(0, 3), strict=True):
        part = asked[first::3]
        for i in range(0, len(part), BATCH):
            seen = [
                Sighting(p, "miss", 10 + n % 90, sampled_calls=2, sampled_us=2.0 * (5 + n % 90))
                for n, p in enumerate(part[i : i + BATCH])
            ]
            store.add_sightings(run, ENVIRONMENT, seen, now_s=now_s)
    store.close()
    with contextlib.closing(sqlite3.connect(folder / "tune.db", isolation_level=None)) as conn:
        conn.execute("BEGIN IMMEDIATE")
        _past(conn, count, int(now_s) // 3600)
        _tuned(conn, tuned, int(now_s * 1e6))
        conn.execute("COMMIT")
    store = Store(folder / "tune.db", locks=folder / "locks")
    store.roll_up(now_s=now_s)
    store.close()
    return rows(folder)


def rows(folder: Path) -> dict[str, int]:
    """How many rows of each kind the store there holds."""
    with contextlib.closing(sqlite3.connect(folder / "tune.db")) as conn:
        tables = ("problem", "sighting", "solution", "publication")
        return {name: int(conn.execute(f"SELECT count(*) FROM {name}").fetchone()[0]) for name in tables}


def _past(conn: sqlite3.Connection, count: int, hour: int) -> None:
    """Each earlier hour of the year has calls of some problems, the small numbers most often."""
    chance = random.Random(36)
    for ago in range(1, HOURS + 1):
        numbers = {min(int(count * chance.random() ** 3) + 1, count) for _ in range(AN_HOUR)}
        at = hour - ago
        conn.executemany(
            "INSERT INTO sighting SELECT ?, problem_id, environment_id, run_id, ?, 0, 99 + problem_id % 900, 0, 0.0, ? "
            "FROM sighting WHERE hour = ? AND problem_id = ?",
            [(at, "exact" if ago < HOURS / 2 else "miss", at * 3_600_000_000 + 1, hour, number) for number in numbers],
        )
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
