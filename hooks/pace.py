"""The loader's work in small slices, so that it never keeps the interpreter lock from the program for long.

A thread that wants the lock waits for the holder's next pause, or for 5 ms (sys.getswitchinterval), and a call of
the program takes ten microseconds.

Nobody gets the lock while the garbage collector runs, and it runs in the thread that makes one object too many: what is
kept of each of thousands of items is to be of a kind that it does not count (configs/packed.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from random import SystemRandom
from typing import Final, TypeVar

from gemmtuned.configs import clock
from gemmtuned.configs.unpatched import builtins, sleep

__builtins__ = builtins

SLICE_S: Final = 1e-4
PAUSE_S: Final = 5e-5  # any sleep gives the lock away

Item = TypeVar("Item")
_chance: Final = SystemRandom()  # the functions of the module `random` take numbers from the program's own sequence


def about(seconds: float) -> float:
    """A time near this one, so that programs which began at one moment do not go on in step."""
    return seconds * _chance.uniform(0.8, 1.2)


def in_slices(items: Iterable[Item], hurried: Callable[[], bool] = bool) -> Iterator[Item]:
    """The items as they are, with a pause after every SLICE_S of the consumer's work; none while `hurried` says so."""
    until = clock.monotonic() + SLICE_S
    for item in items:
        yield item
        if clock.monotonic() > until and not hurried():
            sleep(PAUSE_S)
            until = clock.monotonic() + SLICE_S


def free_in_slices(items: list[Item]) -> None:
    """Drop the items, of which nobody else may hold many: freeing them takes as long as making them."""
    for _ in in_slices(range(len(items))):
        items.pop()
