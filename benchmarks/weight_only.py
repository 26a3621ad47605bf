"""Products with a weight of 8 or 4 bits on one GPU: what the daemon's search finds, beside bf16 F.linear and the floor.

    python -m benchmarks weight_only --out FOLDER [--kinds int4_128,mxfp4,fp8 --m 1,2,4,8,16 --shapes NxK,...
                                                   --budget-s 480]

For each problem the search runs as in the daemon's worker.  Then what it has published takes turns in one run, in CUDA
graphs with cold weights, with `kept`: F.linear with the weight dequantised to bf16 once and kept, and with kernels that
only read the quantised weight (the floor).  What the op runs without us (`torch`), which dequantises at every call, is
timed beside them in fewer rounds, since it takes many times as long.  A problem where torch stays counts as it is.
Every problem is a line of weight_only.jsonl as it is done.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import dense
import record
import torch
import torch.nn.functional as F
from timing import CudaTimer, floor_launches

from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.child.measure import Bench
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.dequantise import dequantised
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.families.quantised import quant_of
from gemmtuned.kernels.torch_flags import as_called

KINDS: dict[str, dict[str, str]] = {
    **{f"int4_{n}": {"wdtype": "i4", "wscale": f"1x{n}", "wscale_dtype": "bf16"} for n in (32, 64, 128)},
    "mxfp4": {"wdtype": "fp4_e2m1", "wscale": "1x32"},
    "fp8": {"wdtype": "fp8_e4m3", "wscale": "row"},
    "fp8_block": {"wdtype": "fp8_e4m3", "wscale": "128x128"},
    "int8": {"wdtype": "i8", "wscale": "row"},
}
SHAPES = "4096x7168,7168x2048,2112x7168,7168x16384,8192x8192,10240x8192"
LAUNCHES = 24
ROUNDS = 17


def problem_of(kind: str, m: int, n: int, k: int) -> Problem:
    """As the hook keys the op's call."""
    return Problem(family="weight_only", m=m, n=n, k=k, dtype="bf16", math_mode="reduced", **KINDS[kind])  # type: ignore[arg-type]


@torch.inference_mode()
def turns(problem: Problem, solution: Any) -> dict[str, list[float]]:
    """us of each round by what took turns; weights cold."""
    timer, device = CudaTimer(), torch.device("cuda")
    with as_called(problem):
        bench, quant = Bench(problem, device), quant_of(problem)
        x = bench.inputs(problem)["x"]
        kept = [dequantised(w.mT, s.mT, quant, torch.bfloat16) for w, s in bench.weights]
        launches = len(kept) * math.ceil(LAUNCHES / len(kept))
        runs = {"kept": timer.prepare(lambda i: F.linear(x, kept[i % len(kept)]), launches)}
        if solution.state == "published":
            ours = BACKENDS[solution.backend].prepare(solution.candidate, problem)
            bound = [ours.bind(*weights) for weights in bench.weights]
            runs["published"] = timer.prepare(lambda i: bound[i % len(bound)](x, None), launches)
        floors = floor_launches(timer, [w.t().view(torch.bfloat16) for w, *_ in bench.weights], launches)
        times = timer.measure([*runs.values(), *floors], ROUNDS + 2)
        found = {name: [t / launches for t in one[2:]] for name, one in zip(runs, times, strict=False)}
        found["floor"] = min(([t / launches for t in one[2:]] for one in times[len(runs) :]), key=statistics.median)
        stock = [BACKENDS["torch"].prepare(dense.DEFAULT, problem).bind(*weights) for weights in bench.weights[:2]]
        few = timer.prepare(lambda i: stock[i % len(stock)](x, None), 2)
        found["torch"] = [t / 2 for t in timer.measure([few], 5)[0][1:]]
    return found


def measure(kind: str, problem: Problem, here: Any) -> dict[str, Any]:
    """One row."""
    found = dense.tune(problem, here)
    solution, trials = found.pop("solution"), found.pop("trials")
    us = turns(problem, solution)
    row: dict[str, Any] = {"kind": kind, "m": problem.m, "n": problem.n, "k": problem.k, "problem": str(problem)}
    for name, times in us.items():
        quarter = statistics.quantiles(times, n=4)
        row |= {f"{name}_us": round(statistics.median(times), 3), f"{name}_spread": round(quarter[2] - quarter[0], 3)}
    row |= {"published": solution.state == "published", "backend": solution.backend, "config": solution.config}
    row |= {"err": solution.err, "torch_err": solution.baseline_err}
    row |= {name: round(value, 2) for name, value in found.items()}
    best = row.get("published_us", row["torch_us"])
    row["kept_over_ours"], row["torch_over_ours"] = round(row["kept_us"] / best, 3), round(row["torch_us"] / best, 2)
    row["ours_over_floor"] = round(best / row["floor_us"], 3)
    refused = [(str(t.candidate), t.outcome, t.note[:200]) for t in trials if t.outcome in ("refused", "wrong")]
    row["not_ok"] = refused[:6]
    return row


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each kind and M the geometric means over shapes."""
    lines = []
    for kind in KINDS:
        for m in sorted({row["m"] for row in rows if row["kind"] == kind}):
            some = [row for row in rows if (row["kind"], row["m"]) == (kind, m)]
            means = {
                name: round(dense.geomean([row[name] for row in some]), 3)
                for name in ("kept_over_ours", "torch_over_ours", "ours_over_floor")
            }
            worst = min(row["kept_over_ours"] for row in some)
            published = sum(row["published"] for row in some)
            lines.append({"kind": kind, "m": m, "problems": len(some), "published": published, **means, "worst": worst})
    return lines


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--kinds", default="int4_128,mxfp4,fp8,int8,int4_32", help=f"of {','.join(KINDS)}")
    parser.add_argument("--m", default="1,8,16,4", help="rows of X, in this order")
    parser.add_argument("--shapes", default=SHAPES, help="NxK,NxK,...")
    parser.add_argument("--budget-s", type=float, default=480, help="start no new problem after this long")
    args = parser.parse_args()
    until_s = time.monotonic() + args.budget_s
    here = environment(cuda_device(0))
    sizes, ms, kinds = record.sizes(args.shapes), [int(m) for m in args.m.split(",")], args.kinds.split(",")
    wanted = [(kind, problem_of(kind, m, n, k)) for n, k in sizes for m in ms for kind in kinds]
    ahead = dense.Ahead([problem for _, problem in wanted], here)
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with (args.out / "weight_only.jsonl").open("w") as file:
        for kind, problem in dense.in_time(wanted, ahead, until_s):
            rows.append(measure(kind, problem, here))
            file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
            print({name: rows[-1][name] for name in rows[-1] if name not in ("not_ok", "problem")}, flush=True)
    lines = summary(rows)
    for line in lines:
        print(line, flush=True)
    result = {"benchmark": "weight_only", "stamps": here.stamps, "summary": lines, "rows": rows}
    print("saved", record.save("weight_only", result, args.out), flush=True)
    sys.stdout.flush()
    os._exit(0)  # do not wait for compilations nobody needs


if __name__ == "__main__":
    main()
