"""Replays of CUDA graphs are counted by the id of their capture, and torch's methods come back when the hook goes."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from gemmtuned.hooks.graphs import GraphCounts


class FakeNative:
    """The three calls of `Native` that GraphCounts makes; a real one needs a GPU to capture on (tests/gpu)."""

    def __init__(self) -> None:
        self.capture = 0
        self.said: list[tuple[str, int, int]] = []

    def capture_begun(self, device: int) -> int:
        assert device == 3
        return self.capture

    def graph_replayed(self, capture: int, times: int) -> None:
        self.said.append(("replayed", capture, times))

    def graph_gone(self, capture: int) -> None:
        self.said.append(("gone", capture, 0))


def make() -> tuple[Any, FakeNative, GraphCounts]:
    class Graph:
        """As torch.cuda.CUDAGraph: begin, replay."""

        def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
            self.begun = (pool, capture_error_mode)

        def replay(self) -> None:
            self.replays = getattr(self, "replays", 0) + 1

    native: Any = FakeNative()
    return Graph, native, GraphCounts(native, Graph, lambda: 3)


@pytest.mark.long
def test_each_replay_adds_one_to_its_capture_and_the_end_of_the_graph_is_told() -> None:
    Graph, native, counts = make()
    counts.install()
    counts.install()
    graphs = []
    for capture in (7, 8):
        native.capture = capture
        graph = Graph()
        graph.capture_begin("pool", capture_error_mode="relaxed")
        assert graph.begun == ("pool", "relaxed")
        graphs.append(graph)
    for graph in (graphs[0], graphs[1], graphs[0]):
        graph.replay()
    counts.replayed(graphs[1], 40)

    assert native.said == [("replayed", 7, 1), ("replayed", 8, 1), ("replayed", 7, 1), ("replayed", 8, 40)]
    assert graphs[0].replays == 2
    native.said.clear()
    del graph, graphs
    gc.collect()
    assert sorted(native.said) == [("gone", 7, 0), ("gone", 8, 0)]


def test_a_graph_that_the_hook_did_not_see_captured_is_replayed_and_not_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Graph, native, counts = make()
    early = Graph()
    early.capture_begin()
    counts.install()
    native.capture = 0
    unknown = Graph()
    unknown.capture_begin()
    for graph in (early, unknown):
        graph.replay()
        counts.replayed(graph, 2)

    assert native.said == [] and early.replays == unknown.replays == 1
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == ["replays"]  # once, not for each


def test_removing_gives_torchs_methods_back_and_leaves_somebody_elses_wrapper_alone() -> None:
    Graph, native, counts = make()
    stock = (Graph.capture_begin, Graph.replay)
    counts.install()
    native.capture = 5
    graph = Graph()
    graph.capture_begin()
    counts.remove()

    assert (Graph.capture_begin, Graph.replay) == stock
    graph.replay()
    assert native.said == []
    counts.install()
    wrapped = Graph.replay
    Graph.replay = lambda self: wrapped(self)
    theirs = Graph.replay
    counts.remove()
    assert Graph.replay is theirs and Graph.capture_begin is stock[0]


def test_a_graph_that_is_captured_anew_counts_for_its_new_launches_alone() -> None:
    Graph, native, counts = make()
    counts.install()
    graph = Graph()
    for native.capture in (7, 8):
        graph.capture_begin()
        graph.replay()
    del graph
    gc.collect()

    assert native.said == [("replayed", 7, 1), ("gone", 7, 0), ("replayed", 8, 1), ("gone", 8, 0)]


def test_whatever_goes_wrong_in_counting_the_capture_goes_on() -> None:
    Graph, native, counts = make()
    counts.install()
    native.capture_begun = None
    graph = Graph()
    graph.capture_begin("pool")
    graph.replay()

    assert graph.begun == ("pool", "global") and graph.replays == 1 and native.said == []


def test_a_capture_waits_before_it_begins_and_goes_on_whatever_happens() -> None:
    order: list[str] = []

    class Graph:
        def capture_begin(self) -> None:
            order.append("begun")

        def replay(self) -> None: ...

    def before() -> None:
        order.append("waited")
        raise OSError("ours")

    stock = Graph.replay
    counts = GraphCounts(FakeNative(), Graph, lambda: 3, before=before, replays=False)  # type: ignore[arg-type]
    counts.install()
    Graph().capture_begin()

    assert order == ["waited", "begun"]
    assert Graph.replay is stock
    counts.remove()
    Graph().capture_begin()
    assert order == ["waited", "begun", "begun"]
