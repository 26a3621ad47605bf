"""Every GEMV there is at M = 1, with and without the tensor core, against the winners of before."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import dense
import record
import torch

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.compile import compile_record
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.switches import as_called
from gemmtuned.kernels.triton import gemv
from gemmtuned.kernels.triton.shortlist import MODULES

PEEL = "STEPS - 1 if SPLIT == 1 else 0"


def unpeeled() -> None:
    folder = Path(tempfile.mkdtemp(prefix="gemmtuned-gemv-"))
    name = "gemv_masked"
    text = Path(gemv.__file__).read_text()
    assert PEEL in text
    text = text.replace(PEEL, "0").replace('NAME: Final = "gemv"', f'NAME: Final = "{name}"')
    text = text.replace("def gemv(", f"def {name}(").replace("KERNEL: Final = gemv", f"KERNEL: Final = {name}")
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    made: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[name] = made
    spec.loader.exec_module(made)  # type: ignore[union-attr]
    MODULES[name] = made


def compiles(job: tuple[Candidate, Problem]) -> str:
    candidate, problem = job
    config = json.loads(candidate.config)
    try:
        compile_record(MODULES[config.pop("kernel")].launch_record(config, problem), "sm_90")
    except CandidateFailed as err:
        return str(err)
    return ""


def by_tensor_core(n: int, k: int, units: int = 132) -> list[dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for rows in (1, 2, 4):
        if rows > 1 and n < 0.75 * rows * units:
            continue
        for warps in (1, 2, 4, 8):
            block_k = 256 * warps
            if 256 < block_k >= 2 * k:
                continue
            steps = -(-k // block_k)
            if steps * block_k > 1.25 * k:
                continue
            unrolls = set()
            for loads in (4, 8, 16, 32):
                most = max(1, min(steps, loads // rows))
                even = max(u for u in range(1, most + 1) if steps % u == 0)
                unrolls.add(even if even > most // 2 else most)
                unrolls.add(most)
            for unroll in unrolls:
                config = {"rows": rows, "block_k": block_k, "split": 1, "warps": warps, "unroll": unroll, "mma": 1}
                found[json.dumps(config)] = config
    return list(found.values())


def error(problem: Problem, candidate: Candidate) -> float:
    with as_called(problem):
        x = torch.randn(1, problem.k, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(problem.n, problem.k, device="cuda", dtype=torch.bfloat16)
        y = BACKENDS["triton"].prepare(candidate, problem).bind(w.t())(x, None)
        exact = x.double() @ w.double().t()
    return float((y - exact).abs().max() / exact.abs().max())


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=240)
    args = parser.parse_args()
    began = time.monotonic()
    unpeeled()
    known = sorted((Path(__file__).parent / "results").glob("dense-all-h200-*.json"))[-1]
    todo = []
    for row in json.loads(known.read_text())["rows"]:
        if row["m"] != 1:
            continue
        n, k = row["n"], row["k"]
        problem = Problem(m=1, n=n, k=k, dtype="bf16", math_mode="reduced")
        plain = Candidate.of("triton", **json.loads(row["config"]))
        ordinary = [c for _, c in gemv.scored(1, n, k, 132) if not c.get("mma")]
        wide = by_tensor_core(n, k)
        every = [Candidate.of("triton", kernel="gemv", **c) for c in (*ordinary, *wide)]
        uneven = [c for c in (*ordinary[:10], *wide) if k % c["block_k"]]
        every += [Candidate.of("triton", kernel="gemv_masked", **c) for c in uneven]
        todo.append((problem, plain, every))
    jobs = [(c, p) for p, plain, every in todo for c in (plain, *every)]
    print(len(jobs), "to compile", flush=True)
    with multiprocessing.get_context("fork").Pool(15) as pool:
        refused = {job for job, why in zip(jobs, pool.map(compiles, jobs, chunksize=8), strict=True) if why}
    print(f"{len(refused)} refused, {time.monotonic() - began:.0f} s", flush=True)
    here = environment(cuda_device(0))
    rows: list[dict[str, Any]] = []
    for problem, plain, every in todo:
        if time.monotonic() - began > args.seconds:
            break
        good = [c for c in every if (c, problem) not in refused]
        dense.ROUNDS = 5
        first = [statistics.median(series) for series in dense.take_turns(problem, good, floor=False)]
        order = sorted(range(len(good)), key=first.__getitem__)[:5]
        dense.ROUNDS = 21
        arms = [plain, *(good[i] for i in order)]
        us = [statistics.median(series) for series in dense.take_turns(problem, arms, floor=True)]
        rows.append({
            "n": problem.n, "k": problem.k, "before_us": us[0], "best_us": us[1:6], "floor_us": min(us[6:]),
            "error": error(problem, arms[1]),
            "best": [c.config for c in arms[1:]], "screened": [(c.config, t) for c, t in zip(good, first, strict=True)],
        })  # fmt: skip
        best = 1 + us[1:6].index(min(us[1:6]))
        print(problem.n, problem.k, [round(t, 3) for t in us[:6]], round(min(us[6:]), 3), arms[best].config, f"{rows[-1]['error']:.1e}", flush=True)
        record.save("gemv_space", {"benchmark": "gemv_space", "stamps": here.stamps, "rows": rows}, args.out)


if __name__ == "__main__":
    main()
