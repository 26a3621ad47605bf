"""Calls of a warm-up are counted apart from the traffic, exactly, and nothing that ranks problems has them."""

from __future__ import annotations

import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from counted_by_hand import Counted, stored
from hooked import LINEAR, Home

import gemmtuned
from gemmtuned.configs.sighting import Sighting
from gemmtuned.db import queries
from gemmtuned.db.phases import phases
from gemmtuned.db.store import Store
from gemmtuned.hooks import phase
from gemmtuned.hooks.compiled import AUTOTUNER, Compiled
from gemmtuned.hooks.native.records import _MOST_ASIDE, Record, Unread, pack
from gemmtuned.hooks.op_counts import OpCounts
from gemmtuned.reports.phases import phase_notes


class Activated:
    """What `phase` asks for the hook, around a flusher over counts made by hand."""

    def __init__(self, counted: Counted) -> None:
        self.flusher = counted.flusher

    def current(self) -> Activated:
        return self


@pytest.fixture
def active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted(tmp_path / "home")
    monkeypatch.setitem(sys.modules, "gemmtuned.hooks.activate", Activated(counted))
    return counted


def apart(counted: Counted) -> dict[str, int]:
    return {row["phase"]: row["calls"] for row in phases(counted.settings.db)}


def test_calls_before_in_and_after_a_phase_are_told_apart_without_a_flush_between(active: Counted) -> None:
    active.call(1)
    with gemmtuned.phase("warm-up"):
        active.call(10)
        with gemmtuned.phase("profile"):
            active.call(100)
        active.call(20)
    active.call(2)
    active.flusher.flush()

    assert stored(active) == 3
    assert apart(active) == {"profile": 100, "warm-up": 30}
    assert active.flusher.calls == 133


def test_a_flush_in_the_middle_changes_nothing(active: Counted) -> None:
    with gemmtuned.phase("warm-up"):
        active.call(10)
        active.flusher.flush()
        active.call(5)
        active.flusher.flush()
    active.call(2)
    active.flusher.flush()

    assert (stored(active), apart(active)) == (2, {"warm-up": 15})


def test_what_was_called_in_a_phase_alone_is_not_asked_for(active: Counted) -> None:
    gemmtuned.set_phase("warm-up")
    active.call(10, m=2048)
    gemmtuned.set_phase("")
    active.call(1, m=4)
    active.flusher.flush()

    assert [row["m"] for row in queries.untuned(active.settings.db)] == [4]
    assert [row["m"] for row in queries.coverage(active.settings.db, by="problem")] == [4]
    assert [row["phase"] for row in queries.ask(active.settings.db, "SELECT * FROM phases")] == ["warm-up"]
    (note,) = phase_notes(phases(active.settings.db), 86_400)
    assert note.startswith("10 calls of the last 24 h are left out")
    assert "warm-up 10" in note


def test_blocks_of_several_threads_may_end_in_any_order(active: Counted) -> None:
    first, second = gemmtuned.phase("first"), gemmtuned.phase("second")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert phase.current() == "second"
    second.__exit__(None, None, None)
    assert phase.current() == ""

    def enter() -> None:
        for _ in range(50):
            with gemmtuned.phase("other"):
                active.call(1)

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    active.flusher.flush()
    assert phase.current() == ""
    assert apart(active).get("other", 0) + stored(active) == 200


def test_a_phase_is_over_when_its_block_raises(active: Counted) -> None:
    with pytest.raises(ZeroDivisionError), gemmtuned.phase("warm-up"):
        active.call(7)
        _ = 1 / 0
    active.call(1)
    active.flusher.flush()

    assert (stored(active), apart(active)) == (1, {"warm-up": 7})


