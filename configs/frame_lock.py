"""Locks for the threads of a program, where an exception from a signal's handler can come at any point.

Between the moment in which a thread gets an ordinary lock and the `try` that gives it back, such an exception leaves it
locked for ever.  A FrameLock belongs to the call that took it, or to a fork that is going on: once that is over, the
lock is free, whether or not it was given back.
"""

from __future__ import annotations

import gc
import math
import sys
from types import FrameType
from typing import Final

from gemmtuned.configs import clock
from gemmtuned.configs.unpatched import builtins, get_ident, sleep, thread_count

__builtins__ = builtins

_getframe, _current_frames = sys._getframe, sys._current_frames
_LOOK_S: Final = 0.0005
_PATIENCE_S: Final = 0.05  # a look into another thread takes up to 0.2 us for each thread of the program
_MORE_FRAMES: Final = 64  # room for those of threads that C began
_YIELDS: Final = 0x20 | 0x80 | 0x200  # code of generators and coroutines: inspect.CO_GENERATOR and its like


class Running:
    """A call of a function that is going on.

    It is named and not held: a frame holds all that its callers have, and a lock that is rarely used would keep it.
    at: the instruction that it is at; None: at any.
    """

    done = False  # whether somebody has said that it is over

    def __init__(self, frame: FrameType, *, at: int | None = None) -> None:
        self.thread = get_ident()
        self._id, self._code, self._at = id(frame), frame.f_code, at

    def is_over(self) -> bool:
        """Whether the call has ended, or has come to another instruction."""
        mine = self.thread == get_ident()
        frame = _getframe(1) if mine else _top_of(self.thread)
        last = None
        while frame is not None:
            if self.is_of(frame):
                return self._at is not None and frame.f_lasti != self._at
            last, frame = frame, frame.f_back
        # The other thread may run meanwhile: a generator that has yielded has no caller any more, and hides ours
        return mine or last is None or not last.f_code.co_flags & _YIELDS

    def is_of(self, frame: FrameType) -> bool:
        """Whether it is the call with this frame."""
        return id(frame) == self._id and frame.f_code is self._code

    def is_of_the_frame_of(self, other: Running) -> bool:
        """Whether both are calls of one thread with one frame, of which only one at a time can be going on."""
        return (self.thread, self._id) == (other.thread, other._id) and self._code is other._code


class FrameLock:
    """One holder at a time, in the order in which they came. A signal's handler enters what its thread has entered.

    For functions that are no generators: one that waits for its next turn does not run, and so holds nothing.
    """

    def __init__(self) -> None:
        self._line: list[Running] = []  # who holds it, and behind that who waits

    @property
    def is_taken(self) -> bool:
        """Whether anybody has it, or waits for it, who has not said that it is over."""
        line = self._line
        return bool(line) and not all(holder.done for holder in tuple(line))

    def __enter__(self) -> bool:
        """False where this thread holds it already, further out."""
        return self._take(Running(_getframe(1)), math.inf) is not None

    def __exit__(self, *_: object) -> None:
        self._give_back(_getframe(1))

    def enter(self, timeout_s: float) -> bool:
        """Take it for the calling function; False when others held it for all of the time."""
        return self._take(Running(_getframe(1)), timeout_s) is not False

    def leave(self) -> None:
        """Give it back, in the function that called `enter`."""
        self._give_back(_getframe(1))

    def hold(self, holder: Running, timeout_s: float) -> bool:
        """Take it until `holder` is over; False when others held it for all of the time."""
        return self._take(holder, timeout_s) is not False

    def _take(self, holder: Running, timeout_s: float) -> bool | None:
        """True; None where this thread holds it already; False when the time is over."""
        until_s = look_s = math.inf
        try:  # each step on the line is one call into C, so no exception leaves half of it
            self._line.append(holder)
            while (first := self._line[0]) is not holder:
                mine, now_s = first.thread == holder.thread, clock.monotonic()
                until_s, look_s = min(until_s, now_s + timeout_s), min(look_s, now_s + _PATIENCE_S)
                if first.done or first.is_of_the_frame_of(holder):  # the latter: an earlier call's, which was cut off
                    self._remove(first)
                    continue
                if mine or now_s >= min(look_s, until_s):
                    look_s = now_s + _PATIENCE_S
                    if first.is_over():
                        self._remove(first)
                        continue
                if mine:
                    self._remove(holder)
                    return None
                if now_s >= until_s:
                    self._remove(holder)
                    return False
                sleep(min(_LOOK_S, until_s - now_s))
        except BaseException:
            self._remove(holder)
            raise
        return True

    def _give_back(self, frame: FrameType) -> None:
        for holder in tuple(self._line):
            if holder.is_of(frame):
                self._remove(holder)

    def _remove(self, holder: Running) -> None:
        try:
            self._line.remove(holder)
        except ValueError:  # it was taken further out, or somebody saw that this holder was over
            pass


def _top_of(thread: int) -> FrameType | None:
    """The frame that a thread is in.

    Python 3.11 makes it with its list of threads locked.  A collection of garbage then, with a finalizer that lets
    other threads run, would stop the program for ever, so we have one come before (python/cpython#106883).
    """
    if sys.version_info[:2] == (3, 11) and gc.isenabled():
        if gc.get_count()[0] + thread_count() + _MORE_FRAMES > gc.get_threshold()[0]:
            gc.collect(0)
    return _current_frames().get(thread)
