"""A lock whose holder has ended is free, however it ended."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from gemmtuned.configs.frame_lock import FrameLock, Running


class Late(Exception):
    pass


class Thing:
    pass


def cut_off(lock: FrameLock, at: int) -> int:
    """Raise Late at one event of the lock's, as a signal's handler may; how many there were."""
    seen = 0

    def local(_: FrameType, __: str, ___: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == at:
            raise Late
        return local

    def use() -> None:
        with lock:
            pass
        if lock.enter(1.0):
            lock.leave()

    sys.settrace(lambda frame, *_: local if frame.f_code in (use.__code__, *ITS_CODE) else None)
    try:
        use()
    finally:
        sys.settrace(None)
    return seen


ITS_CODE = tuple(f.__code__ for f in vars(FrameLock).values() if hasattr(f, "__code__"))


def test_wherever_an_exception_comes_other_threads_get_the_lock() -> None:
    lock = FrameLock()
    events = cut_off(lock, 0)
    assert events > 20
    caught = []
    for at in range(1, events + 1):
        try:
            cut_off(lock, at)
        except Late as err:
            caught.append(err)  # its traceback keeps the frames
        got = []
        thread = threading.Thread(target=lambda got=got: got.append(lock.enter(5.0)))
        thread.start()
        thread.join()
        assert got == [True], at
    assert len(caught) > 20


def test_what_is_left_locked_keeps_nothing_of_its_callers() -> None:
    lock, thing = FrameLock(), Thing()
    gone = weakref.ref(thing)

    def call(_: Thing) -> None:
        lock.enter(1.0)
        raise Late

    with pytest.raises(Late):
        call(thing)
    del thing
    gc.collect()
    assert gone() is None
    assert lock.enter(0.0)
    lock.leave()


def test_a_later_call_with_the_same_frame_holds_nothing_yet() -> None:
    """Frames are made where earlier ones were."""
    lock, seen = FrameLock(), set[int]()

    def call(*, late: bool) -> bool:
        outermost = lock.__enter__()
        seen.add(id(sys._getframe()))
        if late:
            raise Late
        lock.__exit__()
        return outermost

    for _ in range(20):
        with suppress(Late):  # keeps nothing of the frame
            call(late=True)
        assert call(late=False)
    assert len(seen) < 40


def test_a_call_is_not_over_because_its_generator_yields_in_the_middle_of_a_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look takes one frame after the other, and the thread runs on meanwhile."""
    on_top, looked_at, has_yielded, end = (threading.Event() for _ in range(4))
    calls: list[Running] = []

    def generator() -> Iterator[None]:
        on_top.set()
        looked_at.wait(5.0)
        yield

    def call() -> None:
        calls.append(Running(sys._getframe()))
        for _ in generator():
            has_yielded.set()
            end.wait(5.0)

    def is_of(running: Running, frame: FrameType) -> bool:
        if frame.f_code is generator.__code__:
            looked_at.set()
            has_yielded.wait(5.0)
        return was(running, frame)

    was = Running.is_of
    thread = threading.Thread(target=call)
    thread.start()
    on_top.wait(5.0)
    monkeypatch.setattr(Running, "is_of", is_of)
    assert not calls[0].is_over()
    assert has_yielded.is_set()
    end.set()
    thread.join()
    assert calls[0].is_over()


def test_one_at_a_time_in_the_order_in_which_they_came() -> None:
    lock, done, inside = FrameLock(), list[int](), 0

    def work(number: int) -> None:
        nonlocal inside
        with lock:
            inside += 1
            time.sleep(0.001)
            assert inside == 1
            inside -= 1
            done.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
    with lock:
        for thread in threads:
            thread.start()
            time.sleep(0.01)
        assert done == []
    for thread in threads:
        thread.join()
    assert done == [0, 1, 2, 3, 4]


@pytest.mark.timed
def test_who_waits_for_moments_looks_into_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a look takes longer the more threads there are, and in Python 3.11 it locks their list."""
    lock, looks = FrameLock(), []
    monkeypatch.setattr(Running, "is_over", lambda running: looks.append(running))

    def work() -> None:
        with lock:
            time.sleep(0.005)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not looks
    holder = Running(sys._getframe())
    assert lock.hold(holder, 1.0)
    holder.done = True
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not looks, "a fork that has said that it is over"


def test_a_thread_enters_what_it_holds_and_others_wait_until_the_time_is_over() -> None:
    lock, got = FrameLock(), []

    def inner() -> None:
        with lock as outermost:
            assert not outermost

    with lock as outermost:
        assert outermost
        inner()
        thread = threading.Thread(target=lambda: got.append(lock.enter(0.01)))
        thread.start()
        thread.join()
    assert got == [False]


def test_a_fork_holds_it_until_its_caller_goes_on() -> None:
    """Also where what was to run after the fork did not."""
    lock, got = FrameLock(), []

    def ask() -> None:
        thread = threading.Thread(target=lambda: got.append(lock.enter(0.01)))
        thread.start()
        thread.join()

    def before() -> None:
        caller = sys._getframe(1)
        assert lock.hold(Running(caller, at=caller.f_lasti), 0.0)
        ask()

    before()
    ask()
    assert got == [False, True]
