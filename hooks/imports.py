"""Imports in our threads, and forks of the program: never both at once.

A thread that imports holds the module's lock.  A child that is forked meanwhile inherits the lock without the thread,
and whoever imports the module there waits for ever.  So our threads import inside `importing()`, and a fork waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gemmtuned.configs.real import allocate_rlock

WAIT_S: Final = 5.0  # imports end by themselves; but one may wait for the thread that forks, so not for ever

_lock = allocate_rlock()


@contextmanager
def importing() -> Iterator[None]:
    """Around everything in our threads that may import a module."""
    with _lock:
        yield


def pause() -> bool:
    """Wait until none of our threads imports and let none begin; False when that took too long. For a fork."""
    return bool(_lock.acquire(timeout=WAIT_S))


def resume() -> None:
    """Undo a `pause` that returned True."""
    _lock.release()


def after_fork() -> None:
    """In a forked child: whoever held the lock is not here."""
    global _lock
    _lock = allocate_rlock()
