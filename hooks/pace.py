"""The loader's work in small slices, so that it never keeps the interpreter lock from the program for long.

A thread that wants the lock waits for the holder's next pause, or for 5 ms (sys.getswitchinterval), and a call of
the program takes ten microseconds.

Nobody gets the lock while the garbage collector runs.  Of a table of thousands of rows it would walk seven thousand new
objects at once, which is milliseconds; so they are walked by the hundred, as they come.
When all objects of the process are a quarter more than they were, it walks all: that stays as it is.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from gemmtuned.configs.real import sleep

SLICE_S: Final = 1e-4
PAUSE_S: Final = 5e-5  # any sleep gives the lock away
_WALKS_BY_AGE: Final = sys.version_info < (3, 14) and getattr(sys, "_is_gil_enabled", lambda: True)()

Item = TypeVar("Item")


def in_slices(items: Iterable[Item]) -> Iterator[Item]:
    """The items as they are, with a pause after every SLICE_S of the consumer's work."""
    until = time.perf_counter() + SLICE_S
    for item in items:
        yield item
        if time.perf_counter() > until:
            _walk_what_is_young()
            sleep(PAUSE_S)
            until = time.perf_counter() + SLICE_S


def let_go(items: list[Item]) -> None:
    """Drop the items, of which nobody else may hold many: freeing them takes as long as making them."""
    for _ in in_slices(range(len(items))):
        items.pop()


def _walk_what_is_young() -> None:
    """Once the collector has walked the newest objects by itself, which is every 700: not ten times as many later."""
    if _WALKS_BY_AGE and gc.isenabled() and gc.get_count()[1]:
        gc.collect(1)
