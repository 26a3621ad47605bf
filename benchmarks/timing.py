"""Device time of a function that launches kernels: captured into a CUDA graph, replayed between two events."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from gemmtuned.daemon.child.measure import last_level_cache_bytes


@dataclass(frozen=True)
class Recorded:
    """A graph and the function it was recorded from, which owns the memory that the graph's launches use.

    A graph keeps no tensor alive: without this, the workspace of one candidate was given to the next, whose counters
    then stood in the midst of partial sums, and a reduction that never takes place is fast.
    """

    graph: Any
    keeps: Callable[[int], object]

    def replay(self) -> None:
        self.graph.replay()


class CudaTimer:
    """Graphs on one side stream, each behind a read of what is in none of them, and a short sleep for the host.

    Else a graph that reads past the cache (evict-first) would find there what the one before it has left.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.others = torch.zeros(2 * last_level_cache_bytes(torch.device("cuda")) // 4, device="cuda")

    def prepare(self, f: Callable[[int], object], launches: int) -> Any:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            f(0)  # modules load outside the capture
            # not torch.cuda.graph(): it collects garbage at each entry, which takes longer than all we measure
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for i in range(launches):
                    f(i)
            finally:
                graph.capture_end()
        return Recorded(graph, f)

    def keep_busy(self, runs: list[Any], seconds: float) -> None:
        """Replay these in turn for so long."""
        until_s = time.monotonic() + seconds
        with torch.cuda.stream(self.stream):
            while time.monotonic() < until_s:
                for run in runs * 8:
                    run.replay()
                self.stream.synchronize()

    def measure(self, runs: list[Any], rounds: int) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in runs]
        order = list(range(len(runs)))
        with torch.cuda.stream(self.stream):
            for _ in range(rounds):
                random.shuffle(order)
                events = []
                for i in order:
                    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    self.others.amax()
                    torch.cuda._sleep(40_000)
                    start.record()
                    runs[i].replay()
                    end.record()
                    events.append((i, start, end))
                self.stream.synchronize()
                for i, start, end in events:
                    times[i].append(start.elapsed_time(end) * 1e3)
        return times


@triton.jit
def stream(w, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, UNROLL: tl.constexpr):
    """Read SIZE values once, add them up so that the reads are not dropped."""
    acc = tl.zeros((BLOCK,), tl.float32)
    begin = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    for step in tl.range(0, STEPS, loop_unroll_factor=UNROLL):
        at = begin + step * BLOCK + tl.arange(0, BLOCK)
        acc += tl.load(w + at, mask=at < SIZE, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(acc, 0))


def floor_launches(timer: CudaTimer, weights: Sequence[torch.Tensor], launches: int) -> list[Any]:
    """Kernels that only read the same weights, the best three: the least time a decode GEMM can take."""
    copies, size = len(weights), weights[0].numel()
    views = [weight.view(-1) for weight in weights]
    out = torch.empty(1 << 20, device=weights[0].device, dtype=torch.float32)
    found = []
    settings = [(block, warps, steps) for block in (2048, 4096, 8192) for warps in (4, 8) for steps in (1, 2, 4, 8)]
    for block, warps, steps in settings:
        grid = (-(-size // (block * steps)),)

        def call(i: int, grid: Any = grid, block: int = block, warps: int = warps, steps: int = steps) -> None:
            stream[grid](
                views[i % copies], out, SIZE=size, BLOCK=block, STEPS=steps, UNROLL=min(steps, 4), num_warps=warps
            )

        run = timer.prepare(call, launches)
        found.append((min(timer.measure([run], 3)[0]), run))
    found.sort(key=lambda item: item[0])
    return [run for _, run in found[:3]]
