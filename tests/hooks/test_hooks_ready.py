"""Waiting for the published table: who waits, for how long, and what is told."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from hooked import LINEAR, Home, publish, published

from gemmtuned.hooks.ready import Ready


class Thread:
    """A thread that gives a Ready its turns when woken, and needs `takes_s` to make things current."""

    def __init__(self, takes_s: float, wait_s: float = 5.0) -> None:
        self.current = False
        self.turns = 0
        self._takes_s = takes_s
        self._woken = threading.Event()
        self.ready = Ready(
            is_current=lambda: self.current, make_current=self._make, wake=self._woken.set, wait_s=wait_s
        )
        threading.Thread(target=self._run, daemon=True).start()

    def _make(self) -> None:
        self.turns += 1
        time.sleep(self._takes_s)
        self.current = True

    def _run(self) -> None:
        while True:
            self._woken.wait()
            self._woken.clear()
            if self.ready.due_s() == 0.0:
                self.ready.turn()


def test_whoever_waits_has_the_thread_hurry_and_goes_on_at_once() -> None:
    thread = Thread(takes_s=0.1)
    began_s = time.monotonic()

    assert thread.ready.wait(20.0)
    assert 0.1 <= time.monotonic() - began_s < 10.0
    assert thread.ready.wait(0.0)
    assert thread.turns == 1


def test_a_wait_is_bounded_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gemmtuned.hooks")
    thread = Thread(takes_s=60.0, wait_s=1.0)
    began_s = time.monotonic()
    for _ in range(50):  # many graphs: one wait, and not one each
        thread.ready.before_capture()
    assert 1.0 <= time.monotonic() - began_s < 20.0
    thread.current = True
    thread.ready.before_capture()

    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "captured without the tuned kernels" in caplog.text


def test_a_wait_that_was_worth_it_is_told_with_its_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gemmtuned.hooks")
    thread = Thread(takes_s=0.02)
    thread.ready.before_capture()

    assert [r.levelname for r in caplog.records] == ["INFO"]
    assert "waited_s=" in caplog.text


def test_a_program_waits_for_the_table_of_a_device_that_has_just_come(home: Home) -> None:
    """Places stand for GPUs here: a second one appears as a context would, the table is active there after the wait."""
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 1)
    done = home.run(
        """
        import json, time, torch, gemmtuned
        from gemmtuned.hooks import activate
        hook = activate.current()
        first = [gemmtuned.ready(60), gemmtuned.generation()]
        time.sleep(0.3)
        before = hook.tables.active_us
        hook.where.environment = lambda place, known=hook.where.environment: known("cpu")
        hook.where.in_use = lambda: ("cpu", "cuda:0")
        was = hook._is_current()
        began = time.monotonic()
        hook.ready.before_capture()
        took = time.monotonic() - began
        again = time.monotonic()
        hook.ready.before_capture()
        quick = time.monotonic() - again < 0.5
        print(json.dumps([first, was, hook.tables.built_for, hook.tables.active_us > before, took < 5, quick]))
        """,
        GEMMTUNED_FLUSH_S="1000",
    )
    assert done.said == [[True, 1], False, ["cpu", "cuda:0"], True, True, True]


def test_in_a_forked_child_a_capture_is_served_by_the_childs_own_thread(home: Home) -> None:
    home.path.mkdir()
    publish(home.path / "configs", [published(LINEAR, "torch_swap")], 1)
    done = home.run(
        """
        import json, os, time, torch, gemmtuned
        from gemmtuned.hooks import activate, patches
        hook = activate.current()
        gemmtuned.ready(60)

        class Graph:
            def capture_begin(self):
                self.built_for = hook.tables.built_for
            def replay(self):
                pass

        torch.cuda.CUDAGraph = Graph
        library = hook.native
        type(library).has_cuda = property(lambda self: True)
        hook.patches.graphs = patches.watch_graphs(library, hook.settings, lambda: hook.ready.before_capture())
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            hook.where.environment = lambda place, known=hook.where.environment: known("cpu")
            hook.where.in_use = lambda: ("cpu", "cuda:0")  # the child has made a context
            graph = Graph()
            graph.capture_begin()
            os.write(write, json.dumps(graph.built_for).encode())
            os._exit(0)
        os.waitpid(child, 0)
        print(os.read(read, 100).decode())
        """,
        GEMMTUNED_FLUSH_S="1000",
    )
    assert done.said == ["cpu", "cuda:0"]


@pytest.mark.parametrize("env", [{}, {"GEMMTUNED_DISPATCH": "0"}, {"GEMMTUNED": "0", "AITER_TUNE_GEMM": "0"}])
def test_where_there_is_nothing_to_wait_for_nobody_waits(home: Home, env: dict[str, str]) -> None:
    done = home.run(
        """
        import json, time, torch, gemmtuned
        gemmtuned.ready(60)
        began = time.monotonic()
        print(json.dumps([gemmtuned.ready(60), time.monotonic() - began < 1]))
        """,
        **env,
    )
    assert done.said == [True, True]
