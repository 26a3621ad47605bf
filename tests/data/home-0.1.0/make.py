"""How this home was made, with the code of version 0.1.0 (commit b8de2c0): run there as `python make.py FOLDER`.

It goes through that version's own store and publisher: sightings of two programs in two environments of one GPU (an
edited Triton kernel between them) and on a CPU, verdicts of every backend, one pinned, one withdrawn, one superseded,
failures, hints, trials, and what the old code says of it (expected.json).  The current code cannot run this file.
"""

import json
import sqlite3
import sys
from hashlib import sha256
from pathlib import Path

from gemmtuned.configs.hint import Hint
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.sighting import Sighting
from gemmtuned.configs.solution import Candidate, Device, Environment, Solution
from gemmtuned.daemon.publishing.publish import publish
from gemmtuned.db import queries
from gemmtuned.db.store import Store
from gemmtuned.hooks.dispatch import build_table
from gemmtuned.kernels.backends.launched import launch_text

NOW_S = 1_795_000_000.0  # 2026-11-18
HOUR = 3600.0
H200 = Device("cuda-nvidia-h200-132", "cuda", "NVIDIA H200", "sm_90", 132)
CPU = Device("cpu-test-0", "cpu", "Test CPU", "x86_64", 8)
TRITON = "3.6.0/sm_90/f64e03e6295b"
BEFORE = "3.6.0/sm_90/aaaaaaaaaaaa"
ON_GPU = {
    "torch": "2.13.0",
    "torch_mv": "2.13.0",
    "torch_swap": "2.13.0",
    "cublaslt": "130100/sm_90",
    "triton": TRITON,
    "cuda": "13.0/sm_90/6813ed7ea8aa",
}
GPU = Environment(H200, ON_GPU)
GPU_BEFORE = Environment(H200, {**ON_GPU, "triton": BEFORE})
HOST = Environment(
    CPU,
    {
        "torch": "2.13.0",
        "torch_mv": "2.13.0",
        "torch_swap": "2.13.0",
        "onednn": "2.13.0/cpu-test-0",
        "onednn_packed": "2.13.0/cpu-test-0",
    },
)
BINARY = b"a binary that no device runs"


def bf16(m, n, k, **more):
    return Problem(m=m, n=n, k=k, dtype="bf16", math_mode="reduced", **more)


def fp32(m, n, k, **more):
    return Problem(m=m, n=n, k=k, dtype="fp32", threads=2, **more)


def solution(problem, environment, backend, *, covers="exact", state="published", us=5.0, **config):
    launch = ""
    if backend in ("triton", "cuda"):
        launch = launch_text(
            binary=sha256(BINARY).hexdigest(),
            name="kernel",
            shared=0,
            warps=4,
            cluster=1,
            grid=(("n", 64), ("", 1), ("", 1)),
            arguments=("x", "w", "y", "m", "ldx", "ldw"),
            ld_multiple=8,
            max_m=problem.m,
        )
    elif backend == "cublaslt":
        launch = json.dumps(
            {
                "library": "cublaslt",
                "algo": "00" * 64,
                "dtype": "bf16",
                "layout": problem.layout,
                "tf32": False,
                "max_m": problem.m,
                "workspace_bytes": 0,
                "ld_multiple": 8,
                "pointer_align": 16,
            },
            sort_keys=True,
            separators=(",", ":"),
        )
    return Solution(
        problem=problem,
        device=environment.device.key,
        mode="eager",
        covers=covers,
        backend=backend,
        config=Candidate.of(backend, **config).config,
        stamp=environment.stamps[backend],
        us=us,
        baseline_us=10.0,
        gain_low=10.0 / us * 0.98,
        err=1e-3,
        baseline_err=1e-3,
        state=state,
        launch=launch,
    )


def at(hours):
    return NOW_S - hours * HOUR


