"""The loader gives the interpreter lock away often enough for the program beside it."""

from __future__ import annotations

import sys
import threading
import time

from gemmtuned.hooks.pace import SLICE_S, in_slices


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
            if time.perf_counter() > began + 50 * SLICE_S:
                break
        seen = turns - start
    finally:
        stop.set()
        sys.setswitchinterval(before)
        thread.join()
    assert seen >= 5
