"""What part of a program's life its calls belong to: traffic of a warm-up or a profile is no traffic of users.

Calls under a phase are counted with its name, kept beside the traffic, and left out of all that says what is worth
tuning.  A phase holds for the whole process and costs its calls nothing: what was counted is drained where a phase
begins or ends, so the native hook need not know.  A forked child begins under none.

A block is over, too, when nothing holds its object any more: the exception of a signal's handler may come in its
`__exit__`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Final

from gemmtuned.configs.frame_lock import FrameLock
from gemmtuned.configs.unpatched import builtins

__builtins__ = builtins

LONGEST: Final = 60  # characters of a name that are kept

_lock = FrameLock()  # a signal's handler may begin a phase in the middle of a change
_set = ""  # by set_phase
_open: list[weakref.ref[Phase]] = []  # blocks that are open now, in any thread, the newest last


def current() -> str:
    """The phase of calls that are made now; "" under none."""
    blocks = [block for block in (ref() for ref in _open) if block is not None]
    return blocks[-1].name if blocks else _set


class Phase:
    """See gemmtuned.phase. The newest open block names the phase of the whole process, whichever thread opened it."""

    def __init__(self, name: str) -> None:
        self.name = _text(name)[:LONGEST]
        if not self.name:
            raise ValueError("a phase needs a name: gemmtuned.phase('warm-up')")

    def __enter__(self) -> Phase:
        _change(lambda: _open.append(weakref.ref(self)))
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        _change(lambda: _close(self))


def set_phase(name: str) -> None:
    """See gemmtuned.set_phase."""
    text = _text(name)[:LONGEST]

    def put() -> None:
        global _set
        _set = text

    _change(put)


def after_fork() -> None:
    """In a forked child: who opened a block is not here."""
    global _lock, _set
    _lock, _set = FrameLock(), ""
    _open.clear()


def _text(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of a phase is a text, not {name!r}")
    return "".join(c for c in name if c.isprintable())  # SQLite's texts end at a NUL, terminals obey escapes


def _close(block: Phase) -> None:
    for at in range(len(_open) - 1, -1, -1):
        if _open[at]() is block:
            del _open[at]
            break
    _open[:] = [ref for ref in _open if ref() is not None]


def _change(make: Callable[[], None]) -> None:
    """Make a change after all that was counted until now has its phase; at once where an exception cuts that off."""
    made = False

    def once() -> None:
        nonlocal made
        if not made:
            made = True
            make()

    try:
        with _lock:
            activate = sys.modules.get("gemmtuned.hooks.activate")
            hook = None if activate is None else activate.current()
            if hook is not None:
                hook.flusher.between_phases(once)
    finally:
        once()
