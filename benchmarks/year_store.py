"""A synthetic year: 10,000 problems of one device, called every hour by each label, 7,000 of them tuned on the way.

It is written with the schema as it was before summaries were kept (step 12), hours of two weeks and days
before them, as the roll-up of that version left it: so it is also a database that an upgrade must bring over.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path
from unittest import mock

from gemmtuned.configs.padding import coarse_m, fine_m
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Device, Environment
from gemmtuned.configs.spelling import REST_OF_0_1_0
from gemmtuned.db import migrations

DEVICE = Device(key="cpu-year", kind="cpu", name="CPU of a year", arch="x86_64", units=16)
ENVIRONMENT = Environment(DEVICE, {"torch": "2.13.0", "onednn": "2.13.0/cpu-year"})
ROWS = (1, 16, 64, 512, 2048)  # of X, in buckets of their own: every size is tuned by itself
BEFORE = 12  # steps of the schema that the year is written with
DAYS = 365
HOURS = 15 * 24  # kept hour by hour


def problems(count: int) -> list[Problem]:
    """So many different ones."""
    sizes = ((256 + 64 * (i % 50), 256 + 64 * (i // 50)) for i in range(-(-count // len(ROWS))))
    return [Problem(m=m, n=n, k=k, dtype="bf16", threads=8) for n, k in sizes for m in ROWS][:count]


def write(path: Path, *, count: int = 10_000, tuned: int = 7_000, labels: int = 1, now_s: float | None = None) -> int:
    """Write the year to a new file at path; returns how many sightings it holds. About half a minute a label."""
    now_s = time.time() if now_s is None else now_s
    path.unlink(missing_ok=True)
    steps = migrations.STEPS[:BEFORE]
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute("PRAGMA journal_mode = WAL").fetchall()
        conn.execute("PRAGMA cache_size = -200000")
        with mock.patch.object(migrations, "STEPS", steps), mock.patch.object(migrations, "SCHEMA", BEFORE):
            migrations.apply(conn)
        conn.execute("BEGIN IMMEDIATE")
        _facts(conn, problems(count), tuned, labels, now_s)
        _sightings(conn, count, tuned, labels, int(now_s) // 3600)
        conn.execute("COMMIT")
        conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return int(conn.execute("SELECT count(*) FROM sighting").fetchone()[0])


def _facts(conn: sqlite3.Connection, asked: list[Problem], tuned: int, labels: int, now_s: float) -> None:
    now_us, day_us = int(now_s * 1e6), 86_400_000_000
    d = DEVICE
    conn.execute("INSERT INTO device VALUES (1, ?, ?, ?, ?, ?)", (d.key, d.kind, d.name, d.arch, d.units))
    conn.execute("INSERT INTO environment VALUES (1, ?, 1, ?)", (ENVIRONMENT.key, now_us - DAYS * day_us))
    stamps = [(1, backend, stamp) for backend, stamp in ENVIRONMENT.stamps.items()]
    conn.executemany("INSERT INTO environment_stamp VALUES (?, ?, ?)", stamps)
    conn.executemany("INSERT INTO run VALUES (?, ?)", [(i + 1, f"label-{i + 1}") for i in range(labels)])
    names = ("id", "text", "rest", "m", *REST_OF_0_1_0, "m_fine", "m_coarse", "flops", "bytes")
    rows = []
    for number, p in enumerate(asked, 1):
        values = [getattr(p, name) for name in REST_OF_0_1_0]
        key = "|".join("" if value is None else str(value) for value in values)
        sizes = (fine_m(p.m), coarse_m(p.m, p.n), float(p.flops), float(p.bytes))
        rows.append((number, str(p), key, p.m, *values, *sizes))
    quoted = ", ".join(f'"{name}"' for name in names)
    conn.executemany(f"INSERT INTO problem ({quoted}) VALUES ({', '.join('?' * len(names))})", rows)
    when = [now_us - DAYS * day_us + (i * 300 * day_us) // tuned for i in range(tuned)]
    conn.executemany("INSERT INTO publication VALUES (?, ?, 1, 0, 'installed')", enumerate(when, 1))
    conn.executemany(
        "INSERT INTO solution (problem_id, device_id, environment_id, mode, covers, backend, config, stamp, us, "
        "baseline_us, gain_low, err, baseline_err, state, generation, published_us) VALUES (?, 1, 1, 'eager', 'exact', "
        "'onednn', '{}', '2.13.0/cpu-year', 8.0, 10.0, 1.2, 1e-3, 1e-3, 'published', ?, ?)",
        [(i, i, at) for i, at in enumerate(when, 1)],
    )


def _sightings(conn: sqlite3.Connection, count: int, tuned: int, labels: int, hour: int) -> None:
    """Hits from the day after a problem was tuned, misses before it; on the day itself both."""
    first_hourly = (hour - HOURS) // 24 * 24
    conn.execute("CREATE TEMP TABLE at (hour INTEGER PRIMARY KEY)")
    hours = [*range(hour // 24 * 24 - (DAYS - 1) * 24, first_hourly, 24), *range(first_hourly, hour + 1)]
    conn.executemany("INSERT INTO at VALUES (?)", [(h,) for h in hours])
    outcome = "CASE WHEN s.published_us < at.hour * 3600000000 THEN 'exact' ELSE 'miss' END"
    for label in range(1, labels + 1):
        conn.execute(
            f"INSERT INTO sighting SELECT p.id, 1, {label}, at.hour, {outcome}, 0, 1000 + p.id % 77, 20, "
            "20 * (10.0 + p.id % 13 / 13.0), at.hour * 3600000000 + 3599000000 "
            "FROM problem p LEFT JOIN solution s ON s.problem_id = p.id JOIN at"
        )
        conn.execute(
            f"INSERT INTO sighting SELECT s.problem_id, 1, {label}, at.hour, 'exact', 0, 500, 0, 0.0, "
            "at.hour * 3600000000 + 3599000000 FROM solution s "
            "JOIN at ON at.hour = s.published_us / 3600000000 / 24 * 24"
        )
    conn.execute("DROP TABLE at")
    conn.execute(
        "INSERT INTO demand SELECT problem_id, 1, sum(calls), sum(sampled_calls * (outcome = 'miss')), "
        "sum(sampled_us * (outcome = 'miss')), min(hour) * 3600000000, max(last_seen_us) FROM sighting GROUP BY 1"
    )
