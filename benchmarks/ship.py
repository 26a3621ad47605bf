"""Turn what benchmarks found best into the table shipped for an architecture (configs/tables/<arch>).

    python -m benchmarks ship sm_90 benchmarks/results/gpu_loop-h*.json benchmarks/results/dense-*.json

Takes the rows of dense.py and of gpu_loop.py, of each problem and device what the latest of the files says: what was
published, and won again where it was raced again, but for kernels of ours that as they are now spill registers, or do
not compile.  Writes the folder anew.  Rows come without binaries: they are seeds for a daemon's search, never run
unmeasured.
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
_SAID_NO_MORE: Final = {"cluster": 0, "fold": 3}
_NOT_SAID: Final = {"fragments": {"registers": 0}}


def found(raw: dict[str, Any]) -> Iterator[tuple[Problem, str, Solution | None]]:
    """(problem, device, its solution) of one result file; None where none was published, or lost in the race after."""
    known = [name for backend in catalog.FOLDERS for name in catalog.kernels(backend)]
    if raw["benchmark"] == "dense":
        for row in raw["rows"]:
            if json.loads(row.get("config") or "{}").get("kernel", "gemv") not in known:
                print(f"left out: {row['config']} of M = {row['m']}, {row['n']}x{row['k']}: there is no such kernel")
                continue
            device = DEVICES[raw["device"]]
            problem = Problem(m=row["m"], n=row["n"], k=row["k"], dtype=row["dtype"], math_mode="reduced")
            published = row.get("published")
            low = min(row["ratio_low"], row.get("busy_ratio_low", row["ratio_low"])) if published else 0.0
            if low <= DEFAULTS.min_gain:
                yield problem, device, None
                continue
            config = _plain(row["backend"], row["config"], row["m"])
            solution = Solution(
                problem=problem, device=device, mode="graph", covers="exact", backend=row["backend"], config=config,
                stamp=raw["stamps"][row["backend"]], us=row["us"], baseline_us=row["torch_us"],
                gain_low=low, err=row["err"], baseline_err=row["torch_err"], state="published",
            )  # fmt: skip
            yield problem, device, solution
    elif raw["benchmark"] == "gpu_loop":
        for row in raw["solutions"]:
            if row["state"] == "published" and row["mode"] == "graph":
                solution = replace(Solution.from_row({**row, "generation": 0}), launch="")
                yield solution.problem, solution.device, solution
    else:
        raise SystemExit(f"{raw['benchmark']}: expected results of dense.py or gpu_loop.py")


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
    """What the compiler has against it, if anything."""
    device = Device("", "cuda", "", arch, 0)
    try:
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
