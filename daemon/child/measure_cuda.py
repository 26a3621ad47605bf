"""CHILD side: device times on CUDA, through the same races as on a CPU (measure.py).

An arm is recorded once into a CUDA graph, one launch on every weight copy in turn, so that every launch reads its
weight from memory and the host's time is not in the result.  A reading is one replay between two events, queued behind
a read that fills the cache with what no graph reads, and a short sleep of the device, so that the host is never waited
for.

A graph keeps no memory alive, so the arm, and with it kernels and workspaces, is kept as long as its graph.  Readings
of a graph that does not give the right result are worthless (a reduction that never takes place is fast), so
the last output of the graph is compared with that of a plain call, and with what the arm's watch expects, before the
first reading, now and then after, and once when all races are over (`look`).

Both arms of a pair run at the same clock.  A race in which the device was slowed down (heat, a power brake) says
little about the device as it is used, so the clock and the reasons go into the verdict: see search.py.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.daemon.child.measure import Arm, last_level_cache_bytes
from gemmtuned.daemon.device.nvml_child import condition_of

MIN_LAUNCHES: Final = 32  # in a graph, so that its start and that of its first launch hardly count
LONG_ENOUGH_US: Final = 2000.0  # a graph that takes so long needs no more launches
CHECK_EVERY: Final = 16  # readings
MOST_GRAPHS: Final = 64  # that are kept; an older one is recorded again if needed
_QUEUED_S: Final = 0.02
_SLEEP_CYCLES: Final = 100_000  # 50 us: longer than the host takes to queue a graph
# Bits of NVML's clocks event reasons, without 0x4, a power cap: under load the card always runs at it
SLOWED: Final = {0x8: "hardware slowdown", 0x20: "thermal limit", 0x40: "overheated", 0x80: "power brake"}
_NEAR: Final = 2.0**-5  # share of the largest value: two orders of adding differ by less, a lost slice of K by far more


class Graphs(Protocol):
    """Records and replays graphs; tests use one without a device."""

    def record(self, calls: Sequence[Callable[[], object]]) -> tuple[Any, Tensor]:
        """(graph of these calls in order, the output of the last call)."""

    def replay_us(self, graph: Any) -> float:
        """Device time of one replay, awaited; before it the cache is filled with data that no graph reads."""

    def replay_for(self, graphs: Sequence[Any], seconds: float) -> None:
        """Replay these graphs in turn, back to back, for so long."""

    def synchronize(self) -> None:
        """Wait until the device is at rest."""

    def condition(self) -> tuple[int | None, int | None]:
        """As nvml_child.condition_of, for this device."""


class CudaGraphs:
    """Graphs on one side stream of the current device."""

    def __init__(self) -> None:
        self._stream = cast("Any", torch.cuda).Stream()
        self._uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        self._others = torch.zeros(2 * last_level_cache_bytes(torch.device("cuda")) // 4, device="cuda")

    def record(self, calls: Sequence[Callable[[], object]]) -> tuple[Any, Tensor]:
        """As Graphs.record."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            calls[0]()  # modules and the library's workspace for this stream are made outside the capture
            self._stream.synchronize()
            # not torch.cuda.graph(): it collects garbage and frees caches at each entry, slower than all we measure
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in calls:  # each output reuses the memory of the one before the last, as in a model
                    output = call()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph, cast("Tensor", output)

    def replay_us(self, graph: Any) -> float:
        """As Graphs.replay_us; the cache is filled with data that neither arm reads.

        Otherwise an arm that reads its weights past the cache (evict-first) would find there what the other arm has
        left: up to half of the copies, which are more than twice the cache.
        """
        cuda = cast("Any", torch.cuda)  # some of its functions have no types
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            self._others.amax()
            cuda._sleep(_SLEEP_CYCLES)
            begin.record()
            graph.replay()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def replay_for(self, graphs: Sequence[Any], seconds: float) -> None:
        """As Graphs.replay_for."""
        begin_s = now_s = time.monotonic()
        rounds = 1
        with torch.cuda.stream(self._stream):
            while now_s < begin_s + seconds:
                for graph in [*graphs] * rounds:
                    graph.replay()
                self._stream.synchronize()
                before_s, now_s = now_s, time.monotonic()
                # few replays are queued at a time, because others may want the device
                rounds = max(1, min(8, int(rounds * _QUEUED_S / max(now_s - before_s, 1e-6))))

    def synchronize(self) -> None:
        """As Graphs.synchronize."""
        torch.cuda.synchronize()

    def condition(self) -> tuple[int | None, int | None]:
        """As Graphs.condition."""
        return condition_of(self._uuid)


