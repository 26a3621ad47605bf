# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"
"""Does one kernel of some kind make the gaps between all kernels of a CUDA graph longer?

    python -m lab graph_gaps --out FOLDER

end_to_end.py saw decode steps whose gaps shrank by 0.2 us a launch, over the whole graph, once no kernel of torch's
library was left in it.  Here a graph holds LAUNCHES small element-wise kernels and, among them, 1 or 30 kernels of each
kind in turn; graphs take turns.  What such a kernel takes by itself is known from 30 of them less 1: what one of them
costs beyond that is the graph's.  `names` is what torch's profiler saw.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import record
import torch
import triton
import triton.language as tl
from timing import CudaTimer
from torch.profiler import ProfilerActivity, profile
from triton.language.extra.cuda import gdc_wait

from gemmtuned.configs.errors import GemmtunedError
from gemmtuned.configs.problem import Problem
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.triton import gemv, tiles, warp_split_k
from gemmtuned.kernels.triton.gemv import gemv as gemv_kernel
from gemmtuned.kernels.triton.python_launch import launcher, new_workspace

LAUNCHES = 600
ROUNDS = 15
Call = Callable[[], object]


def ours(module: Any, m: int, n: int, k: int, config: dict[str, int]) -> Call:
    problem = Problem(m=m, n=n, k=k, dtype="bf16", math_mode="reduced")
    record = module.launch_record(config, problem)
    launch = launcher(module.KERNEL.function, record)
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    y, space = torch.empty(m, n, device="cuda", dtype=torch.bfloat16), new_workspace(record, "cuda")
    return lambda: launch({"x": x, "w": w, "bias": None, "y": y}, space)


@triton.jit
def gemv_late(
    x, w, bias, y, partials, counters, ldw, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """As published, but it may be launched before the kernel in front has ended."""
    gdc_wait()
    gemv_kernel(x, w, bias, y, partials, counters, ldw, N, K, BLOCK_N, BLOCK_K, SPLIT, UNROLL)


def programmatic(n: int, k: int, **options: bool) -> Call:
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (1, n))
    y = torch.empty(1, n, device="cuda", dtype=torch.bfloat16)
    return lambda: gemv_late[(n // 2,)](x, w, None, y, None, None, k, n, k, 2, 1024, 1, 1, num_warps=4, **options)


def library(m: int, n: int, k: int) -> Call:
    x, w = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    return lambda: torch.nn.functional.linear(x, w)


def kinds() -> Iterator[tuple[str, Callable[[], Call]]]:
    """What goes into the middle: its name, and what makes it; shared memory grows with stages."""
    for m, n, k in ((1, 1024, 1024), (8, 1024, 1024), (8, 4096, 4096), (8, 6144, 4096), (1, 151936, 1024)):
        yield f"library {m}x{n}x{k}", partial(library, m, n, k)
    yield "gemv, programmatic launch", partial(programmatic, 1024, 1024, launch_pdl=True)
    yield "gemv, the same launched as ever", partial(programmatic, 1024, 1024)
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
    timer, names = CudaTimer(), dict[str, list[str]]()
    rows = [("none", 0, timer.prepare(lambda i: h.add_(1.0), LAUNCHES))]
    for name, make in kinds():
        try:
            middle = make()
            middle()  # its module loads outside of the capture
        except (GemmtunedError, RuntimeError) as err:
            print(f"{name}: {err}", flush=True)
            continue
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            middle()
            torch.cuda.synchronize()
        names[name] = [event.name[:60] for event in seen.events() or ()]
        for count in (1, 30):
            at = {round(LAUNCHES * (i + 1) / (count + 1)) for i in range(count)}

            def call(i: int, middle: Call = middle, at: set[int] = at) -> None:
                h.add_(1.0)
                if i in at:
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
            "names": names.get(name, []),
        }  # fmt: skip
        result.append(line)
        print(json.dumps(line), flush=True)
    print(
        "saved", record.save("graph_gaps", {"benchmark": "graph_gaps", "launches": LAUNCHES, "rows": result}, args.out)
    )


if __name__ == "__main__":
    main()
