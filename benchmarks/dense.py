"""Dense bf16 and fp16 products on one GPU: what the daemon's own search publishes, raced once more against torch.

    python -m benchmarks dense --out FOLDER [--m 1,4,8,16 --shapes eight|all|NxK,... --seconds 480 --resume dense.jsonl]

For each problem the search runs as in the daemon's worker, with everything compiled ahead by other processes.  What it
finds then takes turns with F.linear (torch.mm on W.t()) and with kernels that only read the weight, the streaming
floor, in CUDA graphs with cold weights: that is the ratio reported, not the one it won by.  Then both once more on a
device that was kept busy before (`busy`).  A problem where torch stays counts 1.00.  Every problem is a line of
dense.jsonl as it is done, and --resume goes on from there; dense.json sums up.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ["GEMMTUNED_HOME"] = tempfile.mkdtemp(prefix="gemmtuned-")

import record
import torch
from timing import CudaTimer, floor_launches

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate, Environment, Solution
from gemmtuned.daemon.child import races, search
from gemmtuned.daemon.child.compile_ahead import Compilers
from gemmtuned.daemon.child.measure import Arm, Bench, signed_rank_interval
from gemmtuned.daemon.child.measure_cuda import GraphClock, cuda_graphs
from gemmtuned.daemon.protocol.options import DEFAULTS, SearchOptions
from gemmtuned.daemon.protocol.wire import Trial
from gemmtuned.kernels import catalog
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.torch_flags import as_called

EIGHT = ((576, 7168), (2112, 7168), (1280, 8192), (256, 7168), (7168, 2048), (4096, 4096), (1536, 7168), (512, 16384))
TWELVE = (
    (8192, 1024), (5120, 1280), (5120, 2880), (2880, 4096), (3072, 1536), (6400, 5120), (5120, 5120), (8192, 3584),
    (10240, 8192), (16160, 7168), (28672, 4096), (5120, 25600),
)  # fmt: skip
LAUNCHES = 30  # at least, in a graph of the last race
ROUNDS = 21
DEFAULT = Candidate("torch")


class CountingClock(GraphClock):
    """Also adds up the device time that a search takes for its readings."""

    gpu_us = 0.0

    def us(self, arm: Arm, copies: Sequence[int]) -> float:
        taken = super().us(arm, copies)
        self.gpu_us += taken * self._recorded[id(arm)].launches
        return taken

    def keep_busy(self, arms: Sequence[Arm], seconds: float) -> None:
        super().keep_busy(arms, seconds)
        self.gpu_us += seconds * 1e6


class Ahead:
    """Compiles the candidates of one problem after another in other processes, ahead of the device."""

    def __init__(
        self,
        problems: Iterable[Problem],
        here: Environment,
        offered: Callable[[Problem], Iterable[Candidate]] | None = None,
    ) -> None:
        self.seconds: dict[Problem, float] = {}
        self._ready = {problem: threading.Event() for problem in problems}
        self._here = here
        self._offered = offered or (
            lambda problem: chain.from_iterable(catalog.candidates(problem, here.device).values())
        )
        threading.Thread(target=self._work, daemon=True).start()

    def wait(self, problem: Problem) -> float:
        """Seconds that compiling this problem's candidates took."""
        self._ready[problem].wait()
        return self.seconds[problem]

    def _work(self) -> None:
        compilers = Compilers(max(1, (os.cpu_count() or 2) - 2))
        for problem, ready in self._ready.items():
            begin = time.monotonic()
            try:
                compilers.run(list(self._offered(problem)), problem, self._here.device)
            except Exception as err:
                print(f"{problem}: not compiled ahead: {err}", flush=True)
            self.seconds[problem] = time.monotonic() - begin
            ready.set()
        compilers.close()


def in_time(
    wanted: Sequence[tuple[str, Problem]], ahead: Ahead | None, until_s: float
) -> Iterator[tuple[str, Problem]]:
    """One after another, once its candidates are compiled, until until_s of time.monotonic(); tells what is left."""
    for number, (kind, problem) in enumerate(wanted):
        if time.monotonic() > until_s:
            print(f"time is up, {len(wanted) - number} left", flush=True)
            return
        if ahead is not None:
            ahead.wait(problem)
        yield kind, problem


