"""Where a kernel's time goes: the same kernel without its loads of X, without those of W, without the sum over K.

    python -m lab anatomy --out FOLDER CONFIG.json

CONFIG.json: a list of [m, n, k, config].  A kernel that leaves work out is made from the source of ours, and computes
nothing of use; it takes turns with the whole one and the streaming floor, cold weights, CUDA graphs.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import dense
import record

from gemmtuned.configs.problem import Problem
from gemmtuned.configs.solution import Candidate
from gemmtuned.kernels import catalog
from gemmtuned.kernels.backends import environment
from gemmtuned.kernels.compile import compile_kernel
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.triton import tiles, warp_split_k

# name: what is replaced in the source of (warp_split_k, tiles)
LEFT_OUT: dict[str, tuple[tuple[str, str], ...]] = {
    "no_x": (
        ("x_rows + k[:, :, None]", "x_rows + ks[:, :, None]"),
        ("xp = x_rows[None, :] + k[:, None]", "xp = x_rows[None, :] + ks[:, None]"),
        ("xp = x_rows[:, None] + k[None, :]", "xp = x_rows[:, None] + ks[None, :]"),
    ),
    "no_w": (
        ("w_rows + k[:, None, :]", "w_rows + ks[:, None, :]"),
        ("wp = w_rows[:, None] + k[None, :]", "wp = w_rows[:, None] + ks[None, :]"),
        ("wp = w_rows[None, :] + k[:, None]", "wp = w_rows[None, :] + ks[:, None]"),
    ),
    "no_sum": (("if SPLIT == 1:", "if SPLIT >= 1:"),),
    "no_last_sum": (("if arrived_last(counters, tile, SPLIT):", "if arrived_last(counters, tile, SPLIT * 1000000):"),),
}


def variants() -> None:
    """Put a kernel for each of LEFT_OUT beside ours."""
    folder = Path(tempfile.mkdtemp(prefix="gemmtuned-anatomy-"))
    known: Any = catalog.kernels("triton")
    for module in (warp_split_k, tiles):
        for what, replacements in LEFT_OUT.items():
            ours = module.KERNEL.name
            name = f"{ours}_{what}"
            text = Path(module.__file__).read_text().replace(f'name="{ours}"', f'name="{name}"')
            for old, new in replacements:
                text = text.replace(old, new)
            path = folder / f"{name}.py"
            path.write_text(text)
            spec = importlib.util.spec_from_file_location(name, path)
            made: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
            sys.modules[name] = made
            spec.loader.exec_module(made)  # type: ignore[union-attr]
            known[name] = made.KERNEL


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("configs", type=Path)
    parser.add_argument("--seconds", type=float, default=120)
    args = parser.parse_args()
    here = environment(cuda_device(0))
    variants()
    tasks = json.loads(args.configs.read_text())
    work = []
    for m, n, k, config in tasks:
        problem = Problem(m=m, n=n, k=k, dtype="bf16", math_mode="reduced")
        names = ["", "_no_x", "_no_w"]
        if config["split"] > 1 and not config.get("cluster"):  # what sends no sums is not compiled as a cluster
            names += ["_no_sum", "_no_last_sum"]
        work.append(
            (
                problem,
                config,
                [Candidate.of("triton", **{**config, "kernel": config["kernel"] + name}) for name in names],
            )
        )

    def build(item: tuple[Problem, Candidate]) -> None:
        problem, candidate = item
        compile_kernel(catalog.record_of(candidate, problem)[1], here.device.arch)

    began = time.monotonic()
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(build, [(p, c) for p, _, cs in work for c in cs]))
    print("compiled", time.monotonic() - began, flush=True)
    rows = []
    for problem, config, candidates in work:
        if time.monotonic() > began + args.seconds:
            break
        times = [statistics.median(series) for series in dense.take_turns(problem, candidates, floor=True)]
        row: dict[str, Any] = {"m": problem.m, "n": problem.n, "k": problem.k, "config": config}
        for candidate, us in zip(candidates, times, strict=False):
            row[json.loads(candidate.config)["kernel"].removeprefix(config["kernel"]).lstrip("_") or "whole"] = round(
                us, 3
            )
        row["floor"] = round(min(times[len(candidates) :]), 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
    print("saved", record.save("anatomy", {"benchmark": "anatomy", "stamps": here.stamps, "rows": rows}, args.out))


if __name__ == "__main__":
    main()
