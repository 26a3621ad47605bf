"""Messages to the user from inside a user's program: one line on stderr, and never an exception.

Our own thread must not use `logging`: it asks `threading` for the current thread, which registers ours there, and a
program that joins every thread it finds would wait for ever.  Code that runs in both kinds of threads calls `tell`.

A program may close descriptor 2, and then the next file or socket that it opens has that number, whatever sys.stderr
says.  So we write to the descriptor only while it refers to the same file as when the hook began, or to the same as
stdout: a program that sends both to a log does so on purpose.
"""

from __future__ import annotations

import errno
import logging
import select
import sys
from typing import Any, Final

from gemmtuned.configs.file_size import no_signal_at_a_limit
from gemmtuned.configs.unpatched import builtins, get_ident, os, poll

__builtins__ = builtins

_STDERR: Final = 2
_STDOUT: Final = 1
_ours: set[int] = set()  # idents of our threads
_Facts = tuple[int, int] | str | None  # (st_dev, st_ino); the name in /proc, where the system refuses to say; None
_led_to: list[_Facts] = []  # what descriptor 2 referred to when the hook began, by both; empty before that


def begin() -> None:
    """The hook begins: what descriptor 2 refers to now is the program's stderr."""
    _led_to[:] = [_leads_to(_STDERR), _name_of(_STDERR)]


def our_thread() -> None:
    """The calling thread is ours: its messages go to the descriptor, not through the program's sys.stderr."""
    _ours.add(get_ident())


def our_thread_is_nobody() -> None:
    """Make `threading` forget the calling thread, ours, in case code of the program has asked for the current thread.

    Finalizers of the program's objects run in the thread of the garbage collector, and one that logs asks for it.
    `threading` would then keep a stand-in that nobody can join.
    """
    threading = sys.modules.get("threading")
    known: dict[int, object] = getattr(threading, "_active", {})
    if type(known.get(get_ident())) is getattr(threading, "_DummyThread", None):
        known.pop(get_ident(), None)


def our_thread_ends() -> None:
    """Undo `our_thread`, since another thread may get its ident next."""
    _ours.discard(get_ident())


def after_fork() -> None:
    """In a forked child: our threads do not exist here, and other threads may get their idents."""
    _ours.clear()


def say(text: str) -> None:
    """`gemmtuned: <text>` on stderr."""
    say_line(f"gemmtuned: {text}")


def say_line(line: str) -> None:
    """Write a line of ours to stderr; nowhere if the program has none, or nobody reads it."""
    try:
        line = _as_one(line)
        stream = sys.stderr
        if stream is None:
            return
        ours = get_ident() in _ours
        number = _STDERR if ours else _number_of(stream)
        if number is not None and not _takes_a_line(number):
            return
        if number == _STDERR:
            if not _is_stderr():
                return
            if ours or stream is sys.__stderr__:  # a line left in a buffer would change the program's exit code
                text = f"{line}\n".encode(errors="backslashreplace")
                with no_signal_at_a_limit():
                    os.write(_STDERR, text if len(text) <= select.PIPE_BUF else text[: select.PIPE_BUF - 1] + b"\n")
                return
        stream.write(f"{line}\n")
        stream.flush()
    except Exception:  # noqa: S110  there is nobody left to tell
        pass


def _as_one(line: str) -> str:
    """The line with line ends and what else a terminal acts on escaped: names of files have any character."""
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() or "\udc80" <= c <= "\udcff" else ascii(c)[1:-1] for c in line)


class Once:
    """Remembers which texts were said, the newest `most` of them: one that comes again after many others is new."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._said: dict[str, None] = {}

    def is_new(self, text: str) -> bool:
        """True for a text that was not said yet; it counts as said from now on."""
        new = self._said.pop(text, self) is self
        self._said[text] = None
        if len(self._said) > self._most:
            del self._said[next(iter(self._said))]
        return new


def tell(log: logging.Logger, level: int, message: str, *values: object) -> None:
    """As log.log; but in our thread a warning goes to stderr, and lower levels are dropped."""
    if get_ident() not in _ours:
        log.log(level, message, *values)
    elif level >= logging.WARNING:
        say(message % values if values else message)


def _is_stderr() -> bool:
    """Whether descriptor 2 is still the program's stderr, and not a file or socket that it has opened since."""
    if not _led_to:
        begin()
    now = _leads_to(_STDERR)
    return now is not None and (now in _led_to or now == _leads_to(_STDOUT))


def _leads_to(fd: int) -> _Facts:
    """Which file a standard stream is; None for a descriptor that is none.

    Standard streams come from exec or dup2 and stay open on exec; files that Python opens are closed on exec.  A
    program may have had the system refuse these calls (seccomp): that is no word on its streams.
    """
    where: _Facts
    try:
        facts = os.fstat(fd)
        where = facts.st_dev, facts.st_ino
    except OSError as err:
        where = _name_of(fd) if err.errno != errno.EBADF else None
    try:
        return where if os.get_inheritable(fd) else None
    except OSError as err:
        return where if err.errno != errno.EBADF else None


def _name_of(fd: int) -> str | None:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None


def _number_of(stream: Any) -> int | None:
    """The descriptor that a stream writes to; None for one that has none, or does not say."""
    try:
        return stream.fileno()  # type: ignore[no-any-return]
    except Exception:
        return None


def _takes_a_line(fd: int) -> bool:
    """Whether a line of PIPE_BUF bytes can be written without waiting; not if nobody reads, or the pipe is full.

    A parent may read the program's stderr only after its end, which would never come if we waited.
    """
    asked = poll()
    asked.register(fd, select.POLLOUT)
    states = [state for _, state in asked.poll(0)]
    return bool(states) and not states[0] & (select.POLLERR | select.POLLNVAL)