def tune(problem: Problem, here: Environment, options: SearchOptions = DEFAULTS) -> dict[str, Any]:
    """The search's verdict, and what it cost."""
    trials: list[Trial] = []
    clock = CountingClock(cuda_graphs())
    begin = time.monotonic()
    solution, *_ = search.tune_modes(
        (problem,), "exact", problem, here, mode="graph", skip=(), emit=trials.append, clock=clock,
        options=options,
    )  # fmt: skip
    wall_s = time.monotonic() - begin
    timed = {t.candidate for t in trials if t.phase == "screen" and t.us is not None and t.candidate != DEFAULT}
    return {"solution": solution, "wall_s": wall_s, "gpu_s": clock.gpu_us / 1e6, "timed": len(timed), "trials": trials}


@torch.inference_mode()
def take_turns(
    problem: Problem, candidates: Sequence[Candidate], *, floor: bool, busy_s: float = 0.0
) -> list[list[float]]:
    """us of each round, weights cold, of the candidates taking turns; floor: then of kernels that only read W.

    busy_s: the device runs the candidates for so long before.
    """
    timer = CudaTimer()
    with as_called(problem):
        bench = Bench(problem, torch.device("cuda"))
        launches = len(bench.weights) * math.ceil(LAUNCHES / len(bench.weights))
        runs = []
        for candidate in candidates:
            kernel = BACKENDS[candidate.backend].prepare(candidate, problem)
            calls = bench.arm(str(candidate), kernel, problem).calls
            runs.append(timer.prepare(lambda i, calls=calls: calls[i % len(calls)](), launches))  # type: ignore[misc]
        floors = floor_launches(timer, [w.t() for w, *_ in bench.weights], launches) if floor else []
        timer.keep_busy(runs, busy_s)
        times = timer.measure([*runs, *floors], ROUNDS + 2)
    return [[t / launches for t in series[2:]] for series in times]


def race_again(problem: Problem, solution: Solution) -> dict[str, Any]:
    """Medians in us of torch, the solution and the floor, taking turns; ratio torch/solution with its 95 % interval.

    The same once more, without the floor, on a device that was kept busy.
    """
    us = take_turns(problem, (DEFAULT, solution.candidate), floor=True)
    busy = take_turns(problem, (DEFAULT, solution.candidate), floor=False, busy_s=races.BUSY_S)
    seen = ratio("", us[0], us[1]) | ratio("busy_", busy[0], busy[1])
    return seen | {"floor_us": min(statistics.median(series) for series in us[2:])}


def ratio(name: str, torch_us: Sequence[float], us: Sequence[float]) -> dict[str, float]:
    """Medians, and the middle of the pairs' ratios with its 95 % interval."""
    middle, low, high = signed_rank_interval([math.log(a / b) for a, b in zip(torch_us, us, strict=True)])
    return {
        f"{name}torch_us": statistics.median(torch_us), f"{name}us": statistics.median(us),
        f"{name}ratio": math.exp(middle), f"{name}ratio_low": math.exp(low), f"{name}ratio_high": math.exp(high),
    }  # fmt: skip


