"""Problems of any family: what the daemon's search decides for each, as solutions that ship.py takes.

    python -m benchmarks verdicts --out FOLDER [--name verdicts --sets moe,row_fast --m 1,8,64 --budget-s 480]
    python -m benchmarks verdicts --dry-run            # on this CPU, one small mixture: does the program itself work?

Sets: `moe`, layers of mixtures of experts as one GPU has them, `moe_quantised`, those of them in FP8 for callers who
let X and H be quantised, `int_mm`, products of int8 into int32 (which torch takes with 17 rows or more), and the kinds
of families.py and weight_only.py at the sizes that they begin with.  Each search runs as in the daemon's worker, and
what it publishes has won its race against torch's own kernel in CUDA graphs with cold weights.  A problem is a line of
<name>.jsonl as it is done.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

import dense
import families
import record
import weight_only

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import cpu_device
from gemmtuned.kernels.backends import environment
from gemmtuned.kernels.device import cuda_device

LAYERS: Final = {  # as one GPU has them
    "DeepSeek-V3, TP 8": "moe:bf16/fp8_e4m3:{m}x7168x7168,wscale=128x128,experts=256,topk=8,inter=256,act=silu_gated",
    "Qwen3-235B, TP 4": "moe:bf16/fp8_e4m3:{m}x4096x4096,wscale=128x128,experts=128,topk=8,inter=384,act=silu_gated",
    "Qwen3-30B-A3B": "moe:bf16:{m}x2048x2048,experts=128,topk=8,inter=768,act=silu_gated",
    "Qwen3-30B-A3B, fp8": "moe:bf16/fp8_e4m3:{m}x2048x2048,wscale=128x128,experts=128,topk=8,inter=768,act=silu_gated",
    "gpt-oss-120b": "moe:bf16/fp4_e2m1:{m}x2880x2880+bias,wscale=1x32,experts=128,topk=4,inter=2880,"
    "act=swiglu_gated_interleaved",
    "Kimi-K2, TP 8": "moe:bf16/i4:{m}x7168x7168,wscale=1x32,wscaledtype=bf16,experts=384,topk=8,inter=256,"
    "act=silu_gated",
}
DRY: Final = Problem.parse("moe:bf16:4x64x64,threads=1,experts=4,topk=2,inter=32,act=silu_gated")


def wanted(name: str, ms: list[int]) -> Iterator[tuple[str, Problem]]:
    """(what it is of, problem) of one set. Raises SystemExit for a name that is none."""
    for m in ms:
        if name in ("moe", "moe_quantised"):
            for of, text in LAYERS.items():
                problem = replace(Problem.parse(text.format(m=m)), math_mode="reduced")
                if name == "moe":
                    yield of, problem
                elif problem.wscale == "128x128":
                    yield of, replace(problem, scale="1x128")
        elif name == "int_mm":
            yield from ((name, Problem(m=m, n=n, k=k, dtype="i8", out_dtype="i32")) for n, k in families.SHORT)
        elif name in weight_only.KINDS:
            yield from ((name, weight_only.problem_of(name, m, n, k)) for n, k in record.sizes(weight_only.SHAPES))
        elif name in families.KINDS:
            yield from ((name, families.problem_of(name, m, n, k)) for n, k in families.SHORT)
        else:
            raise SystemExit(f"{name}: expected moe, int_mm, {', '.join((*families.KINDS, *weight_only.KINDS))}")


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--name", default="verdicts", help="of the result")
    parser.add_argument("--sets", default="moe", help="which problems, in this order")
    parser.add_argument("--m", default="1,8,64", help="rows of X, or tokens, in this order")
    parser.add_argument("--budget-s", type=float, default=480, help="start no new problem after this long")
    parser.add_argument("--dry-run", action="store_true", help="on this CPU, one small mixture")
    args = parser.parse_args()
    until_s = time.monotonic() + args.budget_s
    todo = [("dry run", DRY)] if args.dry_run else []
    if not args.dry_run:
        todo += [one for name in args.sets.split(",") for one in wanted(name, [int(m) for m in args.m.split(",")])]
    here = environment(cpu_device() if args.dry_run else cuda_device(0))
    ahead = None if args.dry_run else dense.Ahead([problem for _, problem in todo], here)
    rows: list[dict[str, Any]] = []
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / f"{args.name}.jsonl").open("w") as file:
        for of, problem in dense.in_time(todo, ahead, until_s):
            row: dict[str, Any] = {"of": of, "problem": str(problem)}
            try:
                found = families.tune_on_cpu(problem, here) if args.dry_run else dense.tune(problem, here)
            except (GemmtunedError, RuntimeError) as err:  # the last: out of memory
                row |= {"failed": str(err)[:300]}
            else:
                solution = found["solution"]
                gain = solution.baseline_us / solution.us if solution.state == "published" else 1.0
                row |= {"counts": round(gain, 4), "wall_s": round(found["wall_s"], 2), "timed": found["timed"]}
                row |= {"gpu_s": round(found["gpu_s"], 3), "solution": {**solution.to_row(), "launch": ""}}
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print({name: row[name] for name in row if name != "solution"}, flush=True)
    good = [row for row in rows if "failed" not in row]
    summary = {
        "problems": len(good), "failed": len(rows) - len(good),
        "published": sum(row["solution"]["state"] == "published" for row in good),
        "counts": round(math.prod(row["counts"] for row in good) ** (1 / max(len(good), 1)), 4),
    }  # fmt: skip
    print(summary, flush=True)
    record.save(args.name, {"benchmark": "verdicts", "summary": summary, "rows": rows}, args.out)
    print("saved", args.out / f"{args.name}.json", flush=True)
    sys.stdout.flush()
    os._exit(0)  # do not wait for compilations nobody needs


if __name__ == "__main__":
    main()
