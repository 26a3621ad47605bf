"""The whole space of GEMVs with the tensor core's products, at M = 1, against the winners without."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import dense
import gemv_loads
import record

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.kernels.backends import environment
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.triton.gemv import NAME


def space(n: int, k: int, units: int = 132) -> list[dict[str, int]]:
    """Wider than gemv.scored: any number of loads of W from 4 to 32 at once."""
    found: dict[str, dict[str, int]] = {}
    for rows in (1, 2, 4):
        if rows > 1 and n < 0.75 * rows * units:
            continue
        for warps in (1, 2, 4, 8):
            for packs in (1, 2, 4):
                block_k = 256 * warps * packs
                if 256 < block_k >= 2 * k or rows * packs > 4:
                    continue
                steps = -(-k // block_k)
                if steps * block_k > 1.25 * k:
                    continue
                unrolls = set()
                for loads in (4, 8, 16, 32):
                    most = max(1, min(steps, loads // (rows * packs)))
                    even = max(u for u in range(1, most + 1) if steps % u == 0)
                    unrolls.add(even if even > most // 2 else most)
                for unroll in unrolls:
                    config = {"rows": rows, "block_k": block_k, "split": 1, "warps": warps, "unroll": unroll}
                    found[json.dumps(config)] = config
    return list(found.values())


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--picks", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=200)
    args = parser.parse_args()
    began = time.monotonic()
    gemv_loads.variants()
    todo = []
    for row in json.loads(args.picks.read_text())["rows"]:
        problem = Problem(m=1, n=row["n"], k=row["k"], dtype="bf16", math_mode="reduced")
        plain = Candidate.of("triton", **{**json.loads(row["gemv"]), "kernel": NAME})
        todo.append((problem, plain, [Candidate.of("triton", kernel="gemv_mma", **c) for c in space(row["n"], row["k"])]))
    jobs = [(c, p) for p, plain, mma in todo for c in (plain, *mma)]
    print(len(jobs), "to compile", flush=True)
    with gemv_loads.multiprocessing.get_context("fork").Pool(15) as pool:
        refused = {job for job, why in zip(jobs, pool.map(gemv_loads.compiles, jobs, chunksize=8), strict=True) if why}
    print(f"{len(refused)} refused, {time.monotonic() - began:.0f} s", flush=True)
    here = environment(cuda_device(0))
    rows: list[dict[str, Any]] = []
    for problem, plain, mma in todo:
        if time.monotonic() - began > args.seconds:
            break
        good = [c for c in mma if (c, problem) not in refused]
        dense.ROUNDS = 5
        first = [statistics.median(series) for series in dense.take_turns(problem, good, floor=False)]
        order = sorted(range(len(good)), key=first.__getitem__)[:4]
        dense.ROUNDS = 21
        arms = [plain, *(good[i] for i in order)]
        us = [statistics.median(series) for series in dense.take_turns(problem, arms, floor=True)]
        rows.append({
            "n": problem.n, "k": problem.k, "gemv_us": us[0], "mma_us": us[1:5], "floor_us": min(us[5:]),
            "mma": [c.config for c in arms[1:]], "screened": [(c.config, t) for c, t in zip(good, first, strict=True)],
        })  # fmt: skip
        print(problem.n, problem.k, [round(t, 3) for t in us[:5]], round(min(us[5:]), 3), arms[1 + us[1:5].index(min(us[1:5]))].config, flush=True)
        record.save("gemv_space", {"stamps": here.stamps, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
