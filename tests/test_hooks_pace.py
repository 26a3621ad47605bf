"""The loader gives the interpreter lock away often enough for the program beside it."""

from __future__ import annotations

import gc
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hooked import LINEAR, publish, published

from gemmtuned.configs.solution import Environment, cpu_device
from gemmtuned.hooks.dispatch import build_table
from gemmtuned.hooks.pace import in_slices, let_go
from gemmtuned.hooks.watch import Loader
from gemmtuned.kernels.backends import environment


def test_items_come_through_as_they_are() -> None:
    assert list(in_slices(range(5))) == [0, 1, 2, 3, 4]
    assert list(in_slices([])) == []


def test_another_thread_gets_the_interpreter_lock_within_a_slice_or_so() -> None:
    turns = 0
    stop = threading.Event()

    def program() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            time.sleep(0)

    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # the lock changes hands only where it is given away
    try:
        thread = threading.Thread(target=program)
        thread.start()
        start = turns
        began = time.perf_counter()
        for _ in in_slices(range(10**9)):
            if turns - start >= 5 or time.perf_counter() > began + 30:  # 5 ms on a machine of our own
                break
        seen = turns - start
    finally:
        stop.set()
        sys.setswitchinterval(before)
        thread.join()
    assert seen >= 5


ROWS = 5000


def rows(generation: int) -> list[Any]:
    backends = ("torch_swap", "onednn")
    return [
        published(replace(LINEAR, m=4 + i % 50, n=8 + i // 50), backends[(i + generation) % 2]) for i in range(ROWS)
    ]


@pytest.mark.long
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="its collector walks little at a time by itself")
def test_a_large_table_is_never_walked_by_the_collector_at_once(tmp_path: Path) -> None:
    publish(tmp_path / "configs", rows(1), 1)
    here: dict[str, Environment] = {"cpu": environment(cpu_device())}
    walked: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] < 2:  # of all, when there is a quarter more: that is not ours to say
            walked.append(sum(len(gc.get_objects(generation=n)) for n in range(info["generation"] + 1)))

    gc.collect()
    gc.callbacks.append(note)
    try:
        loaded = Loader(tmp_path / "configs").load(newer_than=0)
        assert loaded is not None
        table = build_table(in_slices(loaded[1]), here, generation=1, failed=frozenset())
    finally:
        gc.callbacks.remove(note)

    assert len(table) == ROWS
    assert len(walked) > 10
    assert max(walked) < 3000  # without us every tenth walk has 7,000


def test_the_collector_is_left_alone_where_the_program_has_switched_it_off() -> None:
    walked: list[str] = []
    gc.disable()
    gc.callbacks.append(lambda phase, _: walked.append(phase))
    try:
        kept = [[n] for n in in_slices(range(20_000))]
    finally:
        gc.callbacks.pop()
        gc.enable()

    assert (len(kept), walked) == (20_000, [])


def test_what_is_let_go_is_gone() -> None:
    items = [[n] for n in range(100)]
    let_go(items)

    assert items == []
