"""Telling the user something from inside a program that is not ours: one line on stderr, and never an exception.

`logging` is not for our own thread: it asks `threading` who runs, which makes that thread known there, and then a
program that joins every thread it finds waits for ever.  Whoever logs in code that runs in both places calls `tell`.

A program may close descriptor 2, and the next file or socket that it opens then has that number, whatever sys.stderr
says.  So the descriptor is written to only while it leads where it led when the hook began, or to where stdout goes:
a program that has sent both to a log has done that on purpose.
"""

from __future__ import annotations

import _thread
import logging
import os
import select
import sys
from typing import Any, Final

_STDERR: Final = 2
_STDOUT: Final = 1
_ours: set[int] = set()  # idents of our threads
_led_to: list[tuple[int, int] | None] = []  # where descriptor 2 led when the hook began; empty before that


def begin() -> None:
    """The hook begins: what descriptor 2 leads to now is the program's stderr."""
    _led_to[:] = [_leads_to(_STDERR)]


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
        ours = _thread.get_ident() in _ours
        number = _STDERR if ours else _number_of(stream)
        if number is not None and not _takes_a_line(number):
            return
        if number == _STDERR:
            if not _is_stderr():
                return
            if ours or stream is sys.__stderr__:  # a line left in a buffer would change the program's exit code
                text = f"{line}\n".encode(errors="backslashreplace")
                os.write(_STDERR, text if len(text) <= select.PIPE_BUF else text[: select.PIPE_BUF - 1] + b"\n")
                return
        stream.write(f"{line}\n")
        stream.flush()
    except Exception:  # noqa: S110  there is nobody left to tell
        pass


class Once:
    """Texts that were said already, the newest of them: what comes again after many others is said again."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._told: dict[str, None] = {}

    def is_new(self, text: str) -> bool:
        """True for a text that was not said yet; from now on it was."""
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


def _is_stderr() -> bool:
    """Whether descriptor 2 is the program's stderr, and no file or socket that it has opened since."""
    if not _led_to:
        begin()
    now = _leads_to(_STDERR)
    return now is not None and (now == _led_to[0] or now == _leads_to(_STDOUT))


def _leads_to(fd: int) -> tuple[int, int] | None:
    """(st_dev, st_ino) of a standard stream; None for what is none.

    It came through an exec, or dup2 put it there: neither leaves it to be closed on exec, as Python opens all files.
    """
    try:
        facts = os.fstat(fd)
        return (facts.st_dev, facts.st_ino) if os.get_inheritable(fd) else None
    except OSError:
        return None


def _number_of(stream: Any) -> int | None:
    """The descriptor that a stream writes to; None for one that has none, or does not say."""
    try:
        return stream.fileno()  # type: ignore[no-any-return]
    except Exception:
        return None


def _takes_a_line(fd: int) -> bool:
    """Whether a line of PIPE_BUF bytes can be written without waiting: not where nobody reads, or a pipe is full.

    Who started the program may read its stderr only once it has ended, and it would never end.
    """
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    states = [state for _, state in poll.poll(0)]
    return bool(states) and not states[0] & (select.POLLERR | select.POLLNVAL)
