"""Timing and searching on CUDA, without a device: graphs that are only lists of calls, in made-up time."""

from __future__ import annotations

import pytest
import torch
from listed_graphs import ListedGraphs

from gemmtuned.configs.errors import CandidateFailed
from gemmtuned.daemon.child.checks import Watch
from gemmtuned.daemon.child.measure import Arm
from gemmtuned.daemon.child.measure_cuda import CHECK_EVERY, LONG_ENOUGH_US, MIN_LAUNCHES, MOST_GRAPHS, GraphClock


def arm(name: str = "a", copies: int = 5, value: float = 1.0, dtype: torch.dtype = torch.float32) -> Arm:
    return Arm(name, [lambda: torch.full((2, 3), value, dtype=dtype) for _ in range(copies)])


def test_a_graph_is_recorded_once_over_all_weight_copies_and_timed_by_launch() -> None:
    graphs = ListedGraphs()
    clock, one = GraphClock(graphs), arm(copies=5)

    assert [clock.us(one, (i,)) for i in range(3)] == [10.0] * 3
    assert graphs.recorded == [5, 35] and graphs.recorded[1] >= MIN_LAUNCHES  # the first tells how long a call is


def test_many_copies_are_launched_once_each() -> None:
    graphs = ListedGraphs()

    GraphClock(graphs).us(arm(copies=40), (0,))

    assert graphs.recorded == [40]


def test_long_calls_are_launched_once_for_each_copy() -> None:
    graphs = ListedGraphs(lambda last: LONG_ENOUGH_US / 4)

    assert GraphClock(graphs).us(arm(copies=5), (0,)) == LONG_ENOUGH_US / 4
    assert graphs.recorded == [5]


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float32, 1), (torch.bfloat16, 0), (torch.int32, 1), (torch.int32, 0)]
)
def test_a_graph_that_computes_nothing_is_found_before_its_first_time_is_taken(dtype: torch.dtype, value: int) -> None:
    graphs = ListedGraphs(skips=True)

    with pytest.raises(CandidateFailed, match="another result inside a CUDA graph"):
        GraphClock(graphs).us(arm("fast and wrong", value=value, dtype=dtype), (0,))
    assert GraphClock(ListedGraphs()).us(arm("right", value=value, dtype=dtype), (0,)) == 10.0


def test_a_graph_that_goes_wrong_later_is_found_within_some_readings() -> None:
    graphs = ListedGraphs()
    clock, one = GraphClock(graphs), arm()
    clock.us(one, (0,))
    graphs.skips = True

    with pytest.raises(CandidateFailed, match="another result"):
        for _ in range(CHECK_EVERY):
            clock.us(one, (0,))


def test_a_graph_that_agrees_with_a_wrong_call_is_found_by_what_was_expected() -> None:
    clock, one = GraphClock(ListedGraphs()), arm(value=3.0)
    one.watch = Watch(torch.full((2, 3), 1.0), 0.01)

    with pytest.raises(CandidateFailed, match="while it was raced"):
        clock.us(one, (0,))


def test_a_graph_is_looked_at_once_more_when_that_is_asked_for() -> None:
    graphs = ListedGraphs()
    clock, one = GraphClock(graphs), arm()
    clock.us(one, (0,))
    clock.look(one)
    graphs.skips = True

    with pytest.raises(CandidateFailed, match="another result"):
        clock.look(one)


def test_no_more_graphs_are_kept_than_memory_is_meant_for() -> None:
    graphs = ListedGraphs()
    clock, arms = GraphClock(graphs), [arm(str(i), copies=MIN_LAUNCHES) for i in range(MOST_GRAPHS + 1)]
    for one in (*arms, arms[-1], arms[0]):
        clock.us(one, (0,))

    assert len(graphs.recorded) == MOST_GRAPHS + 2  # the first one again: it had to go


def test_host_time_is_that_of_calls_not_of_replays() -> None:
    graphs = ListedGraphs()

    assert GraphClock(graphs).host_us(arm(), blocks=3, calls=4) > 0
    assert graphs.replays == 0