def fill(store, home):
    one, four, eight, wide = bf16(1, 2112, 7168), bf16(4, 2112, 7168), bf16(8, 4096, 7168), bf16(64, 4096, 7168)
    added = bf16(8, 1024, 1024, family="dense_add")
    scaled = Problem(family="scaled", m=16, n=2112, k=7168, dtype="fp8_e4m3", out_dtype="bf16", scale="row")
    grouped = bf16(128, 1536, 7168, family="grouped", batch=256)
    small, biased, plain = fp32(1, 512, 256), fp32(8, 512, 256, bias=True), fp32(32, 512, 256)
    bucket = [fp32(m, 1024, 256) for m in (17, 19, 21, 30)]
    # an environment of before, whose kernel was edited since: the same GPU and torch
    store.add_sightings(
        "serve",
        GPU_BEFORE,
        [
            Sighting(one, "miss", 700),
            Sighting(four, "miss", 300),
            Sighting(eight, "miss", 100),
        ],
        now_s=at(30),
    )

    def install(work, found, environment, hours):
        store.install(work, found, environment=environment, now_s=at(hours))

    install(None, [solution(one, GPU_BEFORE, "triton", kernel="gemv", rows=4)], GPU_BEFORE, 29)
    store.add_sightings("serve", GPU_BEFORE, [Sighting(one, "exact", 5000)], now_s=at(20))
    # now
    store.add_sightings(
        "serve",
        GPU,
        [
            Sighting(one, "miss", 70),
            Sighting(four, "miss", 30),
            Sighting(eight, "miss", 60, graph=True),
            Sighting(wide, "miss", 11),
            Sighting(added, "miss", 500),
            Sighting(scaled, "miss", 40),
            Sighting(grouped, "miss", 7),
        ],
        now_s=at(12),
    )
    install(None, [solution(one, GPU, "triton", us=4.0, kernel="gemv", rows=8)], GPU, 11)
    install(None, [solution(four, GPU, "triton", kernel="fragments", rows=8)], GPU, 11)
    install(None, [solution(eight, GPU, "cuda", kernel="one_shot", rows=64)], GPU, 10)
    install(None, [solution(wide, GPU, "cublaslt", tile=20)], GPU, 10)
    install(None, [solution(wide, GPU, "cublaslt", us=4.5, tile=21)], GPU, 9)
    store.add_sightings(
        "serve",
        GPU,
        [
            Sighting(one, "exact", 9000),
            Sighting(four, "exact", 800, graph=True),
            Sighting(wide, "exact", 100),
        ],
        now_s=at(8),
    )
    store.add_sightings("train", GPU, [Sighting(one, "exact", 10), Sighting(scaled, "miss", 4)], now_s=at(2))
    # a CPU
    store.add_sightings(
        "bert",
        HOST,
        [
            Sighting(small, "miss", 50, sampled_calls=10, sampled_us=400.0),
            Sighting(biased, "miss", 20),
            Sighting(plain, "miss", 10),
            *(Sighting(p, "miss", 5) for p in bucket),
        ],
        now_s=at(12),
    )
    install(None, [solution(small, HOST, "torch_mv")], HOST, 11)
    install(None, [solution(biased, HOST, "onednn", state="pinned")], HOST, 11)
    install(None, [solution(fp32(32, 1024, 256), HOST, "torch_swap", covers="fine")], HOST, 11)
    store.add_sightings(
        "bert",
        HOST,
        [
            Sighting(small, "exact", 5000),
            Sighting(biased, "exact", 600),
            Sighting(bucket[1], "padded", 70),
        ],
        now_s=at(6),
    )
    work = store.lease_next("host:1", HOST, now_s=at(5), hold_s=60)
    assert work is not None and work.problem == plain
    store.add_trial(
        work,
        plain,
        Candidate("torch"),
        phase="screen",
        us=10.0,
        err=1e-7,
        outcome="ok",
        note="",
        started_us=round(at(5) * 1e6),
    )
    store.add_trial(
        work,
        plain,
        Candidate("onednn"),
        phase="screen",
        us=None,
        err=None,
        outcome="crash",
        note="worker killed by SIGSEGV",
        started_us=round(at(5) * 1e6),
    )
    store.install(work, [solution(plain, HOST, "torch", state="default_best", us=10.0)], environment=HOST, now_s=at(5))
    for attempt in range(3):  # what this version has no family for fails for good
        work = store.lease_next("host:1", GPU, now_s=at(4 - attempt), hold_s=60)
        assert work is not None
        store.fail(work, f"{work.problem}: family {work.problem.family} cannot be tuned yet", now_s=at(4 - attempt))
    later = store.lease_next("host:1", GPU, now_s=at(0.9), hold_s=60)
    assert later is not None
    store.release(later, now_s=at(0.8), counted=False, reason="put off: others use 40% of the device")
    store.add_quarantine(
        solution(four, GPU_BEFORE, "triton", kernel="fragments", rows=4), "went wrong", run="serve", now_s=at(3)
    )
    store.take_quarantined(now_s=at(3))
    store.withdraw([eight], reason="slow in serving", now_s=at(2))
    store.add_hints(
        [
            Hint(
                format="aiter-csv",
                family="bf16",
                kind="tuned",
                source="a.csv",
                line=2,
                row="{}",
                problem=wide,
                candidate=Candidate.of("cublaslt", tile=7),
                arch="gfx942",
                units=304,
                us=9.0,
            )
        ],
        source="a.csv",
        now_s=at(1),
    )
    (home / "bin").mkdir()
    (home / "bin" / sha256(BINARY).hexdigest()).write_bytes(BINARY)
    publish(store, home / "configs", home / "locks", now_s=at(0.5))


