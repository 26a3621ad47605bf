"""Other libraries' FP8 and int8 kernels on one GPU: what the gate says of each, how fast it is, and who won the search.

    python -m benchmarks peers --out FOLDER [--kinds row_fast,row,block,int8 --m 1,16,64,256,2048 --budget-s 480
                                             --shapes 2112x7168,4096x7168,7168x2048 --without vllm_deep_gemm]
    python -m benchmarks peers --dry-run               # on this CPU, with small sizes: does the program itself work?

For each problem the gate looks at every kernel that another library's backend offers, then the search runs as in the
daemon's worker, and last all that passed take turns with torch's own call, the best of cuBLASLt and of ours, what was
published and the floor, as in families.py, whose kinds these are.  A row has, by backend of another library: `gate`
(ok, wrong, refused) and its reason, the error over what is allowed, `us` of the last race (none where the gate said
no), and what the search said of it itself.  Every problem is a line of <name>.jsonl as it is done.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

import dense
import families
import record
import torch

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Environment, cpu_device
from gemmtuned.daemon.child.verify import verify
from gemmtuned.daemon.protocol.wire import Trial
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.backends.torch_op import OperatorBackend
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.families import family_of
from gemmtuned.kernels.other_packages import GUESTS, reason_of
from gemmtuned.kernels.torch_flags import as_called

SHAPES: Final = "2112x7168,4096x7168,7168x2048"
KINDS: Final = "row_fast,row,block,int8"


def theirs(problem: Problem, here: Environment) -> dict[str, Candidate]:
    """What other libraries' backends offer for it, by their names."""
    there = {name: backend for name, backend in BACKENDS.items() if name in here.stamps}
    of_operators = {name: backend for name, backend in there.items() if isinstance(backend, OperatorBackend)}
    return {name: Candidate(name) for name, backend in of_operators.items() if backend.suits(problem)}


@torch.inference_mode()
def gate(problem: Problem, candidate: Candidate, device: torch.device) -> dict[str, Any]:
    """What the daemon's gate says of it, alone."""
    began = time.monotonic()
    try:
        with as_called(problem):
            stock = family_of(problem).default(problem)
            kernel = BACKENDS[candidate.backend].prepare(candidate, problem)
            said = verify(problem, {candidate: kernel}, stock, device=device)[candidate]
    except (GemmtunedError, RuntimeError) as err:
        return {"gate": "failed", "note": reason_of(err)}
    spent_s = round(time.monotonic() - began, 2)
    return {"gate": said.outcome, "note": said.note[:300], "err": said.err, "gate_s": spent_s}


def measure(
    problem: Problem, here: Environment, tune: families.Tune, turns: families.Turns, device: torch.device
) -> dict[str, Any]:
    """A row of families.py with `peers`, what became of each kernel of another library."""
    trials: list[Trial] = []

    def searched(one: Problem, where: Environment) -> dict[str, Any]:
        found = tune(one, where)
        trials.extend(found["trials"])
        return found

    offered = theirs(problem, here)
    peers = {name: gate(problem, candidate, device) for name, candidate in offered.items()}
    passed = {name: offered[name] for name, said in peers.items() if said["gate"] == "ok"}
    row = families.measure(problem, here, searched, turns, passed)
    for name, said in peers.items():
        said["us"] = row.pop(f"{name}_us", None)
        said["search"] = _said(trials, name)
    return {**row, "peers": peers}


def _said(trials: list[Trial], backend: str) -> list[dict[str, Any]]:
    """What the search reported of a backend's candidate, phase by phase."""
    said = [t for t in trials if t.candidate.backend == backend and t.phase != "start"]
    return [{"phase": t.phase, "outcome": t.outcome, "us": t.us, "note": t.note[:200]} for t in said]


def fastest(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By backend of another library: its problems, how many passed the gate, won, and us of torch by its own."""
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name, said in row["peers"].items():
            line = lines.setdefault(name, {"problems": 0, "passed": 0, "published": 0, "over_torch": []})
            line["problems"] += 1
            line["passed"] += said["gate"] == "ok"
            line["published"] += row.get("backend") == name and bool(row.get("published"))
            if said["us"] and row.get("torch_us"):
                line["over_torch"].append(row["torch_us"] / said["us"])
    for line in lines.values():
        line["over_torch"] = round(statistics.geometric_mean(line["over_torch"]), 4) if line["over_torch"] else None
    return lines


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--name", default="peers", help="of the result")
    parser.add_argument("--kinds", default=KINDS, help="of families.py, in this order")
    parser.add_argument("--m", default="1,16,64,256,2048", help="rows of X, in this order")
    parser.add_argument("--shapes", default=SHAPES, help="N and K of the weights, in this order")
    parser.add_argument("--budget-s", type=float, default=480, help="start no new problem after this long")
    parser.add_argument(
        "--without", default="", help="backends or packages to leave out, as GEMMTUNED_WITHOUT has them"
    )
    parser.add_argument("--packages", default="", help="a word on them for the result, such as commits")
    parser.add_argument("--dry-run", action="store_true", help="on this CPU, with small sizes")
    args = parser.parse_args()
    until_s = time.monotonic() + args.budget_s
    GUESTS.without = tuple(filter(None, args.without.split(",")))
    GUESTS.say = partial(print, "left out:", flush=True)
    here = environment(cpu_device() if args.dry_run else cuda_device(0))
    print("stamps", here.stamps, flush=True)
    ms, shapes, threads = [int(m) for m in args.m.split(",")], record.sizes(args.shapes), 0
    kinds, device = args.kinds.split(","), torch.device("cpu" if args.dry_run else "cuda")
    tune: families.Tune = dense.tune
    turns: families.Turns = families.turns_on_gpu
    if args.dry_run:
        kinds, ms, shapes, threads = [k for k in kinds if k not in families.ON_GPUS_ALONE], [16], families.DRY[:1], 1
        tune, turns = families.tune_on_cpu, families.turns_on_cpu
    wanted = [
        (kind, families.problem_of(kind, m, n, k, threads=threads)) for n, k in shapes for m in ms for kind in kinds
    ]
    ahead = None if args.dry_run else dense.Ahead([problem for _, problem in wanted], here)
    rows: list[dict[str, Any]] = []
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / f"{args.name}.jsonl").open("w") as file:
        for kind, problem in dense.in_time(wanted, ahead, until_s):
            row = {"kind": kind, **measure(problem, here, tune, turns, device)}
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(_line(row), flush=True)
    result = {"benchmark": "peers", "stamps": here.stamps, "packages": args.packages, "summary": fastest(rows)}
    print(json.dumps(result["summary"], indent=1), flush=True)
    print("saved", record.save(args.name, {**result, "rows": rows}, args.out), flush=True)
    os._exit(0)  # do not wait for compilations nobody needs


def _line(row: Mapping[str, Any]) -> str:
    times = {name: row.get(f"{name}_us") for name in ("torch", "copied", "cublaslt", "ours", "published", "floor")}
    peers = {name: said["us"] or f"{said['gate']}: {said['note'][:80]}" for name, said in row["peers"].items()}
    won = row.get("backend") if row.get("published") else row.get("failed", "torch stays")
    return f"{row['problem']} {times} {peers} won: {won}"


if __name__ == "__main__":
    main()
