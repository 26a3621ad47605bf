"""Forks by Python for which we have paused something: what it is, and whether the fork is over.

Most forks find nothing of ours at work, so that nothing is paused (hooks/activate.py).
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from gemmtuned.configs import clock
from gemmtuned.configs.frame_lock import Running
from gemmtuned.configs.unpatched import builtins

if TYPE_CHECKING:
    from types import FrameType

    from gemmtuned.hooks.hook import Hook

__builtins__ = builtins

_getframe = sys._getframe
_forking = threading.local()  # .paused: a Paused for each fork that this thread is in; a fork's hook may fork, too


class Paused(Running):
    """What a thread has paused for its fork; all of it goes on once `done` is set.

    An exception from a signal's handler may keep any of our functions from running to its end, or from running at all.
    So the fork is over, too, when the caller is at another instruction.
    """

    def __init__(self, hook: Hook | None, caller: FrameType | None) -> None:
        here = caller or _getframe()
        super().__init__(here, at=here.f_lasti)
        self.hook, self.called_by_c = hook, caller is None
        self.how = ""  # one of background.Fork
        self.flushes = False  # whether flushes are paused
        self.at_us = clock.now_ns() // 1000  # Unix time

    def is_over(self) -> bool:
        """Whether the fork is over."""
        return self.done or (not self.called_by_c and super().is_over())

    def is_by(self, caller: FrameType | None) -> bool:
        """Whether it is the fork that this caller is in; None: C code, without any of Python's."""
        return self.called_by_c if caller is None else not self.called_by_c and self.is_of(caller)


of_all_threads: list[Paused] = []


def of_this_thread() -> list[Paused]:
    """The forks that this thread is in, the innermost last."""
    found: list[Paused] = _forking.__dict__.setdefault("paused", [])
    return found


def begin(fork: Paused) -> None:
    """Note that this thread is in this fork."""
    of_all_threads.append(fork)
    of_this_thread().append(fork)


def end_all(over: list[Paused]) -> None:
    """Note that these forks are over."""
    for fork in over:
        fork.done = True
        for known in (of_this_thread(), of_all_threads):
            with suppress(ValueError):  # a fork in a signal's handler has removed it
                known.remove(fork)


def was_paused(caller: FrameType | None) -> Paused | None:
    """What was paused for the fork by this caller.

    None when C code forked, as servers that embed Python do.
    """
    mine = of_this_thread()
    for at in range(len(mine) - 1, -1, -1):
        if mine[at].is_by(caller):
            found = mine[at]
            end_all(mine[at:])  # the end of those within it was not reported
            return found
    return None


def in_child() -> None:
    """Forget the forks of other threads, and what those of this thread have done to the parent's thread of ours."""
    of_all_threads[:] = of_this_thread()
    for fork in of_all_threads:
        fork.how = ""
