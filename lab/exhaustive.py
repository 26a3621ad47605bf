"""What the short search loses: its winner against the best of the whole space, on one GPU.

    python -m lab exhaustive --out FOLDER [--m 1,4,8,16,64 --shapes NxK,... --seconds 480 --resume FILE]

For each problem the search runs as in the daemon, then once more over all that backends and kernels offer, not
only the thirty that kernels/budget.py admits; both winners take turns with torch.  The regret is the time of the
first over that of the second.  Compiling is ahead of the device, as in the daemon.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import dense
import record

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Environment
from gemmtuned.daemon.child import screening
from gemmtuned.daemon.protocol.options import SearchOptions
from gemmtuned.kernels import catalog
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.budget import shares_for
from gemmtuned.kernels.device import cuda_device

SHAPES = ((576, 7168), (7168, 2048), (4096, 4096), (5120, 2880))


def whole_space(problem: Problem, here: Environment) -> Iterator[Candidate]:
    """Every candidate that the search could choose from, but for kernels of ours that measured as hopeless."""
    for name in here.backends:
        if name not in catalog.FOLDERS:
            yield from BACKENDS[name].candidates(problem)
    offers = catalog.offers(problem, here.device)
    shares = shares_for(problem, here.device, {offer.kernel for offered in offers.values() for offer in offered})
    for offered in offers.values():
        yield from (offer.candidate for offer in offered if shares.of_kernel(offer.kernel))


def measure(problem: Problem, here: Environment, compile_s: float) -> dict[str, Any]:
    row: dict[str, Any] = {"m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype}
    row["compile_s"] = round(compile_s, 2)
    try:
        short = dense.tune(problem, here)
        with patch.object(screening, "FINALISTS", 6):
            whole = dense.tune(problem, here, SearchOptions(only=tuple(whole_space(problem, here))))
        picks = [one["solution"].candidate for one in (short, whole)]
        torch_us, short_us, whole_us = (statistics.median(us) for us in dense.take_turns(
            problem, (dense.DEFAULT, *picks), floor=False
        ))  # fmt: skip
    except GemmtunedError as err:
        return {**row, "failed": str(err)}
    return {
        **row, "torch_us": round(torch_us, 3), "short_us": round(short_us, 3), "whole_us": round(whole_us, 3),
        "regret": round(1.0 if picks[0] == picks[1] else short_us / whole_us, 4), "short": str(picks[0]),
        "whole": str(picks[1]), "timed": [short["timed"], whole["timed"]],
        "gpu_s": [round(short["gpu_s"], 3), round(whole["gpu_s"], 3)],
        "screened": [
            (str(t.candidate), round(t.us, 3), t.note) for t in whole["trials"] if t.phase == "screen" and t.us
        ],
    }  # fmt: skip


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--m", default="64,16,8,4,1")
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    parser.add_argument("--seconds", type=float, default=480, help="start no new problem after this long")
    parser.add_argument("--resume", type=Path, help="the .jsonl of an earlier run on the same device")
    args = parser.parse_args()
    began = time.monotonic()
    rows = dense.read_lines(args.resume)
    problems = dense.left_to_do(rows, args.m, record.sizes(args.shapes), "bf16")
    here = environment(cuda_device(0))
    print(here.key, flush=True)
    ahead = dense.Ahead(problems, here, lambda p: [c for c in whole_space(p, here) if c.backend in catalog.FOLDERS])
    dense.work_through(
        problems,
        rows,
        lambda problem: measure(problem, here, ahead.wait(problem)),
        path=args.out / "exhaustive.jsonl",
        until_s=began + args.seconds,
    )
    good = [row for row in rows if "failed" not in row]
    summary = {
        "problems": len(good),
        "failed": len(rows) - len(good),
        "regret": round(dense.geomean([row["regret"] for row in good]), 4) if good else None,
        "worst": max((row["regret"] for row in good), default=None),
    }
    print(summary, flush=True)
    result = {"benchmark": "exhaustive", "stamps": here.stamps, "summary": summary, "rows": rows}
    print("saved", record.save("exhaustive", result, args.out), flush=True)
    os._exit(0)  # do not wait for compilations nobody needs


if __name__ == "__main__":
    main()
