"""What the native hook does for the hook's one thread: begins it, has it sleep, and has forks by C code wait for it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import byref
from typing import Any

from gemmtuned.configs.unpatched import builtins, os

__builtins__ = builtins

_knows_of_forks: list[ctypes.CDLL] = []  # the library, at most one, from then on that libc calls it at forks
_to_register: list[ctypes.CDLL] = []  # the same, until Python calls it at forks, too
_python_knows: list[bool] = []  # True once hooks/activate.py has its own hooks of a fork


class Functions(ctypes.CDLL):
    """The library's functions, each made with its first use: a program that only counts takes a third of them.

    signatures: name, type of the result and types of the arguments of each.
    """

    def __init__(self, path: str, signatures: Iterable[tuple[Any, ...]]) -> None:
        self._signatures = {name: types for name, *types in signatures}
        super().__init__(path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        function: Any = self[name]
        function.restype, *arguments = self._signatures[name]
        function.argtypes = arguments
        setattr(self, name, function)
        return function


def knows_of_forks(lib: ctypes.CDLL) -> None:
    """Libc calls this library at each fork for the life of the process, whether a hook is on or not."""
    if not _knows_of_forks:
        _to_register[:] = [lib]
        _knows_of_forks[:] = [lib]
    if _python_knows:
        python_tells()


def python_tells() -> None:
    """Have Python call the library as the first and the last at each fork. Our hooks written in Python are there.

    Untold, it would take such a fork for one by C code, and let go of Python's lock in the middle of it.  From 3.13 on
    `os.fork` holds the list of Python's threads locked then, for which another thread would wait for ever.
    """
    _python_knows[:] = [True]
    while _to_register:  # hooks before a fork are called from the last one on, those after it from the first one on
        _register(_to_register.pop())


def _register(lib: ctypes.CDLL) -> None:
    os.register_at_fork(before=lib.gt_before_python_fork, after_in_parent=lib.gt_after_python_fork)


class OurThread:
    """A part of Native."""

    _lib: ctypes.CDLL

    def at_first_count(self, body: Any) -> bool:
        """Run `body`, a ctypes callback, in a thread of its own when the next new problem is counted; None: do not.

        True when the body given before has not run yet, because no problem was new since.
        """
        return bool(self._lib.gt_at_first_count(body))

    def thread(self, body: Any) -> int:
        """The C function for a thread of ours to begin with, which runs `body` and has forks by C code wait for it."""
        return self._lib.gt_thread(body)  # type: ignore[no-any-return]

    def is_held(self) -> bool:
        """Whether our thread sleeps until the fork by Python that the calling thread is in is over."""
        return bool(self._lib.gt_is_held())

    def release_gate(self) -> None:
        """Our thread may wake up before that fork is over."""
        self._lib.gt_release_gate()

    @property
    def forked_us(self) -> int:
        """Unix time in microseconds at which this process was forked; 0 where it was not, since the library is here."""
        return int(self._lib.gt_forked_us())

    def watched(self, descriptor: int, facts: bytes) -> None:
        """A forked child is to close its copy of this descriptor, if /proc says these facts of it; -1: of none."""
        self._lib.gt_watched(descriptor, facts, len(facts))

    def sleep(self, descriptor: int, timeout_s: float, seen: ctypes.c_uint64) -> bool:
        """Sleep until `wake`, for timeout_s at most; True if there is something to read (-1: from nothing).

        seen: how many wakes the caller knows of; it is brought up to date.
        """
        return bool(self._lib.gt_sleep(descriptor, int(max(timeout_s, 0.0) * 1000) + 1, byref(seen)) > 0)

    def wake(self) -> None:
        """End each `sleep`, or the next one of those who do not sleep now."""
        self._lib.gt_wake()

    def begin_soon(self) -> None:
        """Have C begin the thread of `at_first_count` once the fork by Python is over, if no count has begun it before.

        For the main thread, within a hook after a fork of which Python knows.
        """
        self._lib.gt_begin_soon()