@pytest.mark.parametrize(("name", "error"), [("", ValueError), (3, TypeError), (None, TypeError)])
def test_a_name_that_is_none_is_refused_and_changes_nothing(name: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        gemmtuned.phase(name)  # type: ignore[arg-type]
    assert phase.current() == ""


def test_old_phases_are_forgotten_and_the_traffic_is_not(active: Counted) -> None:
    with gemmtuned.phase("warm-up"):
        active.call(7)
    active.call(1)
    active.flusher.flush()
    with sqlite3.connect(active.settings.db) as conn:
        conn.execute("UPDATE phase_call SET hour = hour - 29 * 24")
    store = Store(active.settings.db, locks=active.settings.locks)
    assert store.rollup.roll_up(now_s=time.time())
    store.close()

    assert queries.ask(active.settings.db, "SELECT * FROM phase_call") == []
    assert stored(active) == 1


PROGRAM = """
import os, json, torch, gemmtuned
x, w = torch.randn(4, 16), torch.randn(16, 8)
with gemmtuned.phase("warm-up"):
    for _ in range(100):
        x @ w
    if os.fork() == 0:
        for _ in range(3):
            x @ w  # a child is under no phase
        os._exit(gemmtuned.disable() or 0)
    os.wait()
for _ in range(7):
    x @ w
gemmtuned.disable()
print(json.dumps(True))
"""


def test_a_real_programs_warm_up_is_left_out(home: Home) -> None:
    assert home.run(PROGRAM).said

    assert {row["phase"]: row["calls"] for row in phases(home.path / "tune.db")} == {"warm-up": 100}
    assert home.calls() == 10


def test_calls_of_our_ops_are_of_the_phase_that_they_are_made_in() -> None:
    counts = OpCounts()
    counts.add(LINEAR, "cpu")
    with gemmtuned.phase("warm-up"):
        counts.add(LINEAR, "cpu")
        counts.add(LINEAR, "cpu")
    assert {s.phase: s.calls for s in counts.drain()} == {"": 1, "warm-up": 2}


def test_a_call_that_comes_while_none_was_counted_counts_once() -> None:
    counts = OpCounts()
    told = counts._taken()  # by our thread, which is about to read them
    counts.add(LINEAR, "cpu")
    assert not told
    assert [s.calls for s in counts.drain()] == [1]


def test_what_too_many_phases_leave_behind_is_counted_in_a_later_one() -> None:
    """Where nobody flushes, it would grow for ever."""
    calls = iter(range(10**6))

    def fetch(records: Any, room: int, anew: int) -> int:
        next(calls)
        records[0] = Record(pack(LINEAR), (0, 0, 1))
        return 1

    unread = Unread(fetch)
    for number in range(2 * _MOST_ASIDE):
        unread.set_aside(f"{number}")
    told = [s.phase for s in unread.drain("last")]
    assert told == [*map(str, range(_MOST_ASIDE)), "last"]


@pytest.mark.parametrize("in_phase", [False, True])
def test_a_drain_between_two_steps_of_another_loses_nothing(in_phase: bool) -> None:
    """As a signal's handler drains, and finds an empty batch, before the library has put anything into it."""
    told: list[Sighting] = []
    calls, waiting = [2, 1], [True]

    def fetch(records: Any, room: int, anew: int) -> int:
        if waiting and waiting.pop():
            told.extend(unread.drain("handler"))
        if not calls:
            return 0
        records[0] = Record(pack(LINEAR), (0, 0, calls.pop()))
        return 1

    unread = Unread(fetch)
    if in_phase:
        unread.set_aside("first")
    told += unread.drain("last")
    assert [(s.phase, s.calls) for s in told] == [("handler", 1), ("first" if in_phase else "last", 2)]
    assert not list(unread.drain())


def test_a_phase_may_begin_while_another_begins_in_the_same_thread(active: Counted) -> None:
    """As a signal's handler does, or a finalizer."""
    waiting, counted = active.drain, []

    def drain() -> Iterator[Sighting]:
        if not counted:
            counted.append(phase.current())
            with gemmtuned.phase("handler"):
                active.call(100)
        yield from waiting()

    active.flusher._drain = drain
    active.call(1)

    def program() -> None:
        with gemmtuned.phase("warm-up"):
            active.call(10)

    thread = threading.Thread(target=program, daemon=True)
    thread.start(), thread.join(10)
    assert not thread.is_alive()
    active.flusher.flush()
    assert (stored(active), apart(active)) == (1, {"handler": 100, "warm-up": 10})


def test_a_torch_that_chooses_kernels_by_another_function_is_left_as_it_is() -> None:
    for other in (staticmethod(len), lambda given: given, None):
        module, choice = ModuleType(AUTOTUNER), type("AlgorithmSelectorCache", (), {"benchmark_choices": other})
        vars(module)["AlgorithmSelectorCache"] = choice
        Compiled()._patch_autotuner(module)
        assert vars(choice)["benchmark_choices"] is other
