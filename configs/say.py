"""Telling the user something from inside a program that is not ours: one line on stderr, and never an exception.

`logging` is not for our own thread: it asks `threading` who runs, which makes that thread known there, and then a
program that joins every thread it finds waits for ever.  Whoever logs in code that runs in both places calls `tell`.
"""

from __future__ import annotations

import _thread
import logging
import os
import select
import sys
from typing import Final

_STDERR: Final = 2
_ours: set[int] = set()  # idents of our threads


def our_thread() -> None:
    """The calling thread is ours: what is said here goes to the descriptor and not through the program's objects."""
    _ours.add(_thread.get_ident())


def our_thread_is_nobody() -> None:
    """Have `threading` forget the calling thread, ours, if code of the program's has asked it who that is.

    Finalizers of the program's objects run in whichever thread the garbage collector does, and one that logs asks that.
    What `threading` would hold is a stand-in that nobody can join.
    """
    threading = sys.modules.get("threading")
    known: dict[int, object] = getattr(threading, "_active", {})
    if type(known.get(_thread.get_ident())) is getattr(threading, "_DummyThread", None):
        known.pop(_thread.get_ident(), None)


def our_thread_ends() -> None:
    """Undo `our_thread`: its ident may be another thread's next."""
    _ours.discard(_thread.get_ident())


def after_fork() -> None:
    """In a forked child: our threads are not here, and their idents may become those of others."""
    _ours.clear()


def say(text: str) -> None:
    """`gemmtuned: <text>` on stderr."""
    say_line(f"gemmtuned: {text}")


def say_line(line: str) -> None:
    """A line of ours on stderr; nowhere when the program has none, or nobody reads it."""
    try:
        stream = sys.stderr
        if stream is None:
            return
        if _thread.get_ident() in _ours or stream is sys.__stderr__:
            if not _nobody_reads():  # a line left in a buffer would change the program's exit code
                os.write(_STDERR, f"{line}\n".encode(errors="backslashreplace"))
        else:
            stream.write(f"{line}\n")
            stream.flush()
    except Exception:  # noqa: S110  there is nobody left to tell
        pass


class Once:
    """Texts that were told already, the newest of them: what comes again after so many others is told again."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._told: dict[str, None] = {}

    def is_new(self, text: str) -> bool:
        """True for a text that was not told; from now on it was."""
        new = self._told.pop(text, self) is self
        self._told[text] = None
        if len(self._told) > self._most:
            del self._told[next(iter(self._told))]
        return new


def tell(log: logging.Logger, level: int, message: str, *values: object) -> None:
    """As log.log; in our thread a warning is said on stderr and the rest is dropped."""
    if _thread.get_ident() not in _ours:
        log.log(level, message, *values)
    elif level >= logging.WARNING:
        say(message % values if values else message)


def _nobody_reads() -> bool:
    poll = select.poll()
    poll.register(_STDERR, 0)
    return any(state & (select.POLLERR | select.POLLNVAL) for _, state in poll.poll(0))
