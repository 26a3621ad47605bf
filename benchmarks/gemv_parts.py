"""What a GEMV's time is made of: its winners at M = 1 without x, with x first; the same with the tensor core's products."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import dense
import gemv_loads
import record

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.kernels.backends import environment
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.triton.gemv import NAME


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--picks", type=Path, required=True)
    args = parser.parse_args()
    gemv_loads.variants()
    todo = []
    for row in json.loads(args.picks.read_text())["rows"]:
        problem = Problem(m=1, n=row["n"], k=row["k"], dtype="bf16", math_mode="reduced")
        plain, mma = json.loads(row["gemv"]), json.loads(row["mma"][0])
        arms = [(NAME, plain), ("gemv_nox", plain), ("gemv_xfirst", plain)]
        arms += [("gemv_mma", mma), ("gemv_mma_nox", mma), ("gemv_mma_xfirst", mma)]
        todo.append((problem, [Candidate.of("triton", **{**config, "kernel": name}) for name, config in arms]))
    with gemv_loads.multiprocessing.get_context("fork").Pool(14) as pool:
        failed = [why for why in pool.map(gemv_loads.compiles, [(c, p) for p, cs in todo for c in cs]) if why]
    print(f"{len(failed)} refused {failed[:2]}", flush=True)
    here = environment(cuda_device(0))
    rows = []
    for problem, arms_ in todo:
        us = [statistics.median(series) for series in dense.take_turns(problem, arms_, floor=True)]
        names = [json.loads(c.config)["kernel"] for c in arms_]
        row = {"n": problem.n, "k": problem.k, "us": dict(zip(names, us, strict=False)), "floor_us": min(us[len(arms_) :])}
        rows.append(row)
        print(problem.n, problem.k, [round(t, 3) for t in us[: len(arms_)]], round(row["floor_us"], 3), flush=True)
    print("saved", record.save("gemv_parts", {"stamps": here.stamps, "rows": rows}, args.out))


if __name__ == "__main__":
    main()
