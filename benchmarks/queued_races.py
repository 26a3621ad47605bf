"""Races whose readings are waited for one by one, beside races whose readings are queued one behind the other.

    python benchmarks/queued_races.py RESULT [RESULT...] --out FOLDER [--problems 2048x512x16384,...] [--places 3]

Takes what these results of dense.py published for the problems named, against torch's own, at several places in memory.
A device that rests between readings may run at another clock than it does in a program.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import dense
import record
import torch

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.measure import Arm, Bench, signed_rank_interval
from gemmtuned.daemon.measure_cuda import GraphClock, cuda_graphs
from gemmtuned.kernels.backends import BACKENDS
from gemmtuned.kernels.switches import as_called

PAIRS = 40


def queued(clock: GraphClock, arms: list[Arm], sleep_cycles: int) -> list[float]:
    """us a launch of these arms one behind the other, waited for at the end alone."""
    graphs = cuda_graphs()
    for arm in arms:
        if id(arm) not in clock._recorded:
            clock.us(arm, (0,))
    events = []
    with torch.cuda.stream(graphs._stream):
        for arm in arms:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graphs._others.amax()
            torch.cuda._sleep(sleep_cycles)
            begin.record()
            clock._recorded[id(arm)].graph.replay()
            end.record()
            events.append((begin, end))
    events[-1][1].synchronize()
    return [
        b.elapsed_time(e) * 1e3 / clock._recorded[id(arm)].launches for arm, (b, e) in zip(arms, events, strict=True)
    ]


def told(pairs: list[tuple[float, float]]) -> dict[str, float]:
    middle, low, high = signed_rank_interval([math.log(a / b) for a, b in pairs])
    return {
        "torch_us": round(statistics.median(a for a, _ in pairs), 3),
        "us": round(statistics.median(b for _, b in pairs), 3),
        "ratio": round(math.exp(middle), 4), "low": round(math.exp(low), 4), "high": round(math.exp(high), 4),
    }  # fmt: skip


@torch.inference_mode()
def measure(problem: Problem, candidate: Candidate, places: int) -> dict[str, Any]:
    clock, coin, rows = GraphClock(cuda_graphs()), random.Random(1), []
    with as_called(problem):
        kernels = [BACKENDS[c.backend].prepare(c, problem) for c in (dense.DEFAULT, candidate)]
        benches = []
        for _ in range(places):
            benches.append(Bench(problem, torch.device("cuda")))
            arms = [benches[-1].arm(str(i), kernel, problem) for i, kernel in enumerate(kernels)]
            row: dict[str, Any] = {}
            for form in ("waited", "queued", "queued, a short sleep", "waited again"):
                orders = [coin.sample((0, 1), 2) for _ in range(PAIRS)]
                flat = [arms[i] for i in itertools.chain.from_iterable(orders)]
                if form.startswith("waited"):
                    times = [clock.us(arm, (0,)) for arm in flat]
                else:
                    cycles = 100_000 if form == "queued" else 20_000
                    times = [t for i in range(0, 2 * PAIRS, 16) for t in queued(clock, flat[i : i + 16], cycles)]
                pairs = []
                for n, order in enumerate(orders):
                    both = dict(zip(order, times[2 * n : 2 * n + 2], strict=True))
                    pairs.append((both[0], both[1]))
                row[form] = told(pairs)
            rows.append(row)
            for arm in arms:
                clock.forget(arm)
    us = dense.take_turns(problem, (dense.DEFAULT, candidate), floor=True)
    after = told(list(zip(us[0], us[1], strict=True)))
    return {"m": problem.m, "n": problem.n, "k": problem.k, "candidate": str(candidate), "places": rows, "after": after}


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--problems", required=True, help="MxNxK,...")
    parser.add_argument("--places", type=int, default=3, help="in memory")
    args = parser.parse_args()
    wanted = [tuple(map(int, text.split("x"))) for text in args.problems.split(",")]
    rows = []
    found = {}
    for path in args.results:
        for row in json.loads(path.read_text())["rows"]:
            if row["published"]:
                found[row["m"], row["n"], row["k"]] = Candidate(row["backend"], row["config"])
    for m, n, k in wanted:
        row = measure(Problem(m=m, n=n, k=k, dtype="bf16", math_mode="reduced"), found[m, n, k], args.places)
        rows.append(row)
        print(f"{m}x{n}x{k}", "after", row["after"], flush=True)
        for place in row["places"]:
            print(
                "   ", {form: (t["torch_us"], t["us"], t["ratio"], t["low"]) for form, t in place.items()}, flush=True
            )
        record.save("queued_races", {"benchmark": "queued_races", "rows": rows}, args.out)


if __name__ == "__main__":
    main()
