"""A/A: how often would this machine's noise alone publish a solution?

Stock torch races itself under another name through the whole search (screening, checks, both races, real clock), again
and again, over the shapes below.  Every publication is false.  At most 1 in 400 may be.

    python -m benchmarks aa [--trials 400] [--threads 2] [--note "a quiet machine"] [--out benchmarks/results]

Writes benchmarks/results/aa-<device>-<date>.json: device, versions, date, load, and every trial's gain and interval.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import DEFAULT_BACKEND, Environment, cpu_device
from gemmtuned.daemon.child.outcome import MIN_GAIN
from gemmtuned.daemon.child.search import tune_modes
from gemmtuned.daemon.protocol.wire import Trial
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.backends.torch_ import TorchDefault

TWIN = TorchDefault("torch_twin", order=0)
# Decode and small prefill of Qwen3-0.6B's layers: (N, K), each at a drawn M
LAYERS = [(1024, 1024), (2048, 1024), (3072, 1024), (1024, 3072), (1024, 2048)]
SIZES = (1, 4, 8, 16, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description="Race stock torch against itself.")
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--note", default="", help="what else ran on the machine, for the record")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    args = parser.parse_args()

    BACKENDS.clear()
    BACKENDS.update({DEFAULT_BACKEND: TorchDefault(DEFAULT_BACKEND, order=0), TWIN.name: TWIN})
    device = cpu_device()
    environment = Environment(device, {name: str(torch.__version__) for name in BACKENDS})
    coin = random.Random(args.seed)
    began, load = time.time(), os.getloadavg()
    trials: list[dict[str, Any]] = []
    for number in range(args.trials):
        n, k = coin.choice(LAYERS)
        problem = Problem(m=coin.choice(SIZES), n=n, k=k, dtype=coin.choice(args.dtypes), threads=args.threads)
        trials.append(trial(problem, environment))
        false = sum(t["published"] for t in trials)
        print(f"\r{number + 1}/{args.trials} trials, {false} false publications ", end="", flush=True)
    print()

    now = datetime.now(timezone.utc)
    false = sum(t["published"] for t in trials)
    won_once = sum(t["first_low"] is not None and t["first_low"] > MIN_GAIN for t in trials)
    result = {
        "benchmark": "aa",
        "date": now.isoformat(timespec="seconds"),
        "device": {"key": device.key, "name": device.name, "cores": device.units, "threads": args.threads},
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "kernel": platform.release()},
        "seed": args.seed,
        "note": args.note,
        "load_before": load,
        "load_after": os.getloadavg(),
        "took_s": round(time.time() - began, 1),
        "trials": len(trials),
        "false_publications": false,
        "won_first_race": won_once,
        "allowed": "at most 1 in 400",
        "runs": trials,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"aa-{device.key}-{now:%Y-%m-%d}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{false} of {len(trials)} published, {won_once} won their first race; written to {path}")


def trial(problem: Problem, environment: Environment) -> dict[str, Any]:
    """One search; the twin's gain and lower bound in each race it came to (null: it did not get there)."""
    reports: list[Trial] = []
    solution, *_ = tune_modes((problem,), "exact", problem, environment, mode="eager", skip=(), emit=reports.append)
    failed = [r.note for r in reports if r.outcome in ("wrong", "refused")]
    if failed:
        raise SystemExit(f"the twin failed its checks: {failed[0]}")
    races = [dict(part.split("=") for part in r.note.split()) for r in reports if r.phase == "confirm"]
    screened = next(r.note for r in reports if r.phase == "screen" and r.candidate.backend == TWIN.name)
    return {
        "problem": str(problem),
        "us": round(solution.us, 2),
        "screened_gain": float(screened.split("=")[1]),
        "first_gain": float(races[0]["gain"]) if races else None,
        "first_low": float(races[0]["low"]) if races else None,
        "second_low": float(races[1]["low"]) if len(races) > 1 else None,
        "published": solution.state == "published",
    }


if __name__ == "__main__":
    main()
