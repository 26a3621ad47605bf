"""What parts above the hook have its thread do: patches that wait for a module of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

each_tick: Final[list[Callable[[], bool]]] = []  # called about once a second; one that returns True is done


def turn() -> None:
    """Call all; what raises is done."""
    for follow in [*each_tick]:
        try:
            done = follow()
        except Exception:
            done = True
        if done:
            each_tick.remove(follow)
