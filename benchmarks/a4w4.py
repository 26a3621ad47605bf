"""gemm_a4w4 on one GPU: MXFP4 by MXFP4 in two steps and in one, beside a weight that is kept in bf16, and the floor.

    python -m benchmarks a4w4 --out FOLDER [--m 1,16,64,256,1024 --shapes NxK,... --budget-s 300]

Three ways take turns in one run, in CUDA graphs with cold weights; each begins with X of 4 bits:
    two_steps  X becomes bf16, and what the daemon's search has published for that by W multiplies it (gemm_a16w4)
    published  what the search has published for both operands as they lie (`mxfp4_tiles`)
    kept       X becomes bf16, and F.linear multiplies it by a weight that was dequantised once and kept
The floor are kernels that only read the weight of 4 bits.  `torch` is what the op runs without us, in fewer rounds.
Every problem is a line of a4w4.jsonl as it is done.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import dense
import record
import torch
import torch.nn.functional as F
import weight_only
from timing import CudaTimer, floor_launches

from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.child.measure import Bench
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.dequantise import dequantised
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.torch_flags import as_called

SHAPES = "4096x7168,2112x7168"
WAYS = ("two_steps", "published", "kept", "torch")


def pair(m: int, n: int, k: int) -> Problem:
    """As the hook keys the op's call where the card multiplies MXFP4."""
    return Problem(family="scaled", m=m, n=n, k=k, dtype="fp4_e2m1", out_dtype="bf16", scale="1x32")


@torch.inference_mode()
def turns(m: int, n: int, k: int, of_w: Any, of_both: Any) -> dict[str, list[float]]:
    """us of each round by what took turns; weights cold."""
    timer, both = CudaTimer(), pair(m, n, k)
    with as_called(both):
        bench = Bench(both, torch.device("cuda"))
        given = bench.inputs(both)
        x, of_x = given["x"], given["scale_x"]
        launches = len(bench.weights) * math.ceil(weight_only.LAUNCHES / len(bench.weights))

        def numbers() -> torch.Tensor:
            return dequantised(x, of_x, "mxfp4", torch.bfloat16, in_one_pass=True)

        def of(bound: list[Any]) -> Any:
            return timer.prepare(lambda i: bound[i % len(bound)](), launches)

        def bound_to(problem: Problem, solution: Any) -> list[Any]:
            kernel = BACKENDS[solution.backend].prepare(solution.candidate, problem)
            return [kernel.bind(*weights) for weights in bench.weights]

        kept = [dequantised(w.mT, s.mT, "mxfp4", torch.bfloat16) for w, s in bench.weights]
        runs = {"kept": of([lambda w=w: F.linear(numbers(), w) for w in kept])}
        if of_w.state == "published":
            steps = bound_to(weight_only.problem_of("mxfp4", m, n, k), of_w)
            runs["two_steps"] = of([lambda run=run: run(numbers(), None) for run in steps])
        if of_both.state == "published":
            runs["published"] = of([lambda run=run: run(x, of_x, None) for run in bound_to(both, of_both)])
        floors = floor_launches(timer, [w.t().view(torch.bfloat16) for w, *_ in bench.weights], launches)
        times = timer.measure([*runs.values(), *floors], weight_only.ROUNDS + 2)
        found = {name: [t / launches for t in one[2:]] for name, one in zip(runs, times, strict=False)}
        found["floor"] = min(([t / launches for t in one[2:]] for one in times[len(runs) :]), key=statistics.median)
        stock = [BACKENDS["torch"].prepare(dense.DEFAULT, both).bind(*weights) for weights in bench.weights[:2]]
        few = timer.prepare(lambda i: stock[i % len(stock)](x, of_x, None), 2)
        found["torch"] = [t / 2 for t in timer.measure([few], 5)[0][1:]]
    return found


def measure(m: int, n: int, k: int, here: Any) -> dict[str, Any]:
    """One row."""
    of_w, of_both = (dense.tune(p, here) for p in (weight_only.problem_of("mxfp4", m, n, k), pair(m, n, k)))
    solution = of_both["solution"]
    row: dict[str, Any] = {"m": m, "n": n, "k": k, "problem": str(pair(m, n, k))}
    for name, times in turns(m, n, k, of_w["solution"], solution).items():
        quarter = statistics.quantiles(times, n=4)
        row |= {f"{name}_us": round(statistics.median(times), 3), f"{name}_spread": round(quarter[2] - quarter[0], 3)}
    row |= {"published": solution.state == "published", "backend": solution.backend, "config": solution.config}
    row |= {"err": solution.err, "torch_err": solution.baseline_err, "of_w": str(of_w["solution"].candidate)}
    refused = [(str(t.candidate), t.note[:200]) for t in of_both["trials"] if t.outcome in ("refused", "wrong")]
    row |= {"timed": of_both["timed"], "wall_s": round(of_both["wall_s"], 2), "gpu_s": round(of_both["gpu_s"], 2)}
    return row | {"not_ok": refused[:6]}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each M the geometric means over shapes of each way's time over that of the floor."""
    lines = []
    for m in sorted({row["m"] for row in rows}):
        some = [row for row in rows if row["m"] == m]
        line: dict[str, Any] = {"m": m, "problems": len(some)}
        for way in WAYS:
            ratios = [row[f"{way}_us"] / row["floor_us"] for row in some if f"{way}_us" in row]
            line |= {f"{way}_over_floor": round(dense.geomean(ratios), 3), f"of_{way}": len(ratios)} if ratios else {}
        lines.append(line)
    return lines


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--m", default="1,16,64,256,1024", help="rows of X, in this order")
    parser.add_argument("--shapes", default=SHAPES, help="NxK,NxK,...")
    parser.add_argument("--budget-s", type=float, default=300, help="start no new problem after this long")
    args = parser.parse_args()
    until_s = time.monotonic() + args.budget_s
    here = environment(cuda_device(0))
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with (args.out / "a4w4.jsonl").open("w") as file:
        for n, k in record.sizes(args.shapes):
            for m in (int(word) for word in args.m.split(",")):
                if time.monotonic() > until_s:
                    continue
                rows.append(measure(m, n, k, here))
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
                print(rows[-1], flush=True)
    lines = summary(rows)
    for line in lines:
        print(line, flush=True)
    print(
        "saved",
        record.save("a4w4", {"benchmark": "a4w4", "stamps": here.stamps, "summary": lines, "rows": rows}, args.out),
        flush=True,
    )
    sys.stdout.flush()
    os._exit(0)  # do not wait for compilations nobody needs


if __name__ == "__main__":
    main()