def expected(home, store):
    db = home / "tune.db"
    generation, live = store.published()
    table = build_table(live, {"cuda:0": GPU, "cpu": HOST}, generation=generation, failed=frozenset())
    served = [[place, str(s.problem), s.covers, s.backend, s.config] for place, _, s in table.items()]
    keep = (
        "family",
        "device",
        "problems",
        "tuned_problems",
        "calls",
        "exact_calls",
        "padded_calls",
        "missed_calls",
        "covered_calls",
        "graph_calls",
    )
    coverage = queries.coverage(db, now_s=NOW_S, since_s=48 * HOUR)
    gains = {
        f"{r['problem']} {r['backend']} {r['config']} {r['generation']}": [r["state"], r["hit_calls"], r["saved_us"]]
        for r in queries.solutions(db, live=False)
    }
    demand = {
        f"{r['problem']} {r['device']}": r["calls"]
        for r in queries.ask(
            db,
            """
        SELECT p.text AS problem, h.key AS device, sum(d.calls) AS calls
        FROM demand d JOIN problem p ON p.id = d.problem_id
        JOIN environment e ON e.id = d.environment_id JOIN device h ON h.id = e.device_id GROUP BY 1, 2""",
        )
    }
    return {
        "now_s": NOW_S,
        "generation": generation,
        "served": sorted(served),
        "coverage": sorted(([r[name] for name in keep] for r in coverage), key=str),
        "coverage_columns": keep,
        "gains": gains,
        "demand": demand,
        "stamps": {"cuda:0": ON_GPU, "cpu": HOST.stamps},
    }


home = Path(sys.argv[1])
home.mkdir(parents=True)
store = Store(home / "tune.db", locks=home / "locks")
fill(store, home)
(home / "expected.json").write_text(json.dumps(expected(home, store), indent=1, sort_keys=True) + "\n")
store.close()
with sqlite3.connect(home / "tune.db") as conn:
    pragmas = [
        f"PRAGMA {name} = {conn.execute(f'PRAGMA {name}').fetchone()[0]};"
        for name in ("application_id", "user_version")
    ]
    (home / "tune.sql").write_text("\n".join([*conn.iterdump(), *pragmas]) + "\n")
