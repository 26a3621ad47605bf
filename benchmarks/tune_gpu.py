"""The daemon's search on one GPU, problem by problem, in this process: what it finds, and what it costs to find it.

    PYTHONPATH=. python benchmarks/tune_gpu.py --out FOLDER [--m 1,8,16,32 --shapes NxK,... --seconds 300]

For each problem: candidates tried, those refused by compiler or check, time to compile ahead, wall time, the winner and
its gain over torch with the lower bound of its 95 % interval.  Binaries go to a home of its own and are read back.
"""
# ruff: noqa: E402  the home is set before gemmtuned is imported

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
HOME = Path(tempfile.mkdtemp(prefix="gemmtuned-"))
os.environ["GEMMTUNED_HOME"] = str(HOME)

import record
from decode import SHAPES

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.launch import read_launch
from gemmtuned.configs.manifest import read_binary
from gemmtuned.configs.problem import Problem
from gemmtuned.daemon import search
from gemmtuned.kernels.backends import environment
from gemmtuned.kernels.device import cuda_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    parser.add_argument("--m", default="1,8,16,32")
    parser.add_argument("--shapes", default="", help="NxK,NxK,... instead of the eight of benchmarks/decode.py")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--seconds", type=float, default=300, help="start no new problem after this long")
    args = parser.parse_args()
    pairs = [tuple(int(size) for size in text.split("x")) for text in args.shapes.split(",") if text] or SHAPES
    here = environment(cuda_device(0))
    print(here.key, flush=True)
    began, rows = time.monotonic(), []
    for m in map(int, args.m.split(",")):
        for n, k in pairs:
            if time.monotonic() - began > args.seconds:
                break
            problem = Problem(m=m, n=n, k=k, dtype=args.dtype, bias=args.bias, math_mode="reduced")
            rows.append(tune_one(problem, here))
            print(json.dumps(rows[-1]), flush=True)
    for m in sorted({row["m"] for row in rows}):
        found = [row for row in rows if row["m"] == m and "gain" in row]
        geomean = math.exp(statistics.mean(math.log(row["gain"]) for row in found)) if found else math.nan
        wall = statistics.median(row["wall_s"] - row["compile_s"] for row in found) if found else math.nan
        print(f"M={m}: {len(found)} problems, geomean {geomean:.3f} over torch, {wall:.2f} s a problem once compiled")
    args.out.mkdir(parents=True, exist_ok=True)
    print("saved", record.save("tune_gpu", {"benchmark": "tune_gpu", "rows": rows}, args.out))
    search._compilers.close()


def tune_one(problem: Problem, here: Any) -> dict[str, Any]:
    told: list[search.Trial] = []
    begin = time.monotonic()
    out: dict[str, Any] = {"problem": str(problem), "m": problem.m, "n": problem.n, "k": problem.k}
    try:
        found = search.tune_modes((problem,), "exact", problem, here, mode="graph", skip=(), emit=told.append)
    except CandidateFailed as err:
        return {**out, "failed": str(err)}
    screened = [t for t in told if t.phase == "screen"]
    first = min((t.started_us for t in screened if t.us is not None), default=0)
    graph = found[0]
    if graph.launch:
        read_binary(HOME, read_launch(graph.launch)["binary"])
    return {
        **out,
        "wall_s": round(time.monotonic() - begin, 3),
        "compile_s": round((first - min(t.started_us for t in told)) / 1e6, 3),
        "timed": sum(t.us is not None for t in screened) - 1,
        "outcomes": dict(Counter(f"{t.phase} {t.outcome}" for t in told if t.phase != "start")),
        "refusals": [t.note for t in told if t.outcome in ("refused", "wrong")][:3],
        "torch_us": round(graph.baseline_us, 3),
        "us": round(graph.us, 3),
        "gain": round(graph.baseline_us / graph.us, 4),
        "gain_low": round(graph.gain_low, 4),
        "backend": graph.backend,
        "config": graph.config,
        "state": {s.mode: s.state for s in found},
        "err": graph.err,
        "torch_err": graph.baseline_err,
    }


if __name__ == "__main__":
    main()
