"""Writes at a limit on the size of files (RLIMIT_FSIZE): one beyond it fails, and ends nothing.

Linux sends the writing thread SIGXFSZ, too, which ends a program that lets signals be as they were.  Python ignores it;
a program may have changed that, and Python leaves it alone in one that embeds it without signal handlers.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_signal_at_a_limit() -> Iterator[None]:
    """Around writes of ours in the program's own threads; ours block all signals."""
    ours = {signal.SIGXFSZ}
    if ours <= signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        yield
        return
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, ours)
        yield
    finally:
        try:
            signal.sigtimedwait(ours, 0)  # one that a write of ours has sent
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ours)
