"""What the short search loses: its winner against the best of the whole space, on one GPU.

    python benchmarks/exhaustive.py --out FOLDER [--m 1,8,16,64,256 --shapes NxK,... --seconds 480 --resume FILE]

For each problem the search runs as in the daemon, then once more over every candidate of the space that its shortlist
is chosen from (kernels/triton/shortlist.py: space) and all that cuBLASLt offers; both winners take turns with torch.
The regret is the time of the first over that of the second.  Compiling is ahead of the device, as in the daemon.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import dense
import record

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Environment
from gemmtuned.daemon import search
from gemmtuned.daemon.options import SearchOptions
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.triton.shortlist import space

SHAPES = ((576, 7168), (7168, 2048), (4096, 4096), (5120, 2880))


def whole_space(problem: Problem, here: Environment) -> Iterator[Candidate]:
    """Every candidate that the search could choose from, and all that other backends offer."""
    for name in here.stamps:
        if name != "triton":
            yield from BACKENDS[name].candidates(problem)
    for _, kernel, config in space(problem.m, problem.n, problem.k, here.device.units, arch=here.device.arch):
        yield Candidate.of("triton", kernel=kernel, **config)


def measure(problem: Problem, here: Environment) -> dict[str, Any]:
    row: dict[str, Any] = {"m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype}
    try:
        short = dense.tune(problem, here)
        search.FINALISTS = 6  # type: ignore[misc]
        whole = dense.tune(problem, here, SearchOptions(only=tuple(whole_space(problem, here))))
        search.FINALISTS = 3  # type: ignore[misc]
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
        "screened": [(str(t.candidate), round(t.us, 3)) for t in whole["trials"] if t.phase == "screen" and t.us],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    parser.add_argument("--m", default="64,8,1,16,256")
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    parser.add_argument("--seconds", type=float, default=480, help="start no new problem after this long")
    parser.add_argument("--resume", type=Path, help="the .jsonl of an earlier run on the same device")
    args = parser.parse_args()
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in args.resume.read_text().splitlines()] if args.resume else []
    done = {(row["m"], row["n"], row["k"]) for row in rows}
    sizes = [tuple(map(int, text.split("x"))) for text in args.shapes.split(",")]
    todo = [(m, n, k) for m in map(int, args.m.split(",")) for n, k in sizes if (m, n, k) not in done]
    problems = [Problem(m=m, n=n, k=k, dtype="bf16", math_mode="reduced") for m, n, k in todo]
    here = environment(cuda_device(0))
    print(here.key, flush=True)
    ahead = dense.Ahead(problems, here, lambda p: [c for c in whole_space(p, here) if c.backend == "triton"])
    with (args.out / "exhaustive.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        for problem in problems:
            if time.monotonic() - began > args.seconds:
                print("time is up", flush=True)
                break
            compile_s = ahead.wait(problem)
            rows.append({**measure(problem, here), "compile_s": round(compile_s, 2)})
            file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
            print({name: value for name, value in rows[-1].items() if name != "screened"}, flush=True)
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
