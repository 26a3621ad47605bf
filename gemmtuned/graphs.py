"""Captured CUDA graphs and new tables: a graph keeps the kernels that it was captured with.

    due = threading.Event()
    gemmtuned.graphs.on_stale(lambda launches: due.set())
    ...
    if due.is_set() and not requests:      # between two requests, in the thread that replays
        due.clear()
        graph = capture()                  # what the server does at its start

Importing this imports neither torch nor sqlite.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["on_stale", "stale_launches"]


def stale_launches() -> int:
    """How many launches in captured graphs run by torch and would be served by the table in use; 0 without the hook.

    Of graphs that are alive and were captured while the hook was on.
    """
    from gemmtuned.hooks.stale import launches

    return launches()


def on_stale(callback: Callable[[int], None]) -> Callable[[], None]:
    """Call `callback(launches)`, from a thread of its own, after each new table that captured graphs do not have.

    Returns a function that takes the callback off again.  Capture in the thread that replays, not in the callback.
    Raises TypeError when it cannot be called.
    """
    from gemmtuned.hooks.stale import on_stale as subscribe

    return subscribe(callback)
