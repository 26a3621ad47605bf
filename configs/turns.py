"""Changes of one thing, made one at a time, whether threads, a signal handler or a finalizer ask for them.

A signal handler runs in the middle of whatever its thread is doing, and so does a finalizer that the garbage collector
calls.  With a plain lock it would wait for itself; with a re-entrant lock the change that it interrupts would undo what
it did.  So a change that is asked for during another one of the same thread is made right after that one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gemmtuned.configs.say import say
from gemmtuned.configs.unpatched import allocate_rlock

T = TypeVar("T")


class Turns:
    """Decides who may change a thing now. A forked child makes a new one."""

    def __init__(self) -> None:
        self._lock = allocate_rlock()
        self._under_way = False
        self._asked: list[Callable[[], object]] = []

    def make(self, change: Callable[[], T]) -> T | None:
        """Make this change, once other threads are done with theirs, and return its result.

        Return None at once if this thread is in the middle of a change: this one is made right after it, and an error
        in it is reported in one line.
        """
        with self._lock:
            if self._under_way:
                self._asked.append(change)
                return None
            self._under_way = True
            try:
                return change()
            finally:
                self._under_way = False
                while self._asked:
                    self._make_later(self._asked.pop(0))

    def _make_later(self, change: Callable[[], object]) -> None:
        try:
            self.make(change)
        except Exception as err:
            say(f"a change that was asked for during another one failed: {type(err).__name__}: {err}")
