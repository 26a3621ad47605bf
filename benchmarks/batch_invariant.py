"""The batch-invariant table: the bits of a row at every M from 1 to 256, and what one kernel for every M costs.

    python -m benchmarks batch_invariant [--device cpu|cuda] [--shapes NxK,..] [--free-s SECONDS] [--out DIR]

For each of eight weights (N, K) the batch-invariant solution is searched and proven as the daemon does it, and, for as
long as --free-s allows, the free one at each M of 1, 16, 64 and 256.  All are timed in this one run: each pair is raced
against the other, weights cold.  Then the solutions are published into a home of their own, and a program with the hook
on (GEMMTUNED_BATCH_INVARIANT=1) compares each row at each M, at 257, 600 and 1000 rows too, with the same row alone;
the same program with the hook off says at how many M stock torch differs.

On a CPU the weights are fp32 and bf16 by turns and small; on a GPU bf16 layers of models of 1 to 14 billion weights.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import geometric_mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record

SIZES = (1, 16, 64, 256)
ON_CPU = "256x256,512x512,1024x256,384x1024,768x768,1024x512,512x1024,640x640"
ON_GPU = "1024x3072,3072x1024,2048x2048,4096x2048,2048x6144,4096x4096,6144x4096,5120x5120"
RACE_S = 0.1
BEYOND = (257, 600, 1000)


# ---- the program whose rows are compared


def child(problems: list[str], generation: int) -> None:
    """Says, for each problem, at which M a row differs from the same row alone; and what the hook counted."""
    import torch

    import gemmtuned
    from gemmtuned.configs.problem import Problem
    from gemmtuned.kernels.dtypes import torch_dtype

    if generation and not gemmtuned.is_enabled():
        gemmtuned.enable()
    found: dict[str, Any] = {}
    with torch.inference_mode():
        for text in problems:
            problem = Problem.parse(text)
            device = "cpu" if problem.threads else "cuda"
            torch.set_num_threads(problem.threads or torch.get_num_threads())
            torch.zeros(1, device=device)
            if generation:
                gemmtuned.ready(30.0)
                until_s = time.monotonic() + 30
                while gemmtuned.generation() < generation and time.monotonic() < until_s:
                    time.sleep(0.05)
            found[text] = _differing(problem, device, torch_dtype(problem.dtype))
        calls = _calls(gemmtuned) if generation else {}
    print(json.dumps({"differs": found, "calls": calls}), flush=True)


def _differing(problem: Any, device: str, dtype: Any) -> list[int]:
    import torch
    from torch.nn.functional import linear

    random_ = torch.Generator(device=device).manual_seed(7)
    x = torch.randn(max(BEYOND), problem.k, generator=random_, device=device).to(dtype)
    w = (torch.randn(problem.n, problem.k, generator=random_, device=device) * problem.k**-0.5).to(dtype)
    alone = torch.cat([linear(x[i : i + 1], w) for i in range(max(BEYOND))])
    order = torch.Generator().manual_seed(7)
    bad = []
    for m in (*range(1, 257), *BEYOND):
        rows = torch.randperm(max(BEYOND), generator=order)[:m].to(device)
        if not torch.equal(linear(x[rows], w), alone[rows]):
            bad.append(m)
    return bad


def _calls(gemmtuned: Any) -> dict[str, int]:
    from gemmtuned.hooks import activate

    hook = activate.current()
    assert hook is not None
    hook.flusher.flush()
    from gemmtuned.configs.settings import Settings
    from gemmtuned.db import queries

    home = Settings.from_env()
    rows = queries.ask(home.db, "SELECT outcome, sum(calls) AS calls FROM every_sighting GROUP BY outcome")
    return {row["outcome"]: row["calls"] for row in rows}


def _run_child(problems: list[str], generation: int, home: Path) -> dict[str, Any]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GEMMTUNED", "AITER_"))}
    if generation:
        cache = os.environ.get("GEMMTUNED_CACHE")
        env |= {"GEMMTUNED": "1", "GEMMTUNED_BATCH_INVARIANT": "1", "GEMMTUNED_HOME": str(home), "GEMMTUNED_QUIET": "1"}
        env |= {"GEMMTUNED_CACHE": cache} if cache else {}
    command = [sys.executable, __file__, "--child", json.dumps(problems), "--generation", str(generation)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        return {"failed": done.stderr[-2000:]}
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


# ---- the measurements


class Bench:
    """Searches and races on one device."""

    def __init__(self, device: str, threads: int) -> None:
        import torch

        from gemmtuned.configs.solution import cpu_device
        from gemmtuned.daemon.child.clocks import clock_for
        from gemmtuned.kernels.backends import environment
        from gemmtuned.kernels.device import current_cuda_device

        self.device = torch.device(device)
        self.threads = threads
        self.environment = environment(cpu_device() if device == "cpu" else current_cuda_device())
        self.clock = clock_for(self.device)
        self.mode = "eager" if device == "cpu" else "graph"

    def problem(self, n: int, k: int, number: int) -> Any:
        """The batch-invariant problem of the weight of this number."""
        from gemmtuned.configs.problem import Problem, as_by_default

        dtype = "bf16" if self.threads == 0 or number % 2 else "fp32"
        free = Problem(m=1, n=n, k=k, dtype=dtype, threads=self.threads)
        return Problem(**{**as_by_default(free, gpu=not self.threads).row(), "batch_invariant": True})

    def search(self, problem: Any) -> tuple[Any, float, str]:
        """(solution or None, seconds it took, why none)."""
        from gemmtuned.configs.errors import GemmtunedError
        from gemmtuned.daemon.child.search import tune_modes

        began_s = time.monotonic()
        try:
            found = tune_modes(
                (problem,), "exact", problem, self.environment, mode=self.mode, skip=(), emit=lambda trial: None
            )[0]
        except GemmtunedError as err:
            return None, time.monotonic() - began_s, str(err)
        return found, time.monotonic() - began_s, ""

    def race(self, at: Any, first: tuple[Any, Any], second: tuple[Any, Any]) -> Any:
        """second against first, each a candidate and the problem it is prepared for, at one size."""
        from gemmtuned.daemon.child.measure import Bench as Operands
        from gemmtuned.daemon.child.measure import pairs_for, race
        from gemmtuned.kernels.backends import BACKENDS
        from gemmtuned.kernels.torch_flags import as_called

        with as_called(at):
            operands = Operands(at, self.device)
            arms = [
                operands.arm(str(candidate), BACKENDS[candidate.backend].prepare(candidate, of), at)
                for candidate, of in (first, second)
            ]
            for arm in arms:
                for _ in range(2):
                    arm.calls[0]()
            call_us = max(self.clock.us(arm, (0,)) for arm in arms)
            if self.mode == "graph":
                call_us *= self.clock.launches(arms[0])  # type: ignore[attr-defined]
            pairs = pairs_for(call_us, RACE_S)
            result = race(arms[0], arms[1], clock=self.clock, pairs=pairs, coin=random.Random(1))
            for arm in arms:
                self.clock.forget(arm)
        return result


def measure(bench: Bench, shapes: tuple[tuple[int, int], ...], free_s: float) -> tuple[list[dict[str, Any]], list[Any]]:
    """(a row for each weight, the batch-invariant solutions)."""
    from gemmtuned.daemon.child.outcome import DEFAULT

    rows, solutions = [], []
    for number, (n, k) in enumerate(shapes):
        problem = bench.problem(n, k, number)
        solution, took_s, why = bench.search(problem)
        row: dict[str, Any] = {"problem": str(problem), "search_s": round(took_s, 1), "why_none": why, "times": {}}
        rows.append(row)
        print(f"{problem}: {solution.candidate if solution else why} in {took_s:.1f} s", flush=True)
        if solution is None:
            continue
        solutions.append(solution)
        row["runs"] = str(solution.candidate)
        for m in SIZES:
            at = problem.at(m)
            run = bench.race(at, (DEFAULT, at), (solution.candidate, problem.at(256)))
            row["times"][m] = {"stock_us": round(run.baseline_us, 2), "invariant_us": round(run.us, 2),
                               "stock_over_invariant": round(run.gain, 3)}  # fmt: skip
    until_s = time.monotonic() + free_s
    for m in (16, 1, 64, 256):
        for number, (n, k) in enumerate(shapes):
            problem = bench.problem(n, k, number)
            chosen = next((s for s in solutions if s.problem == problem), None)
            if time.monotonic() > until_s or chosen is None:
                continue
            at = problem.at(m)
            free, _, why = bench.search(at)
            entry = rows[number]["times"][m]
            if free is None:
                entry["free_why_none"] = why
                continue
            run = bench.race(at, (free.candidate, at), (chosen.candidate, problem.at(256)))
            entry |= {"free_runs": str(free.candidate), "free_us": round(run.baseline_us, 2),
                      "free_over_invariant": round(run.gain, 3)}  # fmt: skip
    return rows, solutions


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means by M: what the batch-invariant kernel costs against stock and the free table (1.2: 20 % more)."""
    found: dict[str, Any] = {}
    for m in SIZES:
        times = [row["times"][m] for row in rows if m in row["times"]]
        for against in ("stock", "free"):
            ratios = [1 / t[f"{against}_over_invariant"] for t in times if t.get(f"{against}_over_invariant")]
            if ratios:
                found[f"m{m}_cost_against_{against}"] = round(geometric_mean(ratios), 3)
                found[f"m{m}_shapes_against_{against}"] = len(ratios)
    return found


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--shapes", type=record.sizes)
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    parser.add_argument("--free-s", type=float, default=90.0, help="no search of a free solution begins after so long")
    parser.add_argument("--child", help="internal: the program whose rows are compared")
    parser.add_argument("--generation", type=int, default=0)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child), args.generation)
        return
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    shapes = args.shapes or record.sizes(ON_GPU if device == "cuda" else ON_CPU)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["GEMMTUNED_HOME"] = folder  # compiled kernels go there
        from gemmtuned.configs.manifest import BINARIES, write_binary, write_tables
        from gemmtuned.configs.settings import Settings
        from gemmtuned.hooks.native import build

        build.build(Settings.from_env().cache)
        bench = Bench(device, 0 if device == "cuda" else args.threads)
        rows, solutions = measure(bench, shapes, args.free_s)
        problems = [str(s.problem) for s in solutions]
        print("comparing rows", flush=True)
        stock = _run_child(problems, 0, home)
        both = [s for s in solutions for s in _in_both_modes(s, bench.mode)]
        for binary in (home / BINARIES).glob("*"):
            write_binary(home / "configs", binary.read_bytes())
        write_tables(home / "configs", {"bench": both}, generation=1)
        served = _run_child(problems, 1, home)
    for row in rows:
        row["stock_differs_at"] = len(stock.get("differs", {}).get(row["problem"], []))
        row["served_differs_at"] = served.get("differs", {}).get(row["problem"])
    result = {"summary": summary(rows), "served_calls": served.get("calls"), "rows": rows,
              "failed": served.get("failed") or stock.get("failed")}  # fmt: skip
    facts = record.facts()
    kind = "cpu" if device == "cpu" else facts["device"].lower().replace("nvidia ", "").split()[0]
    path = record.save(f"batch_invariant-{kind}-{facts['date'][:10]}", result, args.out)
    print(
        json.dumps({**result["summary"], "served_calls": result["served_calls"], "failed": result["failed"]}, indent=1)
    )
    print({row["problem"]: (row["stock_differs_at"], row["served_differs_at"]) for row in rows})
    print(path)


def _in_both_modes(solution: Any, mode: str) -> list[Any]:
    from dataclasses import replace

    return [solution] if mode == "eager" else [solution, replace(solution, mode="eager")]


if __name__ == "__main__":
    main()
