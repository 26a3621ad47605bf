r"""Turn what benchmarks found best into the table shipped for an architecture (configs/tables/<arch>).

    python -m benchmarks ship sm_90 \
        benchmarks/results/{gpu_loop-h,dense-,families-,grouped,weight_only-,a4w4-,verdicts-}*.json

Takes the rows of dense.py, gpu_loop.py, families.py, weight_only.py, a4w4.py and verdicts.py, of each problem and
device what the latest of the files says: what was published, and won again where it was raced again, but for kernels of
ours that are no more, that as they are now cannot run it, spill registers, or do not compile.  Writes the folder anew.
Rows come without binaries: they are seeds for a daemon's search, never run unmeasured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.configs.formats import bundle
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.shipped import FOLDER
from gemmtuned.configs.solution import Candidate, Device, Solution
from gemmtuned.daemon.protocol.options import DEFAULTS
from gemmtuned.kernels import catalog
from gemmtuned.kernels.compile_candidate import compile_candidate

DEVICES: Final = {"NVIDIA H200": "cuda-nvidia-h200-132", "NVIDIA H100 80GB HBM3": "cuda-nvidia-h100-80gb-hbm3-132"}
READ: Final = ("dense", "gpu_loop", "families", "weight_only", "a4w4", "verdicts")
_OF_THE_REPORT: Final = (  # what `gains` says besides the solution
    "problem", "speedup", "saved_us", "hit_calls", "tflops", "gb_s", "environment", "published", "retired", "reason",
    "route",
)  # fmt: skip
_SAID_NO_MORE: Final = {"cluster": 0, "fold": 3}
_NOT_SAID: Final = {"fragments": {"registers": 0}}


def found(raw: dict[str, Any]) -> Iterator[tuple[Problem, str, Solution | None]]:
    """(problem, device, its solution) of one result file; None where none was published, or lost in the race after.

    Raises SystemExit for a file of another benchmark.
    """
    if raw["benchmark"] == "dense":
        yield from _of_dense(raw)
    elif raw["benchmark"] in ("families", "weight_only", "a4w4"):
        yield from _of_families(raw)
    elif raw["benchmark"] == "verdicts":
        for row in raw["rows"]:
            if "failed" not in row:
                solution = Solution.from_row({**row["solution"], "generation": 0})
                yield solution.problem, solution.device, solution if solution.state == "published" else None
    elif raw["benchmark"] == "gpu_loop":
        for row in raw["solutions"]:
            if row["state"] == "published" and row["mode"] == "graph":
                named = {name: value for name, value in row.items() if name not in _OF_THE_REPORT}
                solution = replace(Solution.from_row({**named, "generation": 0}), launch="")
                yield solution.problem, solution.device, solution
    else:
        raise SystemExit(f"{raw['benchmark']}: expected results of {', '.join(READ)}")


def _of_dense(raw: dict[str, Any]) -> Iterator[tuple[Problem, str, Solution | None]]:
    known = [name for backend in catalog.FOLDERS for name in catalog.kernels(backend)]
    for row in raw["rows"]:
        if json.loads(row.get("config") or "{}").get("kernel", "gemv") not in known:
            print(f"left out: {row['config']} of M = {row['m']}, {row['n']}x{row['k']}: there is no such kernel")
            continue
        problem = Problem(m=row["m"], n=row["n"], k=row["k"], dtype=row["dtype"], math_mode="reduced")
        low = min(row["ratio_low"], row.get("busy_ratio_low", row["ratio_low"])) if row.get("published") else 0.0
        config = _plain(row["backend"], row["config"], row["m"]) if low > DEFAULTS.min_gain else ""
        yield _row(raw, problem, row, config=config, us=row["us"], low=low)


def _of_families(raw: dict[str, Any]) -> Iterator[tuple[Problem, str, Solution | None]]:
    """Of weight_only.py's and a4w4.py's rows, which have no interval, both medians a spread nearer to one another."""
    for row in raw["rows"]:
        if "failed" in row:
            continue
        problem, low = Problem.parse(row["problem"]), 0.0
        if row["published"] and "ratio_low" in row:
            low = min(row["ratio_low"], row["won_by"])
        elif row["published"]:
            slow, fast = (row[f"{name}_us"] for name in ("published", "torch"))
            low = (fast - row["torch_spread"]) / (slow + row["published_spread"])
        yield _row(raw, problem, row, config=row["config"], us=row.get("published_us", 0.0), low=low)


def _row(
    raw: dict[str, Any], problem: Problem, row: dict[str, Any], *, config: str, us: float, low: float
) -> tuple[Problem, str, Solution | None]:
    device = DEVICES[raw["device"]]
    if low <= DEFAULTS.min_gain:
        return problem, device, None
    candidate, stamps = Candidate(row["backend"], config), raw["stamps"]
    stamp = stamps.get(candidate.backend) or stamps[f"{candidate.backend}.{candidate.kernel}"]
    solution = Solution(
        problem=problem, device=device, mode="graph", covers="exact", backend=row["backend"], config=config,
        stamp=stamp, us=us, baseline_us=row["torch_us"], gain_low=low, err=row["err"], baseline_err=row["torch_err"],
        state="published",
    )  # fmt: skip
    return problem, device, solution


def _plain(backend: str, config: str, m: int) -> str:
    """A config as the search writes it: one of ours says nothing of a cluster where it has none.

    Nor of what its kernel now always does: as fold 1 of `fragments`, and 3 is that with another way of adding up.  What
    it did not say before there was a word for it is said.
    """
    values = json.loads(config)
    if backend == "triton":
        for name, plain in _SAID_NO_MORE.items():
            if values.get(name) == plain:
                del values[name]
        values = _NOT_SAID.get(values["kernel"], {}) | values
        unknown = {*values} - {"kernel", *(p.name for p in catalog.kernels("triton")[values["kernel"]].parameters)}
        if unknown:
            raise SystemExit(f"{config}: its kernel has no {', '.join(sorted(unknown))}")
    elif backend == "cuda":
        values = {"tokens": -(-m // 16) * 16} | values
    return Candidate.of(backend, **values).config


def _objection(solution: Solution, *, arch: str) -> str:
    """What the kernel or the compiler has against it, if anything."""
    device = Device("", "cuda", "", arch, 0)
    try:
        if solution.backend in catalog.FOLDERS:
            catalog.record_of(solution.candidate, solution.problem)
        compile_candidate(solution.candidate, solution.problem, device)
    except CandidateFailed as err:
        return str(err)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch")
    parser.add_argument("results", type=Path, nargs="+")
    args = parser.parse_args()
    last: dict[tuple[Problem, str], Solution | None] = {}
    for raw in sorted((json.loads(path.read_text()) for path in args.results), key=lambda raw: raw["date"]):
        for problem, device, solution in found(raw):
            last[problem, device] = solution
    won = [solution for solution in last.values() if solution]
    solutions = []
    with ProcessPoolExecutor() as pool:
        for solution, reason in zip(won, pool.map(partial(_objection, arch=args.arch), won, chunksize=4), strict=True):
            if reason:
                print(f"left out: {solution.problem}: {reason}")
            else:
                solutions.append(solution)
    folder = FOLDER / args.arch
    for old in folder.glob("*.jsonl"):
        old.unlink()
    manifest, left = bundle.write(folder, solutions, generation=1, binaries=folder)
    print(f"{folder}: {sum(file.rows for file in manifest.files)} rows; left out: {left or 'none'}")


if __name__ == "__main__":
    main()
