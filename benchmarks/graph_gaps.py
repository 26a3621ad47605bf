"""Does one kernel of some kind make the gaps between all kernels of a CUDA graph longer?

    python benchmarks/graph_gaps.py --out FOLDER

end_to_end.py saw decode steps whose gaps shrank by 0.2 us a launch, over the whole graph, once no kernel of torch's
library was left in it.  Here a graph holds LAUNCHES small element-wise kernels and, in the middle, one kernel of each
kind in turn; graphs take turns, and the time over that of the graph without any is what the one kernel costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record
import torch
from timing import CudaTimer

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.triton import gemv, tiles, warp_split_k
from gemmtuned.kernels.triton.python_launch import launcher, new_workspace

LAUNCHES = 600
ROUNDS = 15


def ours(module: Any, m: int, n: int, k: int, config: dict[str, int]) -> Callable[[], None]:
    problem = Problem(m=m, n=n, k=k, dtype="bf16", math_mode="reduced")
    record = module.launch_record(config, problem)
    launch = launcher(module.KERNEL, record)
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    y, space = torch.empty(m, n, device="cuda", dtype=torch.bfloat16), new_workspace(record, "cuda")
    return lambda: launch(x, w, None, y, space)


def library(m: int, n: int, k: int) -> Callable[[], None]:
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    return lambda: (torch.nn.functional.linear(x, w), None)[1]


def kinds() -> dict[str, Callable[[], None]]:
    """What goes into the middle, by name; shared memory grows with stages."""
    found: dict[str, Callable[[], None]] = {
        "library M=1": library(1, 1024, 1024),
        "library M=8": library(8, 1024, 1024),
        "library fp32": lambda: None,
    }
    a, b = (torch.randn(64, 64, device="cuda") for _ in range(2))
    found["library fp32"] = lambda: (torch.mm(a, b), None)[1]
    found["gemv"] = ours(gemv, 1, 1024, 1024, {"rows": 2, "block_k": 1024, "split": 1, "warps": 4, "unroll": 1})
    for stages in (2, 4, 6, 8, 10):
        config = {"rows": 16, "tokens": 8, "block_k": 128, "split": 1, "warps": 4, "stages": stages}
        shared = (stages - 1) * 4 * (16 + 8) * 128 * 2 >> 10
        found[f"warp_split_k, {shared} KiB shared"] = ours(warp_split_k, 8, 1024, 4096, config)
    for stages in (3, 4):
        config = {"rows": 64, "tokens": 16, "block_k": 64, "split": 1, "group": 1, "swap": 1, "warps": 4}
        found[f"tiles, {stages} stages, wgmma"] = ours(tiles, 16, 1024, 1024, {**config, "stages": stages})
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    print(cuda_device(0), flush=True)
    h = torch.zeros(1024, device="cuda", dtype=torch.bfloat16)
    timer = CudaTimer()
    rows = []
    for name, middle in {"none": lambda: None, **kinds()}.items():
        for count in (1, 30) if name != "none" else (0,):
            every = LAUNCHES // (count + 1)

            def call(i: int, middle: Callable[[], None] = middle, every: int = every) -> None:
                h.add_(1.0)
                if i and i % every == 0:
                    middle()

            try:
                middle()  # its module loads outside of the capture
                rows.append((name, count, timer.prepare(call, LAUNCHES)))
            except (GemmtunedError, RuntimeError) as err:
                print(f"{name}: {err}", flush=True)
    times = timer.measure([graph for _, _, graph in rows], ROUNDS + 2)
    medians = [statistics.median(series[2:]) for series in times]
    result = []
    for (name, count, _), us, series in zip(rows, medians, times, strict=True):
        spread_us = max(series[2:]) - min(series[2:])
        line = {
            "kind": name, "kernels": count, "us": round(us, 1), "over_none_us": round(us - medians[0], 1),
            "a_launch_ns": round(1e3 * (us - medians[0]) / LAUNCHES), "spread_us": round(spread_us, 1),
        }  # fmt: skip
        result.append(line)
        print(json.dumps(line), flush=True)
    print(
        "saved", record.save("graph_gaps", {"benchmark": "graph_gaps", "launches": LAUNCHES, "rows": result}, args.out)
    )


if __name__ == "__main__":
    main()
