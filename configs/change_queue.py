"""Changes of one thing, made one at a time, whether threads, a signal handler or a finalizer ask for them.

A signal handler runs in the middle of whatever its thread is doing, and so does a finalizer that the garbage collector
calls.  With a plain lock it would wait for itself; with a re-entrant lock the change that it interrupts would undo what
it did.  So a change that is asked for during another one of the same thread is made right after that one.  A change
that an exception cuts off, wherever it is, keeps no later one from its turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gemmtuned.configs.frame_lock import FrameLock
from gemmtuned.configs.stderr_lines import say
from gemmtuned.configs.unpatched import builtins

__builtins__ = builtins

T = TypeVar("T")


class ChangeQueue:
    """Decides who may change a thing now. A forked child makes a new one."""

    def __init__(self) -> None:
        self._lock = FrameLock()
        self._asked: list[Callable[[], object]] = []

    def make(self, change: Callable[[], T]) -> T | None:
        """Make this change, once other threads are done with theirs, and return its result.

        Return None at once if this thread is in the middle of a change: this one is made right after it, and an error
        in it is reported in one line.
        """
        outermost = False
        try:
            with self._lock as outermost:
                if not outermost:
                    self._asked.append(change)
                    return None
                self._make_asked()  # what an exception kept from being made
                try:
                    return change()
                finally:
                    self._make_asked()
        finally:
            if outermost and self._asked:  # by a handler that came while the lock was given back
                self.make(lambda: None)

    def _make_asked(self) -> None:
        while self._asked:
            try:
                self._asked.pop(0)()
            except Exception as err:  # noqa: PERF203  each is another's
                say(f"a change that was asked for during another one failed: {type(err).__name__}: {err}")
