"""Does one kernel of some kind make the gaps between all kernels of a CUDA graph longer?

    python benchmarks/graph_gaps.py --out FOLDER

end_to_end.py saw decode steps whose gaps shrank by 0.2 us a launch, over the whole graph, once no kernel of torch's
library was left in it.  Here a graph holds LAUNCHES small element-wise kernels and, in the middle, one kernel of each
kind in turn; graphs take turns, and the time over that of the graph without any is what the one kernel costs.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
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
Call = Callable[[], object]


def ours(module: Any, m: int, n: int, k: int, config: dict[str, int]) -> Call:
    problem = Problem(m=m, n=n, k=k, dtype="bf16", math_mode="reduced")
    record = module.launch_record(config, problem)
    launch = launcher(module.KERNEL, record)
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    y, space = torch.empty(m, n, device="cuda", dtype=torch.bfloat16), new_workspace(record, "cuda")
    return lambda: launch(x, w, None, y, space)


def library(m: int, n: int, k: int) -> Call:
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    return lambda: torch.nn.functional.linear(x, w)


def kinds() -> Iterator[tuple[str, Callable[[], Call]]]:
    """What goes into the middle: its name, and what makes it; shared memory grows with stages."""
    yield "library M=1", partial(library, 1, 1024, 1024)
    yield "library M=8", partial(library, 8, 1024, 1024)
    a, b = (torch.randn(64, 64, device="cuda") for _ in range(2))
    yield "library fp32", lambda: lambda: torch.mm(a, b)
    one_row = {"rows": 2, "block_k": 1024, "split": 1, "warps": 4, "unroll": 1}
    yield "gemv", partial(ours, gemv, 1, 1024, 1024, one_row)
    for stages in (2, 4, 6, 8, 10):
        config = {"rows": 16, "tokens": 8, "block_k": 128, "split": 1, "warps": 4, "stages": stages}
        shared = (stages - 1) * 4 * (16 + 8) * 128 * 2 >> 10
        yield f"warp_split_k, {shared} KiB shared", partial(ours, warp_split_k, 8, 1024, 4096, config)
    for stages in (3, 4):
        config = {"rows": 64, "tokens": 16, "block_k": 64, "split": 1, "group": 1, "swap": 1, "warps": 4}
        yield f"tiles, {stages} stages, wgmma", partial(ours, tiles, 16, 1024, 1024, {**config, "stages": stages})


@torch.inference_mode()
def main() -> None:
    args = record.arguments(__doc__).parse_args()
    print(cuda_device(0), flush=True)
    h = torch.zeros(1024, device="cuda", dtype=torch.bfloat16)
    timer = CudaTimer()
    rows = [("none", 0, timer.prepare(lambda i: h.add_(1.0), LAUNCHES))]
    for name, make in kinds():
        try:
            middle = make()
            middle()  # its module loads outside of the capture
        except (GemmtunedError, RuntimeError) as err:
            print(f"{name}: {err}", flush=True)
            continue
        for count in (1, 30):
            every = LAUNCHES // (count + 1)

            def call(i: int, middle: Call = middle, every: int = every) -> None:
                h.add_(1.0)
                if i and i % every == 0:
                    middle()

            rows.append((name, count, timer.prepare(call, LAUNCHES)))
    times = [series[2:] for series in timer.measure([graph for _, _, graph in rows], ROUNDS + 2)]
    none_us = statistics.median(times[0])
    result = []
    for (name, count, _), series in zip(rows, times, strict=True):
        us = statistics.median(series)
        spread_us = max(series) - min(series)
        line = {
            "kind": name, "kernels": count, "us": round(us, 1), "over_none_us": round(us - none_us, 1),
            "a_launch_ns": round(1e3 * (us - none_us) / LAUNCHES), "spread_us": round(spread_us, 1),
        }  # fmt: skip
        result.append(line)
        print(json.dumps(line), flush=True)
    print(
        "saved", record.save("graph_gaps", {"benchmark": "graph_gaps", "launches": LAUNCHES, "rows": result}, args.out)
    )


if __name__ == "__main__":
    main()
