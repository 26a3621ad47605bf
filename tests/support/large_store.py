"""A store as large as a year makes it in what the loop and reports look at: 10,000 problems, thousands of solutions."""

from __future__ import annotations

import sqlite3

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Environment
from gemmtuned.db.store import Store

PROBLEMS = 10_000
HOURS = 6


def fill(store: Store, environment: Environment, *, solved: int, backend: str, now_s: float) -> list[Problem]:
    """All problems called in each of the last hours; the first `solved` of them have a solution by this backend."""
    sizes = ((64 * (i % 50 + 1), 64 * (i // 50 + 1)) for i in range(PROBLEMS // 5))
    problems = [Problem(m=m, n=n, k=k) for n, k in sizes for m in (1, 16, 64, 512, 2048)]
    batch = [Sighting(p, "miss", 10, sampled_calls=2, sampled_us=2.0 * (5 + i % 90)) for i, p in enumerate(problems)]
    store.sightings.add("serve", environment, batch, now_s=now_s)
    stamp, now_us, hour = environment.stamps[backend], int(now_s * 1e6), int(now_s // 3600)
    store.close()
    with sqlite3.connect(store.path) as conn:
        conn.execute(
            "WITH RECURSIVE back(h) AS (SELECT 1 UNION ALL SELECT h + 1 FROM back WHERE h < ?) INSERT INTO sighting "
            "SELECT hour - h, problem_id, environment_id, run_id, outcome, graph, calls, 0, 0.0, "
            "last_seen_us - h * 3600000000 FROM sighting JOIN back WHERE hour = ?",
            (HOURS, hour),
        )
        conn.execute("UPDATE demand SET calls = calls * ?", (HOURS + 1,))
        conn.executemany(
            "INSERT INTO publication VALUES (?, ?, 1, 0, 'installed')", [(i + 1, now_us) for i in range(solved)]
        )
        conn.executemany(
            "INSERT INTO solution (problem_id, device_id, environment_id, mode, covers, backend, config, stamp, us, "
            "baseline_us, gain_low, err, baseline_err, state, generation, published_us) VALUES (?, 1, 1, 'eager', "
            "'exact', ?, '{}', ?, 8.0, 10.0, 1.2, 1e-3, 1e-3, 'published', ?, ?)",
            [(i + 1, backend, stamp, i + 1, now_us) for i in range(solved)],
        )
    conn.close()
    return problems
