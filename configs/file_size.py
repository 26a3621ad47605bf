"""Writes at a limit on the size of files (RLIMIT_FSIZE): one beyond it fails, and ends nothing.

Linux sends the writing thread SIGXFSZ, too, which ends a program that lets signals be as they were.  Python ignores it;
a program may have changed that, and Python leaves it alone in one that embeds it without signal handlers.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import Final

from gemmtuned.configs.unpatched import builtins, signal

__builtins__ = builtins

_OURS: Final = {signal.SIGXFSZ}


def no_signal_at_a_limit() -> Blocked:
    """Around writes of ours in the program's own threads; ours block all signals. A decorator, too."""
    return Blocked()


class Blocked(ContextDecorator):
    """SIGXFSZ, unless it was before."""

    _was = True

    def _recreate_cm(self) -> Blocked:
        return Blocked()

    def __enter__(self) -> None:
        self._was = signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= _OURS
        if not self._was:
            signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)

    def __exit__(self, *error: object) -> None:
        if self._was:
            return
        try:
            signal.sigtimedwait(_OURS, 0)  # one that a write of ours has sent
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)