def measure(problem: Problem, here: Environment, compile_s: float) -> dict[str, Any]:
    row: dict[str, Any] = {"m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype}
    try:
        found = tune(problem, here)
        solution = found.pop("solution")
        seen = race_again(problem, solution)
    except GemmtunedError as err:
        return {**row, "failed": str(err)}
    trials = found.pop("trials")
    published = solution.state == "published"
    row |= {
        **seen, **found, "compile_s": compile_s, "backend": solution.backend, "config": solution.config,
        "published": published, "counts": seen["ratio"] if published else 1.0,
        "busy_counts": seen["busy_ratio"] if published else 1.0, "won_by": solution.gain_low,
        "err": solution.err, "torch_err": solution.baseline_err,
        "screened": [(str(t.candidate), round(t.us, 3), t.note) for t in trials if t.phase == "screen" and t.us],
    }  # fmt: skip
    return {
        name: round(value, 4) if isinstance(value, float) and name != "err" else value for name, value in row.items()
    }


def geomean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each M: geomeans over the eight and over all shapes measured, and what the searches cost."""
    lines = []
    for m in sorted({row["m"] for row in rows}):
        mine = [row for row in rows if row["m"] == m and "failed" not in row]
        eight = [row for row in mine if (row["n"], row["k"]) in EIGHT]
        line: dict[str, Any] = {
            "m": m,
            "problems": len(mine),
            "failed": sum("failed" in r for r in rows if r["m"] == m),
        }
        for name, group in (("eight", eight), ("all", mine)):
            if group:
                line[name] = round(geomean([row["counts"] for row in group]), 4)
                if all("busy_counts" in row for row in group):  # of a run that was begun before they were measured
                    line[f"{name}_busy"] = round(geomean([row["busy_counts"] for row in group]), 4)
                line[f"{name}_over_floor"] = round(geomean([row["us"] / row["floor_us"] for row in group]), 4)
        if mine:
            line["worst"] = min(row["counts"] for row in mine)
            lows = [low for row in mine if row["published"] for low in (row["ratio_low"], row.get("busy_ratio_low", 9))]
            line["lowest_bound"] = min(lows, default=None)
            line |= {
                name: round(statistics.median(row[name] for row in mine), 2)
                for name in ("timed", "gpu_s", "wall_s", "compile_s")
            }
        lines.append(line)
    return lines


def shapes_of(text: str) -> tuple[tuple[int, int], ...]:
    """(N, K) of `eight`, `all` or `576x7168,4096x4096`."""
    return {"eight": EIGHT, "all": EIGHT + TWELVE}.get(text) or record.sizes(text)


def read_lines(path: Path | None) -> list[dict[str, Any]]:
    """Rows of an earlier run; none without a path."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path else []


def left_to_do(rows: list[dict[str, Any]], ms: str, shapes: Iterable[tuple[int, int]], dtype: str) -> list[Problem]:
    """The problems of these M (`8,1,16`, in this order) and shapes that have no row yet."""
    done = {(row["m"], row["n"], row["k"], row["dtype"]) for row in rows}
    return [
        Problem(m=m, n=n, k=k, dtype=dtype, math_mode="reduced")
        for m in map(int, ms.split(","))
        for n, k in shapes
        if (m, n, k, dtype) not in done
    ]


def work_through(
    problems: Iterable[Problem],
    rows: list[dict[str, Any]],
    measure_one: Callable[[Problem], dict[str, Any]],
    *,
    path: Path,
    until_s: float,
) -> None:
    """Add the row of each problem to rows, and as a line to the file, as it is done; none is begun after until_s."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        for problem in problems:
            if time.monotonic() > until_s:
                print("time is up", flush=True)
                break
            row = measure_one(problem)
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print({name: row[name] for name in row if name not in ("screened", "dtype")}, flush=True)


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--name", default="dense", help="of the result")
    parser.add_argument("--m", default="8,1,16,4,64,256,2048", help="rows of X, in this order")
    parser.add_argument("--shapes", default="all", help="eight, all, or NxK,NxK,...")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    parser.add_argument("--seconds", type=float, default=480, help="start no new problem after this long")
    parser.add_argument("--resume", type=Path, help="the .jsonl of an earlier run on the same device")
    args = parser.parse_args()
    began = time.monotonic()
    rows = read_lines(args.resume)
    problems = left_to_do(rows, args.m, shapes_of(args.shapes), args.dtype)
    here = environment(cuda_device(0))
    print(here.key, flush=True)
    ahead = Ahead(problems, here)
    work_through(
        problems,
        rows,
        lambda problem: measure(problem, here, ahead.wait(problem)),
        path=args.out / f"{args.name}.jsonl",
        until_s=began + args.seconds,
    )
    lines = summary(rows)
    for line in lines:
        print(line, flush=True)
    plain = [{name: value for name, value in row.items() if name != "screened"} for row in rows]
    path = record.save(
        args.name, {"benchmark": "dense", "stamps": here.stamps, "summary": lines, "rows": plain}, args.out
    )
    print("saved", path, flush=True)
    os._exit(0)  # do not wait for compilations nobody needs


if __name__ == "__main__":
    main()
