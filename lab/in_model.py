"""Do kernels keep their gain inside a model's decode step? One GPU, bf16, one CUDA graph a step.

    python -m lab in_model --out FOLDER [--batch 8] [--size 0.6B] [--seconds 200]

For each dense problem of the step and each of some candidates: its race against torch alone, as the daemon runs it, and
the step captured with this candidate routed and everything else left to torch, replayed in turn with the stock step.
Gains of both are in us a launch.  Then all winners of the race at once, and all winners inside the step.
"""

# ruff: noqa: E402  gpu_hook sets the home before gemmtuned is imported
from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))
import gpu_hook
import record
import torch

import gemmtuned
from gemmtuned.configs.manifest import make_folder, write_tables
from gemmtuned.configs.problem import Problem
from gemmtuned.configs.settings import Settings
from gemmtuned.configs.solution import Candidate
from gemmtuned.daemon.child.clocks import clock_for
from gemmtuned.daemon.child.compile_ahead import Compilers
from gemmtuned.daemon.child.measure import Bench, race
from gemmtuned.hooks.activate import current
from gemmtuned.hooks.native.build import build as build_native
from gemmtuned.kernels import catalog
from gemmtuned.kernels.backends import BACKENDS, environment
from gemmtuned.kernels.device import cuda_device
from gemmtuned.kernels.torch_flags import as_called

example = SourceFileLoader("example_decode", str(HERE.parent / "docs/examples/decode.py")).load_module()
Config = tuple[str, dict[str, int]]


class Step:
    """The decode step under whatever table is published."""

    def __init__(self, size: str, batch: int, length: int) -> None:
        self.device = cuda_device(0)
        self.stamps = environment(self.device).stamps
        self.folder = Settings.from_env().config_dir
        make_folder(self.folder)
        self.model = example.build(size, 0, "cuda", torch.bfloat16)
        self.batch, self.length = batch, length
        self.generation = 0
        self.stock = self.capture()

    def capture(self) -> Any:
        return example.Decoder(self.model, self.batch, self.length, True)

    def routed(self, chosen: dict[Problem, Config]) -> Any:
        """The step captured with these candidates published."""
        self.generation += 1
        solutions = []
        for problem, (kernel, config) in chosen.items():
            found = gpu_hook.solution(
                problem,
                catalog.kernels("triton")[kernel],
                self.generation,
                self.stamps[f"triton.{kernel}"],
                self.device,
                self.folder,
                config,
            )
            solutions += [found, replace(found, mode="graph")]
        write_tables(self.folder, {f"dense-{self.device.key}": solutions}, generation=self.generation)
        start = time.perf_counter()
        while gemmtuned.generation() < self.generation:
            time.sleep(0.01)
            assert time.perf_counter() - start < 10, gemmtuned.status()
        return self.capture()

    def compare(self, routed: Any, rounds: int = 9) -> tuple[float, float]:
        """(stock us, routed us) of a step, medians of the arms in turn."""
        times: dict[int, list[float]] = {0: [], 1: []}
        for turn in range(rounds):
            for arm in (0, 1) if turn % 2 else (1, 0):
                decoder = (self.stock, routed)[arm]
                decoder.position.zero_()
                decoder.cache.reset()  # it counts steps itself
                times[arm].append(step_us(decoder.graph))
        return statistics.median(times[0]), statistics.median(times[1])


