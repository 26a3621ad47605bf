"""Graphs are captured anew when the server is idle and the table has what they miss; what fails leaves no graph."""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import vllm_stand_in as stand_in
from hooked import wait_for

import gemmtuned.graphs
from gemmtuned.hooks import activate, phase, stale, watch
from gemmtuned.hooks.engines import recapture

log = logging.getLogger("vllm.gemmtuned")


class Hooked:
    """As much of a Hook as is asked here. missing: launches that captured graphs have no kernel for."""

    def __init__(self, missing: int = 3, recapture: str = "idle") -> None:
        self.missing = missing
        self.settings = SimpleNamespace(recapture=recapture)
        self.native = self
        self.table = SimpleNamespace(generation=7)
        self.flusher = SimpleNamespace(between_phases=lambda change: change())

    def stale_launches(self) -> int:
        return self.missing


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hooked]:
    hook = Hooked()
    monkeypatch.setattr(activate, "_hook", hook)
    monkeypatch.setattr(recapture, "IDLE_S", 0.2)
    monkeypatch.setattr(recapture, "LOOK_S", 0.05)
    made = stand_in.modules()
    made["vllm.config"].CUDAGraphMode = SimpleNamespace(NONE="none")  # type: ignore[attr-defined]
    made["vllm.config"].set_current_vllm_config = contextlib.nullcontext  # type: ignore[attr-defined]
    made["vllm.v1.engine"].EngineCoreRequestType = SimpleNamespace(WAKEUP="wake")  # type: ignore[attr-defined]
    graphs = ModuleType("vllm.compilation.cuda_graph")
    graphs.CUDAGraphWrapper = SimpleNamespace(clear_all_graphs=lambda: cleared.append(True))  # type: ignore[attr-defined]
    for name, module in {**made, "vllm.compilation": ModuleType("vllm.compilation"), graphs.__name__: graphs}.items():
        monkeypatch.setitem(sys.modules, name, module)
    cleared.clear()
    yield hook
    watch._subscribers.clear()


cleared: list[bool] = []


def worker(**attributes: Any) -> Any:
    return SimpleNamespace(model_runner=stand_in.Runner(**attributes), vllm_config=None)


def test_a_worker_whose_graphs_miss_rows_captures_them_anew_and_says_what_it_cost(
    hooked: Hooked, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one = worker()
    seen = []
    one.model_runner.capture_model = lambda: seen.append(phase.current())
    assert recapture.recapture_vllm(one, None, log) > 0
    assert (seen, cleared) == (["capture"], [True])
    assert "captured anew for generation 7 took_s=" in caplog.text

    hooked.missing = 0
    assert recapture.recapture_vllm(one, None, log) == 0.0
    assert seen == ["capture"]


def test_the_second_runner_gives_its_graphs_back_by_its_manager(hooked: Hooked) -> None:
    one = worker()
    one.model_runner.cudagraph_manager = stand_in.Manager(one.model_runner)
    recapture.recapture_vllm(one, None, log)
    assert one.model_runner.did == ["release", "capture"]
    assert cleared == []


def test_a_capture_that_fails_leaves_the_engine_without_graphs_and_says_so(
    hooked: Hooked, caplog: pytest.LogCaptureFixture
) -> None:
    one = worker(fails=True)
    assert recapture.recapture_vllm(one, None, log) == 0.0
    assert one.model_runner.did == ["capture", "keys none"]
    assert "could not be captured anew, and none are used from now on: out of memory" in caplog.text


class Engine:
    """Its loop gets a WAKEUP, and calls what stands in its list when it is idle."""

    def __init__(self, data_parallel: int = 1) -> None:
        self.input_queue: queue.Queue[tuple[object, object]] = queue.Queue()
        self._idle_state_callbacks: list[Any] = []
        self.scheduler = self
        self.requests = True
        self.orders: list[str] = []
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=data_parallel))

    def has_requests(self) -> bool:
        return self.requests

    def collective_rpc(self, method: str) -> None:
        self.orders.append(f"{method} in {threading.current_thread().name}")

    def turn(self) -> object:
        woken = self.input_queue.get(timeout=5)
        while self._idle_state_callbacks:
            self._idle_state_callbacks.pop()(self)
        return woken


def test_the_order_comes_in_the_engines_own_loop_once_nothing_is_served(hooked: Hooked) -> None:
    engine = Engine()
    recapture.watch_vllm(engine, log)
    watch._tell_subscribers(2)
    time.sleep(0.5)
    assert engine.input_queue.empty()
    engine.requests = False
    assert engine.turn() == ("wake", None)
    assert engine.orders == [f"gemmtuned_recapture in {threading.current_thread().name}"]
    wait_for(lambda: not any(thread.name == "gemmtuned-reload" for thread in threading.enumerate()))


@pytest.mark.parametrize("why", ["off", "several engines", "another version"])
def test_without_a_doubt_or_not_at_all(hooked: Hooked, why: str) -> None:
    engine = Engine(data_parallel=2 if why == "several engines" else 1)
    if why == "off":
        hooked.settings.recapture = "off"
    if why == "another version":
        engine._idle_state_callbacks = None  # type: ignore[assignment]
    recapture.watch_vllm(engine, log)
    assert watch._subscribers == []


def call_all(generation: int) -> None:
    for subscriber in tuple(watch._subscribers):
        subscriber._call(generation)


def test_a_program_of_ones_own_is_called_for_tables_that_its_graphs_miss_alone(hooked: Hooked) -> None:
    told: list[int] = []
    off = gemmtuned.graphs.on_stale(told.append)
    assert gemmtuned.graphs.stale_launches() == stale.launches() == 3
    call_all(1)
    hooked.missing = 0
    call_all(2)
    hooked.missing = 5
    call_all(3)
    off()
    call_all(4)
    assert told == [3, 5]
    with pytest.raises(TypeError, match="takes a function"):
        gemmtuned.graphs.on_stale(None)  # type: ignore[arg-type]


def test_without_the_hook_nothing_is_stale() -> None:
    assert gemmtuned.graphs.stale_launches() == 0
