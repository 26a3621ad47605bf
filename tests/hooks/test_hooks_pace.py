"""The loader gives the interpreter lock away often enough for the program beside it."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hooked import LINEAR, Home, publish, published

from gemmtuned.configs.aiter_headers import FAMILIES
from gemmtuned.configs.aiter_rows import columns_for, tuned_texts
from gemmtuned.configs.aiter_write import write_file
from gemmtuned.configs.packed import Solutions, pack, unpack
from gemmtuned.configs.settings import UserTables
from gemmtuned.configs.solution import Environment, cpu_device
from gemmtuned.hooks.dispatch import build_table
from gemmtuned.hooks.native.table_rows import PackedRows
from gemmtuned.hooks.pace import free_in_slices, in_slices
from gemmtuned.hooks.routes import Routes
from gemmtuned.hooks.user_tables import UserLoader, usable
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


ROWS = 2000
YOUNG = 3  # 35 where each row leaves what the collector counts


def rows(generation: int) -> list[Any]:
    backends = ("torch_swap", "onednn")
    return [
        published(replace(LINEAR, m=4 + i % 50, n=8 + i // 50), backends[(i + generation) % 2]) for i in range(ROWS)
    ]


@contextmanager
def collections() -> Iterator[list[int]]:
    """The generation of each run of the collector's in this thread, which are as many as in a program."""
    before = gc.get_threshold()
    runs: list[int] = []
    me = threading.get_ident()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and threading.get_ident() == me:
            runs.append(info["generation"])

    gc.set_threshold(700, 10, 10)
    gc.collect()
    gc.callbacks.append(note)
    try:
        yield runs
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)


def test_a_large_table_makes_the_collector_run_hardly_ever(tmp_path: Path) -> None:
    publish(tmp_path / "configs", rows(1), 1)
    here: dict[str, Environment] = {"cpu": environment(cpu_device())}
    with collections() as runs:
        loaded = Loader(tmp_path / "configs").load(newer_than=0)
        assert loaded is not None
        table = build_table(in_slices(loaded[1].packed), here, generation=1, failed=frozenset())
        native = PackedRows(Routes(Any, tmp_path).rows(table))  # type: ignore[arg-type]  no row of these asks it

    assert (len(table), native.count) == (ROWS, ROWS)
    assert len(runs) <= YOUNG and 2 not in runs, runs


def test_a_large_table_of_the_users_makes_the_collector_run_hardly_ever(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    texts = [[*tuned_texts(solution, FAMILIES["bf16"], cpu_device()).values()] for solution in rows(1)]
    write_file(path, columns_for(FAMILIES["bf16"], kind="tuned"), texts)
    user = UserLoader([UserTables("AITER_CONFIG_GEMM_BF16", "bf16", (path,))])
    with collections() as runs:
        assert user.load()
        taken, _ = usable(user, (), check=lambda solution: "")

    assert len(taken) == ROWS
    assert len(runs) <= YOUNG and 2 not in runs, runs


@pytest.mark.long
def test_our_thread_never_collects_all_that_a_program_holds(home: Home) -> None:
    """The hook's thread takes up tables of 10,000 rows one after another beside a million objects of the program's."""
    done = home.run(
        """
        import gc, json, os, sys, threading
        from dataclasses import replace
        from hooked import LINEAR, publish, published, wait_for
        import gemmtuned
        from gemmtuned.hooks import activate

        heap = [[i] for i in range(1_000_000)]
        folder, me, runs = activate.current().settings.config_dir, threading.get_ident(), []

        def note(phase, info):
            if phase == "start" and threading.get_ident() != me:
                runs.append(info["generation"])

        for generation in (1, 2, 3):
            child = os.fork()
            if child == 0:  # what is published is not made here
                activate.deactivate()
                backends = ("torch_swap", "onednn")
                rows = [
                    published(replace(LINEAR, m=4 + i % 50, n=8 + i // 50), backends[(i + generation) % 2])
                    for i in range(10_000)
                ]
                publish(folder, rows, generation)
                os._exit(0)
            gc.collect()
            gc.callbacks.append(note)
            wait_for(lambda: gemmtuned.generation() == generation, limit_s=60)
            gc.callbacks.remove(note)
            os.waitpid(child, 0)
        print(json.dumps(runs))
        """
    )

    assert len(done.said) <= 30 and 2 not in done.said, done.said  # 350 a table where each row leaves objects


def test_packed_solutions_come_back_as_they_were() -> None:
    word = "".join(["n", "o", "n", "e"])  # not the interned one
    solution = published(replace(LINEAR, bias=True), "torch_swap", gain_low=1.25, launch="{}")
    moe = replace(LINEAR, family="moe", experts=8, topk=2, inter=64, act="silu")
    twin = replace(solution, problem=replace(solution.problem, scale=word))

    assert unpack(pack(solution)) == solution
    assert unpack(pack(replace(solution, problem=moe))).problem == moe
    assert pack(twin) == pack(solution)
    assert pack(replace(solution, us=4.0)) != pack(solution)
    held = Solutions([solution, twin])
    assert held == [solution, twin] and held[:1] == [solution] and held[1] == twin and len(held) == 2
    assert not any(map(gc.is_tracked, held.packed))


def test_what_is_let_go_is_gone() -> None:
    items = [[n] for n in range(100)]
    free_in_slices(items)

    assert items == []