def step_us(graph: torch.cuda.CUDAGraph, count: int = 6) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def kernels_of(decoder: Any) -> dict[str, tuple[int, float]]:
    """(launches, us) of one replay by kernel name, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    decoder.cache.reset()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        decoder.graph.replay()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            launches, us = found.get(event.name[:60], (0, 0.0))
            found[event.name[:60]] = (launches + 1, round(us + event.device_time_total, 1))
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


@torch.inference_mode()
def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--size", default="0.6B")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=136)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--candidates", type=int, default=12)
    args = parser.parse_args()
    began = time.perf_counter()
    build_native(Settings.from_env().cache)
    gemmtuned.enable()
    hook = current()
    step = Step(args.size, args.batch, args.length)
    calls: Counter[Problem] = Counter()
    for s in hook.native.drain():
        if s.problem.dtype == "bf16" and s.problem.family == "dense":
            calls[s.problem] += s.calls
    for problem in calls:  # two warm-ups and the capture
        calls[problem] //= 3
    print({str(p): n for p, n in calls.items()}, flush=True)
    device = step.device
    coin = random.Random(0)
    tried: dict[Problem, list[Config]] = {}
    for problem in sorted(calls, key=str):
        dealt = [json.loads(c.config) for c in catalog.candidates(problem, device)["triton"]]
        every = [(config.pop("kernel"), config) for config in dealt]
        rest = every[args.candidates * 2 // 3 :]
        tried[problem] = every[: args.candidates * 2 // 3] + coin.sample(rest, min(len(rest), args.candidates // 3))
    compilers = Compilers(max(1, (os.cpu_count() or 2) - 2))

    def compiled(problem: Problem) -> Any:
        return compilers.run([candidate(c) for c in tried[problem]], problem, device)

    for problem in tried:  # all processes are shared: one problem after another
        failed = compiled(problem)
        tried[problem] = [c for c in tried[problem] if candidate(c) not in failed]
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    best: dict[str, dict[Problem, tuple[float, Config]]] = {"alone": {}, "in step": {}}
    share = (args.seconds - (time.perf_counter() - began) - 20) / len(tried)
    for problem, configs in tried.items():
        until = time.perf_counter() + share
        with as_called(problem):
            bench = Bench(problem, torch.device("cuda"))
            clock = clock_for(torch.device("cuda"))
            default = BACKENDS["torch"].prepare(Candidate("torch"), problem)
            baseline = bench.arm("torch", default, problem)
            for config in configs:
                if time.perf_counter() > until:
                    break
                kernel = BACKENDS["triton"].prepare(candidate(config), problem)
                arm = bench.arm(str(candidate(config)), kernel, problem)
                for one in (baseline, arm):
                    clock.us(one, (0,))
                alone = race(baseline, arm, clock=clock, pairs=9, coin=coin)
                stock_us, routed_us = step.compare(step.routed({problem: config}))
                inside = (stock_us - routed_us) / calls[problem]
                row = {
                    "problem": str(problem), "kernel": config[0], **config[1],
                    "torch_us": round(alone.baseline_us, 2), "us": round(alone.us, 2),
                    "gain_alone_us": round(alone.baseline_us - alone.us, 2), "gain_in_step_us": round(inside, 2),
                }  # fmt: skip
                rows.append(row)
                print(row, flush=True)
                for name, gain in (("alone", alone.baseline_us - alone.us), ("in step", inside)):
                    if problem not in best[name] or gain > best[name][problem][0]:
                        best[name][problem] = (gain, config)
            del bench, clock, baseline, arm
            torch.cuda.empty_cache()
    result: dict[str, Any] = {
        "benchmark": "in_model", "size": args.size, "batch": args.batch,
        "calls": {str(p): n for p, n in calls.items()}, "rows": rows,
    }  # fmt: skip
    for name, winners in best.items():
        chosen = {p: config for p, (gain, config) in winners.items() if gain > 0}
        expected = sum(calls[p] * gain for p, (gain, _) in winners.items() if gain > 0)
        routed = step.routed(chosen)
        stock_us, routed_us = step.compare(routed, 15)
        result[f"winners {name}"] = {
            "chosen": {str(p): c for p, c in chosen.items()},
            "stock_us": stock_us, "routed_us": routed_us, "expected_gain_us": expected,
            "kernels": kernels_of(routed),
        }  # fmt: skip
        print(f"winners {name}: step {stock_us:.0f} -> {routed_us:.0f} us, expected gain {expected:.0f} us", flush=True)
    result["stock kernels"] = kernels_of(step.stock)
    result["host cores"] = os.cpu_count()
    print(gemmtuned.status()["refused"])
    print("saved", record.save(f"in_model-b{args.batch}", result, args.out))


def candidate(config: Config) -> Candidate:
    return Candidate.of("triton", kernel=config[0], **config[1])


if __name__ == "__main__":
    main()
