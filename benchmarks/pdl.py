# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"
"""Does programmatic dependent launch pay for decode kernels, back to back and between other kernels?

    python benchmarks/pdl.py --out FOLDER

Kernels as we publish them, and the same that begin with griddepcontrol.wait (nothing is read before the kernel in front
has ended and its writes are visible, so the result cannot differ), launched with the attribute; `early` also lets the
next one start as soon as all of its own programs run.  `chain`: launches of one kernel after another with rotated
weights.  `model`: an element-wise torch kernel that makes each launch's X lies between, as in a decode step; its own
time is measured in the same rounds and taken off.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import record
import torch
import triton
import triton.language as tl
from timing import CudaTimer
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gemmtuned.configs.problem import Problem
from gemmtuned.daemon.measure import Bench
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.triton.gemv import gemv
from gemmtuned.kernels.triton.python_launch import new_workspace
from gemmtuned.kernels.triton.shortlist import MODULES, shortlist
from gemmtuned.kernels.triton.warp_split_k import warp_split_k

SHAPES = ((1024, 1024), (3072, 1024), (576, 7168), (4096, 4096), (14336, 4096))
ROUNDS = 15
LAUNCHES = 24
Launch = Callable[[int], object]


@triton.jit
def gemv_late(
    x, w, bias, y, partials, counters, ldw, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, UNROLL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    gdc_wait()
    if EARLY:
        gdc_launch_dependents()
    gemv(x, w, bias, y, partials, counters, ldw, N, K, BLOCK_N, BLOCK_K, SPLIT, UNROLL)


@triton.jit
def warp_split_k_late(
    x, w, bias, y, partials, counters, m, ldx, ldw, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, WARPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    gdc_wait()
    if EARLY:
        gdc_launch_dependents()
    warp_split_k(x, w, bias, y, partials, counters, m, ldx, ldw, N, K, BLOCK_N, BLOCK_M, BLOCK_K, SPLIT, WARPS)


LATE = {"gemv": gemv_late, "warp_split_k": warp_split_k_late}


def launches(problem: Problem, weights: list[torch.Tensor], x: torch.Tensor) -> dict[str, Launch]:
    """Functions of a launch's number, by arm."""
    m, n, k = problem.m, problem.n, problem.k
    name, config = next((n, c) for n, c in shortlist(m, n, k, 132, arch="sm_90") if n in LATE)
    made = MODULES[name].launch_record(config, problem)
    space = new_workspace(made, "cuda")
    ys = [torch.empty(m, n, device="cuda", dtype=torch.bfloat16) for _ in weights]
    values: dict[str, Any] = {"x": x, "bias": None, "m": m, "ldx": x.stride(0), "partials": None, "counters": None}
    if space is not None:
        values["counters"] = space[: made.counters_bytes].view(torch.int32)
        values["partials"] = space[made.partials_offset :].view(torch.float32)
    found: dict[str, Launch] = {"torch": lambda i: torch.nn.functional.linear(x, weights[i % len(weights)])}
    for arm, kernel, more in (
        ("plain", MODULES[name].KERNEL, {}),
        ("late", LATE[name], {"EARLY": False, "launch_pdl": True}),
        ("early", LATE[name], {"EARLY": True, "launch_pdl": True}),
    ):

        def call(i: int, kernel: Any = kernel, more: dict[str, Any] = more) -> None:
            w = weights[i % len(weights)]
            known = {**values, "w": w, "ldw": w.stride(0), "y": ys[i % len(weights)], **made.constants}
            arguments = {name: known[name] for name in kernel.arg_names if name != "EARLY"}
            kernel[made.grid_size(m)](**arguments, **more, num_warps=made.num_warps, num_stages=made.num_stages)

        found[arm] = call
    return found


@torch.inference_mode()
def main() -> None:
    args = record.arguments(__doc__).parse_args()
    print(cuda_device(0), flush=True)
    timer = CudaTimer()
    rows = []
    for m in (1, 8):
        for n, k in SHAPES:
            problem = Problem(m=m, n=n, k=k, dtype="bf16", math_mode="reduced")
            weights = [b.t() for b in Bench(problem, torch.device("cuda")).weights]
            x, other = (torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            arms = launches(problem, weights, x)
            count = len(weights) * -(-LAUNCHES // len(weights))

            def between(i: int, x: torch.Tensor = x, other: torch.Tensor = other) -> None:
                torch.mul(other, 0.5, out=x)

            def both(i: int, call: Launch, first: Launch = between) -> None:
                first(i)
                call(i)

            runs = {("between", ""): timer.prepare(between, count)}
            for arm, call in arms.items():
                runs["chain", arm] = timer.prepare(call, count)
                runs["model", arm] = timer.prepare(partial(both, call=call), count)
            times = timer.measure(list(runs.values()), ROUNDS + 2)
            us = {key: statistics.median(series[2:]) / count for key, series in zip(runs, times, strict=True)}
            row = {"m": m, "n": n, "k": k, "between_us": round(us["between", ""], 3)}
            for arm in arms:
                row[f"chain_{arm}_us"] = round(us["chain", arm], 3)
                row[f"model_{arm}_us"] = round(us["model", arm] - us["between", ""], 3)
            rows.append(row)
            print(json.dumps(row), flush=True)
    print("saved", record.save("pdl", {"benchmark": "pdl", "rows": rows}, args.out))


if __name__ == "__main__":
    main()