@dataclass(frozen=True, slots=True)
class Condition:
    """sm_mhz: the clock, None when not known.  slowed: why it is lower than the device can hold; mostly empty."""

    sm_mhz: int | None
    slowed: tuple[str, ...]


@cache
def cuda_graphs() -> CudaGraphs:
    """The only CudaGraphs of the process, since cuBLAS keeps a workspace of 32 MiB for every stream ever used."""
    return CudaGraphs()


@dataclass(slots=True)
class _Recorded:
    arm: Arm
    graph: Any
    launches: int
    last: Tensor
    readings: int = 0


class GraphClock:
    """A measure.Clock whose reading is one replay over all weight copies, even if only some are asked for."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._recorded: dict[int, _Recorded] = {}

    def us(self, arm: Arm, copies: Sequence[int]) -> float:
        """Microseconds per launch. Raises CandidateFailed when the graph's result differs from that of a call."""
        recorded = self._recorded.get(id(arm)) or self._record(arm)
        if recorded.readings % CHECK_EVERY == 0:
            self._check(recorded)
        recorded.readings += 1
        return self._graphs.replay_us(recorded.graph) / recorded.launches

    def forget(self, arm: Arm) -> None:
        """Free the arm's graph and its memory, 20 MiB and more for large outputs."""
        self._recorded.pop(id(arm), None)

    def look(self, arm: Arm) -> None:
        """Compare the arm's graph with a plain call now. Raises CandidateFailed as `us` does."""
        recorded = self._recorded.get(id(arm))
        if recorded is not None:
            self._check(recorded)

    def launches(self, arm: Arm) -> int:
        """How many launches one reading of this arm has; it must have been timed before."""
        recorded = self._recorded.get(id(arm))
        return recorded.launches if recorded else MIN_LAUNCHES

    def keep_busy(self, arms: Sequence[Arm], seconds: float) -> None:
        """Run these arms for so long, with hardly a pause, as under a program's load."""
        recorded = [self._recorded.get(id(arm)) or self._record(arm) for arm in arms]
        self._graphs.replay_for([one.graph for one in recorded], seconds)

    def condition(self) -> Condition:
        """The device's clock, and why it is slowed, now."""
        sm_mhz, reasons = self._graphs.condition()
        return Condition(sm_mhz, tuple(text for bit, text in SLOWED.items() if (reasons or 0) & bit))

    def host_us(self, arm: Arm, *, blocks: int = 15, calls: int = 16) -> float:
        """Median microseconds that a call takes on the host, while the device's queue is never full."""
        times = []
        for _ in range(blocks):
            self._graphs.synchronize()
            begin = time.perf_counter_ns()
            for i in range(calls):
                arm.calls[i % len(arm.calls)]()
            times.append((time.perf_counter_ns() - begin) / 1e3 / calls)
        self._graphs.synchronize()
        return statistics.median(times)

    def _record(self, arm: Arm) -> _Recorded:
        calls = list(arm.calls)
        graph, last = self._graphs.record(calls)
        long_enough = LONG_ENOUGH_US / max(self._graphs.replay_us(graph) / len(calls), 0.1)
        times = math.ceil(min(MIN_LAUNCHES, long_enough) / len(calls))
        if times > 1:
            calls *= times
            graph, last = self._graphs.record(calls)
        while len(self._recorded) >= MOST_GRAPHS:
            del self._recorded[next(iter(self._recorded))]
        self._recorded[id(arm)] = found = _Recorded(arm, graph, len(calls), last)
        return found

    def _check(self, recorded: _Recorded) -> None:
        want = recorded.arm.calls[-1]()
        assert isinstance(want, Tensor)
        if want.is_floating_point():
            recorded.last.fill_(math.nan)
        else:
            torch.bitwise_not(want, out=recorded.last)
        self._graphs.synchronize()
        self._graphs.replay_us(recorded.graph)
        apart = (recorded.last.double() - want.double()).abs().max()
        if not bool(apart <= _NEAR * want.double().abs().max()):
            raise CandidateFailed(
                f"{recorded.arm.name}: gives another result inside a CUDA graph, off by {float(apart):.1e}"
            )
        recorded.arm.look(recorded.last)
