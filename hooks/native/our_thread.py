"""What the native hook does for the hook's one thread: begins it, has it sleep, and has forks by C code wait for it."""

from __future__ import annotations

import ctypes
import os
from typing import Any


class OurThread:
    """A part of Native."""

    _lib: ctypes.CDLL
    _knows_ends_of_forks = False

    def at_first_count(self, body: Any) -> bool:
        """Run `body`, a ctypes callback, in a thread of its own when the next new problem is counted; None: do not.

        True when the body given before has not run yet, because no problem was new since.
        """
        return bool(self._lib.gt_at_first_count(body))

    def thread(self, body: Any) -> int:
        """The C function for a thread of ours to begin with, which runs `body` and has forks by C code wait for it."""
        return self._lib.gt_thread(body)  # type: ignore[no-any-return]

    def sleep(self, descriptor: int, timeout_s: float, seen: ctypes.c_uint64) -> bool:
        """Sleep until `wake`, for timeout_s at most; True if there is something to read (-1: from nothing).

        seen: how many wakes the caller knows of; it is brought up to date.
        """
        return bool(self._lib.gt_sleep(descriptor, int(max(timeout_s, 0.0) * 1000) + 1, ctypes.byref(seen)) > 0)

    def wake(self) -> None:
        """End each `sleep`, or the next one of those who do not sleep now."""
        self._lib.gt_wake()

    def python_forks(self, is_so: bool) -> None:
        """Whether this thread's next fork is by Python; False takes that back where none has come."""
        self._lib.gt_python_forks(is_so)
        if is_so and not self._knows_ends_of_forks:  # now, so that it is called after the hook that begins the thread
            self._knows_ends_of_forks = True
            os.register_at_fork(after_in_parent=self._lib.gt_after_python_fork)

    def begin_soon(self) -> None:
        """Have C begin the thread of `at_first_count` once the fork by Python is over, if no count has begun it before.

        For the main thread, within a hook after a fork that was told as one by Python.
        """
        self._lib.gt_begin_soon()
