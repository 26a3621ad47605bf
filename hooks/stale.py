"""Captured graphs that a newer table would serve better: they keep the kernels they were captured with."""

from __future__ import annotations

from collections.abc import Callable

from gemmtuned.hooks import activate, watch


def launches() -> int:
    """How many launches in captured graphs run by torch and would be served by the table of now. 0 without the hook.

    Launches of graphs that are alive, each counted once however often it is replayed.  A launch that has a kernel of an
    earlier table does not count.
    """
    hook = activate.current()
    return 0 if hook is None or hook.native is None else hook.native.stale_launches()


def on_stale(callback: Callable[[int], None]) -> Callable[[], None]:
    """See gemmtuned.graphs.on_stale."""
    if not callable(callback):
        raise TypeError(f"on_stale takes a function of one argument, the number of launches; got {callback!r}")

    def look(_: int) -> None:
        found = launches()
        if found:
            callback(found)

    return watch.subscribe(look)
