"""Where the time of a decode graph goes, stock and routed: kernel times by name, from torch's profiler, in one process.

    python benchmarks/gpu_profile.py --out FOLDER [--batch 8] [--size 0.6B]

Publishes the search's first candidate for each dense problem of the model, captures the same step without and with
the hook's routes, replays both in turn.  Written to find out why faster kernels made a slower step.
"""

# ruff: noqa: E402  gpu_hook sets the home before gemmtuned is imported
from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import gpu_hook
import record
import torch

import gemmtuned
from gemmtuned.configs.manifest import make_folder, write_tables
from gemmtuned.configs.settings import Settings
from gemmtuned.hooks.activate import current
from gemmtuned.hooks.native.build import build as build_native
from gemmtuned.kernels.backends import environment
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.triton.shortlist import MODULES, shortlist

example = SourceFileLoader("example_decode", str(HERE.parent / "docs/examples/decode.py")).load_module()


def by_kernel(graph: torch.cuda.CUDAGraph, replays: int = 5) -> dict[str, tuple[float, float]]:
    """(launches, us) a replay by kernel name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    out: dict[str, tuple[float, float]] = {}
    for event in seen.key_averages():
        out[event.key[:90]] = (event.count / replays, event.self_device_time_total / replays)
    return out


def step_us(graph: torch.cuda.CUDAGraph, count: int = 10) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e6


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    parser.add_argument("--size", default="0.6B")
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    build_native(Settings.from_env().cache)
    gemmtuned.enable()
    hook = current()
    model = example.build(args.size, 0, "cuda", torch.bfloat16)
    stock = example.Decoder(model, args.batch, 600, True)
    device = cuda_device(0)
    stamp = environment(device).stamps["triton"]
    folder = Settings.from_env().config_dir
    make_folder(folder)
    problems = {s.problem for s in hook.native.drain() if s.problem.dtype == "bf16" and s.problem.family == "dense"}
    solutions = []
    for problem in sorted(problems, key=str):
        kernel, config = shortlist(problem.m, problem.n, problem.k, device.units, arch=device.arch)[0]
        found = gpu_hook.solution(problem, MODULES[kernel], 1, stamp, device, folder)
        solutions += [found, replace(found, mode="graph")]
        print(problem, kernel, config)
    write_tables(folder, {f"dense-{device.key}": solutions}, generation=1)
    while gemmtuned.generation() < 1:
        time.sleep(0.05)
    routed = example.Decoder(model, args.batch, 600, True)
    decoders = {"stock": stock, "routed": routed}
    arms = {"stock": stock.graph, "routed": routed.graph}
    times: dict[str, list[float]] = {a: [] for a in arms}
    for _ in range(15):
        for arm, graph in arms.items():
            decoders[arm].position.zero_()
            times[arm].append(step_us(graph))
    result: dict[str, Any] = {"benchmark": "gpu_profile", "batch": args.batch, "size": args.size, "step_us": times}
    for arm, graph in arms.items():
        decoders[arm].position.zero_()
        kernels = by_kernel(graph)
        result[arm] = kernels
        total = sum(us for _, us in kernels.values())
        count = sum(n for n, _ in kernels.values())
        print(f"\n{arm}: step {statistics.median(times[arm]):.0f} us, {count:.0f} kernels, {total:.0f} us in kernels")
        for name, (n, us) in sorted(kernels.items(), key=lambda item: -item[1][1])[:14]:
            print(f"  {us:8.1f} us {n:6.0f} x {us / max(n, 1):6.2f}  {name}")
    outcomes: dict[str, int] = defaultdict(int)
    for s in hook.native.drain():
        outcomes[f"{s.outcome} graph={s.graph}"] += s.calls
    print(dict(outcomes), gemmtuned.status()["refused"])
    print("saved", record.save(f"gpu_profile-b{args.batch}", result, args.out))


if __name__ == "__main__":
    main()
